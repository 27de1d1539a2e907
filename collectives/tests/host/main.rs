//! The host backend, seen from outside: ranks as threads over one allocation, and as processes.

mod common;
mod contract;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod environment;
mod exact;
mod late;
mod missing_links;
mod mixed;
mod process;
mod random_matrices;
mod refused;
mod small_matrices;
mod splits;
