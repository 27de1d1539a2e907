//! Selection of an algorithm before the engine's rule comes: requests of options and the environment (`request`), and tables of
//! what was measured to be the fastest (`measured`).

mod measured;
mod request;

#[cfg(feature = "testing")]
pub use measured::read_table;
pub(crate) use measured::{read_rows, table_files};
pub(crate) use request::RequestedName;
