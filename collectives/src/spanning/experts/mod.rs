//! Dispatch to experts and combine, over hosts.
//!
//! A token travels to each host that has experts of it once, to the rank that *forwards* this rank's tokens there: for index `i`
//! on its host the one of index `i`, modulo that host's number of ranks. An *entry* goes with each row: the token's number,
//! which ranks need it, its ids and weights. The forwarding rank writes the row into the memory of its host's ranks, as a rank of one host does. Rows come to lie where
//! they do on one host: every rank knows from a table of all ranks' counts, which travels with the agreement on the call. Chunks
//! of tokens are on their way to another host while those before them, and the tokens of this host, are written inside.
//!
//! Combine goes the other way. Ranks write the rows of a token into the memory of the rank that forwarded it, which adds them up
//! in the order of ranks, in `f32`. That partial sum travels rounded to the buffer's type, and the token's rank adds up the hosts
//! in their order, its own host's sum unrounded. So results have the same bits in every run (rule S7), but not those of one host.
//!
//! | file | holds |
//! | --- | --- |
//! | `forwarding` | which rank forwards whose tokens, and where rows come back to |
//! | `table` | counts and errors of all ranks, which travel with the agreement on a call |
//! | `token_list` | which tokens go to a host, and what travels with them |
//! | `transit` | memory of rows on their way |
//! | `steps` | what both calls do |
//! | `dispatch`, `combine` | the calls |

mod combine;
mod dispatch;
mod forwarding;
mod steps;
mod table;
mod token_list;
mod transit;

pub(super) use forwarding::Forwarding;
pub(crate) use forwarding::combine_areas;
pub(super) use transit::ExpertTransit;
