//! The host backend, seen from outside: ranks as threads over one allocation, and as processes.

mod common;
mod contract;
mod exact;
mod process;
mod traffic;
