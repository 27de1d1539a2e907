//! Where things lie, in the control block and in the data of a call, and what follows from that alone.
//!
//! | file | holds |
//! | --- | --- |
//! | `control` | the control block of a rank |
//! | `abort` | reports of why a rank gave up, in control blocks |
//! | `place` | this rank's addresses of a call's data |
//! | `numbers` | numbers that others may write meanwhile |
//! | `paired_groups` | how links group the ranks |
//! | `load_balance` | which rank copies how much of an uneven all-to-all |
//! | `expert_routing`, `expert_scratch` | which token goes to which expert, and the lists that this takes |

mod abort;
pub(in crate::host) mod control;
pub(in crate::host) mod expert_routing;
pub(in crate::host) mod expert_scratch;
pub(in crate::host) mod load_balance;
pub(in crate::host) mod numbers;
pub(in crate::host) mod paired_groups;
pub(in crate::host) mod place;
