//! The families of `check`, with the kernels that each of them runs: `bench/sanitize` takes them from here, so that a kernel
//! that is in none is found by a test (`tests/tests/families.rs`).

use symmpool_collectives::AllReduceAlgorithm;

/// A family: its name, the files in `collectives/kernels` of the kernels that it is for, and whether these share memory in a
/// block, in which tools look for races.
type Family = (&'static str, &'static [&'static str], bool);

/// The name that stands for all-reduces by every single algorithm of devices.
pub(crate) const ALL_REDUCES: &str = "all_reduce";

/// Every family that a quick check has, but for all-reduces by single algorithms: each of these is a family.
const FAMILIES: [Family; 16] = [
    ("auto", &[], false),
    ("growth", &[], true),
    (
        "all_to_all",
        &["all_to_all/all_to_all.cu", "all_to_all/copy_companion.cu", "barrier/barrier.cu"],
        true,
    ),
    ("all_gather_broadcast", &["broadcast/broadcast_pipeline.cu"], true),
    ("reduce_scatter", &[], false),
    ("experts", &["experts/dispatch.cu", "experts/combine.cu"], true),
    ("handles", &[], true),
    ("one_sided", &["one_sided/one_sided.cu", "barrier/measured_barrier.cu"], false),
    ("call_order", &[], true),
    ("p2p", &["p2p/p2p.cu"], false),
    // Their kernels are made of programs, or lie in documents.
    ("plans", &[], true),
    ("odd_plans", &[], true),
    ("native", &[], true),
    ("fused", &["fused/norm_one_shot.cu", "fused/norm_two_shot.cu"], true),
    (
        "matmul",
        &["fused/matmul_scatter.cu", "fused/matmul_gather.cu", "fused/matmul_wait.cu"],
        true,
    ),
    ("matmul_small_m", &["fused/matmul_small_m.cu", "fused/matmul_small_m_received.cu"], true),
];

/// Prints a line for each: its name, and the tools of compute-sanitizer that have something to find there.
pub(crate) fn print() {
    let all_reduces = AllReduceAlgorithm::ALL.into_iter();
    let all_reduces =
        all_reduces.filter_map(|each| Some((each.name(), each.checked()?.shares_memory)));
    let others = FAMILIES.into_iter().map(|(name, _, shares_memory)| (name, shares_memory));
    for (name, shares_memory) in all_reduces.chain(others) {
        println!("{name} memcheck{}", if shares_memory { " racecheck" } else { "" });
    }
}

/// Says that a family begins, for whoever reads the log of a tool.
pub(crate) fn announce(name: &str) {
    println!("family {name}");
}
