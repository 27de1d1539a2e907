//! Lanes against the obvious: a sorted vector of ranges, a log of device calls, other ranks.
//!
//! | file | checks |
//! | --- | --- |
//! | [`naive`] | the model: ranges in a vector, lowest fit |
//! | [`log`] | a backing that writes down every call, and fails on request |
//! | [`script`] | random sequences of calls |
//! | [`against`] | lane and model side by side, every rule after every call |
//! | [`ranks`] | the same calls on many ranks; one rank that strays |
//! | [`rollback`] | ranks that came apart, and are made alike again |
//! | [`growth`] | how many segments are made, and of what sizes |
//! | [`moving`] | when free segments move, which, and where grown memory may lie |
//! | [`limits`] | bad arguments, stale names, failures, and bugs that were |
//! | [`traces`] | how tight real programs are packed |

mod against;
mod growth;
mod limits;
mod log;
mod moving;
mod naive;
mod ranks;
mod rollback;
mod script;
mod traces;
