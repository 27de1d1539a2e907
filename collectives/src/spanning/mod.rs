//! The engine of groups that span hosts: an engine inside each host, and outer engines between them.
//!
//! Where all hosts have as many ranks, a call is *hierarchical*: phases inside the hosts by shared memory, and phases between
//! the ranks of equal index on all hosts by the outer engine. So each byte that leaves a host does so once, over as many
//! connections as hosts have ranks. Large calls go in chunks, of which the phases run beside each other. Other groups use
//! the outer engine between all ranks.
//!
//! The outer engine only moves bytes. Reductions are made here, in the order of hosts, so results have the same bits in every
//! run and on every rank, whatever the outer engine. A host's partial result is rounded to the element type.
//!
//! | file | holds |
//! | --- | --- |
//! | `state` | the state, and how a call begins and ends |
//! | `agreement` | how all hosts agree on a call before its bytes leave one |
//! | `host_message` | the message by which they do, and the state of that |
//! | `checks` | what a rank checks of its own arguments |
//! | `ranks` | where ranks are |
//! | `staging` | memory for data on its way |
//! | `exchange` | moves and reductions between the ranks of an outer engine |
//! | `reductions`, `moves`, `splits` | the collectives |
//! | `interface` | the engine, as communicators use it |

mod agreement;
mod checks;
mod exchange;
mod host_message;
mod interface;
mod moves;
mod ranks;
mod reductions;
mod splits;
mod staging;
mod state;

pub(crate) use staging::STAGING_BYTES;
pub(crate) use state::{SpanningEngine, not_across};
