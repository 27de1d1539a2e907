//! The broadcasts of devices: all-to-alls of a root, one shot of the LL protocol, and stages that peers pass on.
//!
//! | file | holds |
//! | --- | --- |
//! | `pipeline` | stages that peers pass on, with the kernel beside it |

pub(in crate::cuda) mod pipeline;

use crate::cuda::all_gather::ll;
use crate::cuda::all_to_all::one_kernel;
use crate::cuda::all_to_all::row::Exchange;

/// Broadcasts, in the order in which programs see them.
pub(in crate::cuda) static BROADCAST: [&Exchange; 5] = [
    &one_kernel::DIRECT_ROW,
    &one_kernel::LAMPORT_ROW,
    &ll::ROW,
    &one_kernel::RING_ROW,
    &pipeline::ROW,
];
