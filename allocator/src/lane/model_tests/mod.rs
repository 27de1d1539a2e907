//! Lanes compared with simple models: a sorted vector of ranges, a log of device calls, other ranks.
//!
//! | file | checks |
//! | --- | --- |
//! | [`naive`] | the model: ranges in a vector, lowest fit |
//! | [`local_uses`] | uses on streams of one rank alone |
//! | [`log`] | a backing that records every call, and fails on request |
//! | [`script`] | random sequences of calls |
//! | [`against`] | a lane and the model together; checks every rule after every call |
//! | [`ranks`] | the same calls on many ranks; one rank that diverges |
//! | [`rollback`] | ranks that diverged, and return to a common state |
//! | [`growth`] | how many segments are made, and of what sizes |
//! | [`moving`] | when free segments move, which ones, and where new memory may lie |
//! | [`limits`] | bad arguments, stale keys, failures, and regressions |
//! | [`traces`] | how tightly real programs are packed |

mod against;
mod growth;
mod limits;
mod local_uses;
mod log;
mod moving;
mod naive;
mod ranks;
mod rollback;
mod script;
mod traces;
