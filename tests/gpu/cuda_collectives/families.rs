//! The families of `check`, with the kernels that each of them runs: `bench/sanitize` takes them from here, so that a kernel
//! that is in none is found by a test (`tests/tests/families.rs`).

/// A family: its name, the files in `collectives/kernels` of the kernels that it is for, and whether these share memory in a
/// block, in which tools look for races.
type Family = (&'static str, &'static [&'static str], bool);

/// Every family that a quick check has. All-reduces have one for each algorithm.
const FAMILIES: [Family; 26] = [
    ("one_shot_ll", &["all_reduce/one_shot.cu"], false),
    ("one_shot_ll128", &["all_reduce/one_shot_ll128.cu"], false),
    ("one_shot_lamport", &["all_reduce/one_shot.cu"], false),
    ("one_shot_pull", &["all_reduce/one_shot_pull.cu"], false),
    ("two_shot_ll", &["all_reduce/two_shot.cu"], false),
    ("two_shot_lamport", &["all_reduce/two_shot.cu"], false),
    ("two_shot_pull", &["all_reduce/two_shot_pull.cu"], false),
    ("two_shot_push", &["all_reduce/two_shot_push.cu"], false),
    ("two_shot_stages", &["all_reduce/two_shot_stages.cu"], false),
    ("two_shot_copy", &["all_reduce/two_shot_copy.cu", "barrier/barrier.cu"], false),
    ("auto", &[], false),
    ("growth", &[], true),
    ("all_to_all", &["all_to_all/all_to_all.cu", "all_to_all/copy_companion.cu"], true),
    ("all_gather_broadcast", &["broadcast/broadcast_stages.cu"], true),
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
    ("matmul_few", &["fused/matmul_few.cu", "fused/matmul_few_received.cu"], true),
];

/// Prints a line for each: its name, and the tools of compute-sanitizer that have something to find there.
pub(crate) fn print() {
    for (name, _, shares_memory) in FAMILIES {
        println!("{name} memcheck{}", if shares_memory { " racecheck" } else { "" });
    }
}

/// Says that a family begins, for whoever reads the log of a tool.
pub(crate) fn announce(name: &str) {
    println!("family {name}");
}
