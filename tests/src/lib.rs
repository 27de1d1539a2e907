//! What tests of several ranks share: ranks as processes, and proof that nothing of them is left.
//!
//! | part | is |
//! | --- | --- |
//! | [`launch`] | the test's side: starts ranks, hears them, ends those that hang |
//! | [`rank_process`] | a rank's side: who it is, how it meets the others, how it reports |
//! | [`leftovers`] | what processes leave behind: descriptors, sockets, mappings, children |

pub mod launch;
pub mod leftovers;
pub mod rank_process;
