//! The types that everything else is made of. They import nothing but each other.

pub(crate) mod bump_layout;
pub(crate) mod communicator_memory;
pub(crate) mod dtype;
pub(crate) mod float8;
pub(crate) mod kernel_struct;
pub(crate) mod phase_times;
pub(crate) mod place;
pub(crate) mod reduce_op;
pub(crate) mod timeout;
