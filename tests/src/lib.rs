//! Helpers of tests with several ranks: ranks as processes, and checks that they leak nothing.
//!
//! | part | is |
//! | --- | --- |
//! | [`launch`] | the test's side: starts ranks, collects what they report, ends those that hang |
//! | [`rank_process`] | a rank's side: what it shall do, how it joins the others, how it reports |
//! | [`leftovers`] | counts what processes could leave behind: descriptors, sockets, mappings, children |

pub mod launch;
pub mod leftovers;
pub mod rank_process;
