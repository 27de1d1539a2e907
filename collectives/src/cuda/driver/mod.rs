//! The CUDA driver library, as collectives call it.
//!
//! | file | holds |
//! | --- | --- |
//! | `api` | the functions of the library |
//! | `pinned_words` | words of pinned memory, which the device writes |

pub(in crate::cuda) mod api;
pub(in crate::cuda) mod pinned_words;
