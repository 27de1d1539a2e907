//! How a rank waits for others, and how waits end.

pub(crate) mod cores;
pub(in crate::host) mod crowd;
pub(in crate::host) mod fault;
pub(in crate::host) mod shared_cores;
pub(in crate::host) mod waiter;
