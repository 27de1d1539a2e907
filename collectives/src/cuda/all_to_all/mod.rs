//! The all-to-alls of devices: a file for each kernel, with its rows of [`ALL_TO_ALL`].
//!
//! Beside each file is its kernel. Headers that these share are in `collectives/kernels/all_to_all`. All-gathers and broadcasts
//! are all-to-alls in which peers get the same data: `all_gather` and `broadcast` have rows of these, too.
//!
//! | file | holds |
//! | --- | --- |
//! | `one_kernel` | the kernel for any counts: straight into outputs, through inboxes, or in a ring |
//! | `copies` | the kernel beside copy engines |
//! | `row` | a row of the tables |

pub(in crate::cuda) mod copies;
pub(in crate::cuda) mod one_kernel;
pub(in crate::cuda) mod row;

use self::row::Exchange;
use crate::algorithm::AlgorithmId;
use crate::jit::KernelSource;

/// All-to-alls, in the order in which programs see them.
pub(in crate::cuda) static ALL_TO_ALL: [&Exchange; 4] =
    [&one_kernel::DIRECT_ROW, &one_kernel::LAMPORT_ROW, &copies::ROW, &one_kernel::RING_ROW];

static FASTEST: Exchange = Exchange::FASTEST;

/// The kernels of these.
pub(in crate::cuda) const KERNELS: [&KernelSource<'static>; 2] =
    [&one_kernel::KERNEL, &copies::COMPANION];

impl Exchange {
    /// The all-to-all of this number, or whatever is faster.
    pub(in crate::cuda) fn of_all_to_all(id: AlgorithmId) -> &'static Self {
        ALL_TO_ALL.into_iter().find(|row| row.id == id).unwrap_or(&FASTEST)
    }
}
