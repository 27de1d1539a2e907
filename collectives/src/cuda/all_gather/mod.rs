//! The all-gathers of devices: all-to-alls in which every peer gets the same data, and one shot of the LL protocol.
//!
//! | file | holds |
//! | --- | --- |
//! | `ll` | one shot of the LL protocol, also for broadcasts |

pub(in crate::cuda) mod ll;

use crate::cuda::all_to_all::row::Exchange;
use crate::cuda::all_to_all::{copies, one_kernel};

/// All-gathers, in the order in which programs see them.
pub(in crate::cuda) static ALL_GATHER: [&Exchange; 5] = [
    &one_kernel::DIRECT_ROW,
    &one_kernel::LAMPORT_ROW,
    &ll::ROW,
    &copies::ROW,
    &one_kernel::RING_ROW,
];
