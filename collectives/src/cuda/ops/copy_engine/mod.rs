//! Collectives whose data copy engines carry.
//!
//! | file | holds |
//! | --- | --- |
//! | `reduce_arrived` | what copy engines have carried, and the kernel that reduces it |
//! | `pieces` | pieces of data that copy engines carry through scratch beside compute |
//! | `all_reduce`, `all_reduce_pieces` | all-reduces: with the device to themselves, and beside compute |
//! | `reduce_scatter` | reduce-scatters |
//! | `all_gather_pieces` | all-gathers into ordinary memory |
//! | `all_to_all` | all-to-alls and all-gathers |

pub(in crate::cuda) mod all_gather_pieces;
pub(in crate::cuda) mod all_reduce;
pub(in crate::cuda) mod all_reduce_pieces;
pub(in crate::cuda) mod all_to_all;
pub(in crate::cuda) mod pieces;
pub(in crate::cuda) mod reduce_arrived;
pub(in crate::cuda) mod reduce_scatter;
