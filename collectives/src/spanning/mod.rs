//! The engine of groups that span hosts: an engine inside each host, and outer engines between them.
//!
//! Small calls go by the *leaders*, the first ranks of the hosts: one message between each two of them has the data of all
//! ranks, and the description by which the hosts agree on the call. In large calls of hosts that have as many ranks, phases
//! inside the hosts go by shared memory, and phases between the ranks of equal index on all hosts by the outer engine. So
//! each byte that leaves a host does so once, over as many connections as hosts have ranks. All-reduces go in chunks, of
//! which the phases run beside each other. Hosts of different numbers of ranks do so
//! in reductions, and use the outer engine between all ranks in other large calls. `ways` has the sizes.
//!
//! The outer engine only moves bytes. Reductions are made here, in the order of hosts, so results have the same bits in every
//! run, at every size and on every rank, whatever the outer engine. A host's partial result is rounded to the element type.
//!
//! On devices calls are work on streams: copies and reductions of the engine inside the host, transfers of the outer engine, and the
//! collectives inside. Small calls go by no leader there.
//!
//! Waits inside a host sleep soon, as threads of the outer engine need the cores.
//!
//! | file | holds |
//! | --- | --- |
//! | `state` | the state, and how a call begins and ends |
//! | `agreement`, `notice_board` | how all hosts agree on a call before its bytes leave one, and how a host's ranks learn why not |
//! | `host_message` | the message by which they do, and the state of that |
//! | `on_device`, `call_records` | calls on devices, and how hosts compare those behind them |
//! | `phases` | how long phases take |
//! | `checks` | what a rank checks of its own arguments |
//! | `ranks` | where ranks are |
//! | `staging` | memory for data on its way |
//! | `ways` | which calls go by the leaders |
//! | `leaders` | calls that do |
//! | `exchange` | moves and reductions between the ranks of an outer engine |
//! | `reductions`, `moves`, `splits` | the collectives by other ways |
//! | `uneven` | reductions of hosts of different numbers of ranks |
//! | `experts` | dispatch to experts, and combine |
//! | `interface` | the engine, as communicators use it |

mod agreement;
mod call_records;
mod checks;
mod exchange;
mod experts;
mod host_message;
mod interface;
mod leaders;
mod moves;
mod notice_board;
mod on_device;
mod phases;
mod ranks;
mod reductions;
mod splits;
mod staging;
mod state;
mod uneven;
mod ways;

pub(crate) use experts::combine_areas;
pub(crate) use staging::staging_bytes;
pub(crate) use state::{SpanningEngine, not_across};
