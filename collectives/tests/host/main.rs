//! Tests of the engine in host memory through its public API: ranks are threads over one allocation, or processes.

mod contract;
mod exact;
mod flat_heap;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod float_environment;
mod late;
mod missing_links;
mod mixed;
mod oracle;
mod plans;
#[path = "../pool_ranks/mod.rs"]
mod pool_ranks;
mod process;
mod random_matrices;
#[path = "../random_plans/mod.rs"]
mod random_plans;
#[path = "../random_plans/search.rs"]
mod random_search;
#[path = "../random_plans/shrink.rs"]
mod random_shrink;
mod refused;
mod small_matrices;
mod splits;
