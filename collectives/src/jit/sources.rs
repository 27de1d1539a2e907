//! Kernels and their headers, which are part of the program: the files of `collectives/kernels`.

use std::cmp::Ordering;

/// A file with a kernel, which is its one `extern "C"` entry point.
#[derive(Debug)]
pub(crate) struct KernelSource<'a> {
    /// The file's name without the ending.
    pub(crate) name: &'a str,
    /// The file below `collectives/kernels` or `collectives/src/cuda`, or what the compiler calls it in its messages.
    pub(crate) path: &'a str,
    /// The entry point.
    pub(crate) entry: &'a str,
    pub(crate) source: &'a str,
    /// Whether its blocks ask for a grant where communicators share SMs (`symmpool/impl/sm_grant.cuh`).
    pub(crate) asks_for_blocks: bool,
    /// The variants that tests compile: for each row, every combination of the values of its macros.
    #[cfg_attr(not(test), expect(dead_code, reason = "tests compile them"))]
    pub(crate) variants: &'static [&'static [Axis]],
}

/// Threads of a block where kernels share SMs, for kernels that else have two blocks on an SM: nearly as many as both have. A thread
/// needs some registers more to ask for a grant, and with more ranks.
pub(crate) const fn sharing_threads(world: u32) -> u32 {
    if world <= 2 { 896 } else { 768 }
}

/// A macro and the values that it takes.
pub(crate) type Axis = (&'static str, &'static [&'static str]);

macro_rules! headers {
    ($($path:literal),+ $(,)?) => {
        &[$(($path, include_str!(concat!("../../kernels/", $path)))),+]
    };
}

/// The headers that kernels include, by their paths below `collectives/kernels`, which are the names that kernels use.
pub(crate) const HEADERS: &[(&str, &str)] = headers![
    "all_reduce/reduce_loads.cuh",
    "all_reduce/reduce_share.cuh",
    "all_to_all/exchange.cuh",
    "all_to_all/inbox_pipeline.cuh",
    "all_to_all/scratch_pipeline.cuh",
    "all_to_all/traffic.cuh",
    "all_to_all/traffic_layout.cuh",
    "all_to_all/work_assignment.cuh",
    "experts/combine_low_latency.cuh",
    "experts/combine_recv.cuh",
    "experts/counts.cuh",
    "experts/dispatch_low_latency.cuh",
    "experts/handle.cuh",
    "experts/inbox.cuh",
    "experts/params.cuh",
    "experts/params_layout.cuh",
    "experts/recv_rows.cuh",
    "experts/tma_copy.cuh",
    "experts/token_tile.cuh",
    "fused/matmul.cuh",
    "fused/matmul_layout.cuh",
    "fused/matmul_tiles.cuh",
    "fused/matmul_work.cuh",
    "fused/norm.cuh",
    "fused/norm_layout.cuh",
    "fused/row_sums.cuh",
    "fused/small_m_sums.cuh",
    "fused/stages.cuh",
    "reduce_local/reduce_local_layout.cuh",
    "symmpool/collective.cuh",
    "symmpool/device.cuh",
    "symmpool/device_comm.cuh",
    "symmpool/impl/arithmetic.cuh",
    "symmpool/impl/call_block.cuh",
    "symmpool/impl/collective_bodies.cuh",
    "symmpool/impl/comm.cuh",
    "symmpool/impl/comm_layout.cuh",
    "symmpool/impl/companion.cuh",
    "symmpool/impl/copy.cuh",
    "symmpool/impl/copy_bodies.cuh",
    "symmpool/impl/handshake.cuh",
    "symmpool/impl/inbox.cuh",
    "symmpool/impl/lamport.cuh",
    "symmpool/impl/lamport_channel_bodies.cuh",
    "symmpool/impl/lamport_escaped.cuh",
    "symmpool/impl/ll.cuh",
    "symmpool/impl/ll128.cuh",
    "symmpool/impl/ll128_channel_bodies.cuh",
    "symmpool/impl/ll_channel_bodies.cuh",
    "symmpool/impl/memory_channel_bodies.cuh",
    "symmpool/impl/partial.cuh",
    "symmpool/impl/partition.cuh",
    "symmpool/impl/peer_blocks.cuh",
    "symmpool/impl/plan.cuh",
    "symmpool/impl/plan_layout.cuh",
    "symmpool/impl/ptx.cuh",
    "symmpool/impl/ptx_tensor.cuh",
    "symmpool/impl/reduce_bodies.cuh",
    "symmpool/impl/reduce_lanes.cuh",
    "symmpool/impl/sm_grant.cuh",
    "symmpool/impl/types.cuh",
    "symmpool/impl/vector.cuh",
    "symmpool/impl/vector_loop_bodies.cuh",
    "symmpool/impl/warps.cuh",
    "symmpool/lamport_channel.cuh",
    "symmpool/ll128_channel.cuh",
    "symmpool/ll_channel.cuh",
    "symmpool/memory_channel.cuh",
    "symmpool/reduce.cuh",
    "symmpool/span.cuh",
    "symmpool/vector_loops.cuh",
];

/// Kernels of this folder. Others lie beside their rows, in `cuda/all_reduce` and the like.
pub(crate) const KERNELS: &[&KernelSource<'static>] = &[
    &BARRIER,
    &COMBINE,
    &MATMUL_SMALL_M,
    &MATMUL_SMALL_M_RECEIVED,
    &MATMUL_GATHER,
    &MATMUL_SCATTER,
    &MATMUL_WAIT,
    &NORM_ONE_SHOT,
    &NORM_TWO_SHOT,
    &DISPATCH,
    &MEASURED_BARRIER,
    &ONE_SIDED,
    &P2P,
    &REDUCE_LOCAL,
];

/// Every code of [`DType::REDUCED`](crate::DType::REDUCED), the 8-bit floats included.
const DTYPE: Axis = ("DTYPE", &["1", "2", "3", "4", "5", "6", "7", "8", "9", "10"]);
/// Every code of [`ReduceOp`](crate::ReduceOp).
const OP: Axis = ("OP", &["1", "2", "3", "4", "5"]);

/// Numbers of ranks: those of usual machines, of which 8 is the most.
pub(crate) const WORLD: Axis = ("WORLD", &["2", "4", "8"]);
/// Numbers of ranks for kernels that have larger blocks for few ranks.
pub(crate) const UP_TO_4: Axis = ("WORLD", &["2", "4"]);
pub(crate) const ABOVE_4: Axis = ("WORLD", &["8"]);
/// Numbers of ranks that are not usual, for which each kernel is compiled with one type.
pub(crate) const ODD: Axis = ("WORLD", &["3", "5", "6", "7"]);
pub(crate) const ODD_UP_TO_4: Axis = ("WORLD", &["3"]);
/// Numbers of ranks for kernels that are compiled with several types for the fewest ranks and for the most.
pub(crate) const OTHERS: Axis = ("WORLD", &["3", "4", "5", "6", "7"]);
pub(crate) const OTHERS_UP_TO_4: Axis = ("WORLD", &["3", "4"]);
pub(crate) const ODD_ABOVE_4: Axis = ("WORLD", &["5", "6", "7"]);
/// One type for each way to widen, reduce and narrow, for kernels with more parameters than these.
pub(crate) const SOME_DTYPES: Axis = ("DTYPE", &["1", "2", "4", "6", "9"]);
pub(crate) const LAMPORT_DTYPES: Axis = ("DTYPE", &["1", "4", "9"]);
/// The fewest ranks that send to each other, and the most.
pub(crate) const WORLDS_OF_2_AND_8: Axis = ("WORLD", &["2", "8"]);
/// Whether rows lie by expert.
const BY_EXPERT: Axis = ("BY_EXPERT", &["0", "1"]);
pub(crate) const BYTES: Axis = ("DTYPE", &["7"]);
pub(crate) const F32: Axis = ("DTYPE", &["1"]);
pub(crate) const SUM: Axis = ("OP", &["1"]);
/// Threads of a block.
pub(crate) const WIDE: Axis = ("THREADS", &["512"]);
pub(crate) const NARROW: Axis = ("THREADS", &["256"]);
/// Blocks of an SM: two where registers suffice.
pub(crate) const ONE: Axis = ("BLOCKS", &["1"]);
pub(crate) const TWO: Axis = ("BLOCKS", &["2"]);
/// Protocols of inboxes.
pub(crate) const LL: Axis = ("PROTOCOL", &["LL"]);
pub(crate) const LAMPORT: Axis = ("PROTOCOL", &["LAMPORT"]);
pub(crate) const BOTH: Axis = ("PROTOCOL", &["LL", "LAMPORT"]);
/// Collectives of kernels with two shots.
pub(crate) const REDUCTIONS: Axis = ("COLLECTIVE", &["ALL_REDUCE", "REDUCE_SCATTER"]);
pub(crate) const ALL_REDUCE: Axis = ("COLLECTIVE", &["ALL_REDUCE"]);
pub(crate) const MOVES: Axis = ("COLLECTIVE", &["ALL_GATHER", "BROADCAST"]);
/// Ways of an all-to-all.
pub(crate) const INBOXES: Axis = ("DIRECT", &["0"]);
pub(crate) const DIRECT: Axis = ("DIRECT", &["1"]);
pub(crate) const HOST_COUNTS: Axis = ("DEVICE_COUNTS", &["0"]);
pub(crate) const DEVICE_COUNTS: Axis = ("DEVICE_COUNTS", &["1"]);
pub(crate) const ANY_COUNTS: Axis = ("DEVICE_COUNTS", &["0", "1"]);
const ANY_TOKENS: Axis = ("ONLY_LOW_LATENCY", &["0"]);
const ONLY_LOW_LATENCY: Axis = ("ONLY_LOW_LATENCY", &["1"]);

/// Whether a kernel's source makes an `SmGrant`, by itself or by a `Collective`.
pub(crate) const fn asks_for_blocks(source: &str) -> bool {
    contains(source.as_bytes(), b"SmGrant grant(")
        || contains(source.as_bytes(), b"Collective collective(")
}

const fn contains(text: &[u8], wanted: &[u8]) -> bool {
    let mut at = 0;
    while at + wanted.len() <= text.len() {
        let mut same = 0;
        while same < wanted.len() && text[at + same] == wanted[same] {
            same += 1;
        }
        if same == wanted.len() {
            return true;
        }
        at += 1;
    }
    false
}

/// A kernel whose file lies beside the source file that has this: the folder and the name by which compilers know it, and the
/// variants that tests compile. Each list has an axis for each macro that the kernel's text needs. The entry point is
/// `symmpool_` and the name.
macro_rules! kernel_beside {
    ($folder:literal / $name:literal, $([$($axis:expr),+ $(,)?]),+ $(,)?) => {
        $crate::jit::sources::KernelSource {
            name: $name,
            path: concat!($folder, "/", $name, ".cu"),
            entry: concat!("symmpool_", $name),
            source: include_str!(concat!($name, ".cu")),
            asks_for_blocks: $crate::jit::sources::asks_for_blocks(include_str!(concat!(
                $name, ".cu"
            ))),
            variants: &[$(&[$($axis),+]),+],
        }
    };
}
pub(crate) use kernel_beside;

// A kernel of a communicator.
macro_rules! collective {
    ($folder:literal / $name:literal, $([$($axis:expr),+ $(,)?]),+ $(,)?) => {
        collective!($folder / $name as concat!("symmpool_", $name), $([$($axis),+]),+)
    };
    ($folder:literal / $name:literal as $entry:expr, $([$($axis:expr),+ $(,)?]),+ $(,)?) => {
        KernelSource {
            name: $name,
            path: concat!($folder, "/", $name, ".cu"),
            entry: $entry,
            source: include_str!(concat!("../../kernels/", $folder, "/", $name, ".cu")),
            asks_for_blocks: asks_for_blocks(include_str!(concat!(
                "../../kernels/",
                $folder,
                "/",
                $name,
                ".cu"
            ))),
            variants: &[$(&[$($axis),+]),+],
        }
    };
}

/// A handshake alone, which measures how long it waits for each rank.
pub(crate) const MEASURED_BARRIER: KernelSource<'static> =
    collective!("barrier" / "measured_barrier", [WORLD, NARROW], [ODD, NARROW]);

/// A handshake alone.
pub(crate) const BARRIER: KernelSource<'static> = collective!(
    "barrier" / "barrier",
    [WORLD, ("THREADS", &["128"]), ("NOTIFY_COMPANION", &["0", "1"])],
    [
        ("WORLD", &["1", "3", "5", "6", "7"]),
        ("THREADS", &["128"]),
        ("NOTIFY_COMPANION", &["0", "1"])
    ],
);

/// Copies and signals between two ranks.
pub(crate) const ONE_SIDED: KernelSource<'static> = collective!(
    "one_sided" / "one_sided",
    [("WORLD", &["1", "2", "8"]), ("OPERATION", &["COPY", "COPY_AND_SIGNAL"]), WIDE],
    [("WORLD", &["1", "2", "8"]), ("OPERATION", &["SIGNAL", "WAIT"]), ("THREADS", &["32"])],
    [ODD, ("OPERATION", &["COPY"]), WIDE],
    [ODD, ("OPERATION", &["SIGNAL"]), ("THREADS", &["32"])],
);

/// Send and recv between two ranks.
pub(crate) const P2P: KernelSource<'static> = collective!(
    "p2p" / "p2p",
    [WORLD, ("OPERATION", &["SEND", "RECEIVE"]), WIDE],
    [ODD, ("OPERATION", &["SEND", "RECEIVE"]), WIDE],
);

/// Sends tokens to the ranks of their experts.
pub(crate) const DISPATCH: KernelSource<'static> = collective!(
    "experts" / "dispatch" as "_ZN8symmpool8dispatchEv",
    [WORLDS_OF_2_AND_8, WIDE, BYTES, BY_EXPERT, ("QUANTIZES", &["0"]), ANY_TOKENS],
    [WORLDS_OF_2_AND_8, WIDE, BF16, BY_EXPERT, ("QUANTIZES", &["1"]), ANY_TOKENS],
    [WORLDS_OF_2_AND_8, NARROW, BYTES, BY_EXPERT, ("QUANTIZES", &["0"]), ONLY_LOW_LATENCY],
    // Wider tokens, and an odd number of ranks.
    [
        ("WORLD", &["3"]),
        NARROW,
        F32,
        ("BY_EXPERT", &["1"]),
        ("QUANTIZES", &["1"]),
        ONLY_LOW_LATENCY
    ],
);

/// Sends rows of experts back, and sums them up.
pub(crate) const COMBINE: KernelSource<'static> = collective!(
    "experts" / "combine" as "_ZN8symmpool7combineEv",
    [WORLDS_OF_2_AND_8, WIDE, BF16, BY_EXPERT, ANY_TOKENS],
    [("WORLD", &["3", "4"]), WIDE, F32, BY_EXPERT, ANY_TOKENS],
    [WORLDS_OF_2_AND_8, ("THREADS", &["256", "512"]), BF16, BY_EXPERT, ONLY_LOW_LATENCY],
);

/// Outputs that are made of a fused sum, and how threads divide rows.
const OUTPUTS: Axis = ("OUTPUT", &["SUM_ONLY", "NORM", "FP8_STATIC", "FP8_TOKEN", "FP8_GROUP"]);
const NORM: Axis = ("OUTPUT", &["NORM"]);
pub(crate) const WORLD_OF_2: Axis = ("WORLD", &["2"]);
const NORM_DTYPES: Axis = ("DTYPE", &["1", "3", "4"]);
const FP8_TOKEN: Axis = ("OUTPUT", &["FP8_TOKEN"]);
const BF16: Axis = ("DTYPE", &["4"]);
const HELD: Axis = ("HELD", &["1"]);
const NOT_HELD: Axis = ("HELD", &["0"]);
const ONE_UNIT: Axis = ("UNITS", &["1"]);
const TWO_UNITS: Axis = ("UNITS", &["2"]);
const ONE_WARP: Axis = ("THREADS", &["32"]);

macro_rules! norms {
    ($name:literal $(, [$($more:expr),+ $(,)?])?) => {
        collective!(
            "fused" / $name,
            [WORLD_OF_2, WIDE, ONE, LAMPORT, SUM, BF16, OUTPUTS, HELD, TWO_UNITS],
            // The most ranks of which a thread has two units.
            [("WORLD", &["4"]), WIDE, ONE, LAMPORT, SUM, BF16, NORM, HELD, TWO_UNITS],
            [ABOVE_4, WIDE, ONE, LAMPORT, SUM, BF16, OUTPUTS, HELD, ONE_UNIT],
            [WORLD_OF_2, WIDE, ONE, LAMPORT, SUM, NORM_DTYPES, NORM, HELD, ONE_UNIT],
            [WORLD_OF_2, WIDE, ONE, LAMPORT, SUM, F32, FP8_TOKEN, HELD, ONE_UNIT],
            [WORLDS_OF_2_AND_8, WIDE, ONE, LAMPORT, SUM, F32, FP8_TOKEN, NOT_HELD, ONE_UNIT],
            [WORLDS_OF_2_AND_8, WIDE, ONE, LAMPORT, SUM, BF16, FP8_TOKEN, NOT_HELD, ONE_UNIT],
            [WORLD_OF_2, ONE_WARP, ONE, LAMPORT, SUM, BF16, FP8_TOKEN, HELD, ONE_UNIT],
            [ODD, WIDE, ONE, LAMPORT, SUM, BF16, NORM, HELD, ONE_UNIT],
            $([$($more),+],)?
        )
    };
}

/// All-reduce, residual and norm in one shot; also of a single rank.
pub(crate) const NORM_ONE_SHOT: KernelSource<'static> = norms!(
    "norm_one_shot",
    [("WORLD", &["1"]), WIDE, ONE, LAMPORT, SUM, BF16, OUTPUTS, HELD, ONE_UNIT]
);

/// All-reduce, residual and norm in two shots.
pub(crate) const NORM_TWO_SHOT: KernelSource<'static> = norms!("norm_two_shot");

const MATMUL_THREADS: Axis = ("THREADS", &["384"]);
const BY_ROWS: Axis = ("RIGHT_BY_ROWS", &["1"]);
const BY_COLUMNS: Axis = ("RIGHT_BY_ROWS", &["0"]);
const EITHER_LAYOUT: Axis = ("RIGHT_BY_ROWS", &["0", "1"]);
const OUTPUT_BF16: Axis = ("OUTPUT_F16", &["0"]);
const OUTPUT_F16: Axis = ("OUTPUT_F16", &["1"]);
const EITHER_OUTPUT: Axis = ("OUTPUT_F16", &["0", "1"]);
const F16: Axis = ("DTYPE", &["3"]);
const E4M3: Axis = ("DTYPE", &["9"]);
/// Rows of a product of few, filled up.
const TOKENS: Axis = ("TOKENS", &["8", "16", "32", "64"]);
const MAX_TOKENS: Axis = ("TOKENS", &["64"]);
const PAIRS: Axis = ("CLUSTER", &["2"]);
const MORE_THAN_PAIRS: Axis = ("CLUSTER", &["4", "8"]);

/// A kernel of a product of tensor cores.
macro_rules! gemm {
    ($name:literal, $([$($axis:expr),+ $(,)?]),+ $(,)?) => {
        collective!("fused" / $name, $([$($axis,)+ MATMUL_THREADS]),+)
    };
}

/// A product of tensor cores and a reduce-scatter in one.
pub(crate) const MATMUL_SCATTER: KernelSource<'static> = gemm!(
    "matmul_scatter",
    [WORLD, BF16, EITHER_LAYOUT, OUTPUT_BF16, PAIRS],
    [WORLD_OF_2, F16, EITHER_LAYOUT, OUTPUT_F16, PAIRS],
    [WORLDS_OF_2_AND_8, E4M3, BY_COLUMNS, EITHER_OUTPUT, PAIRS],
);

/// An all-gather and products of tensor cores in one.
pub(crate) const MATMUL_GATHER: KernelSource<'static> = gemm!(
    "matmul_gather",
    [WORLD_OF_2, BF16, EITHER_LAYOUT, OUTPUT_BF16, PAIRS],
    [WORLDS_OF_2_AND_8, F16, BY_ROWS, OUTPUT_F16, PAIRS],
    [WORLD_OF_2, E4M3, BY_COLUMNS, EITHER_OUTPUT, PAIRS],
);

/// A product of few rows and an all-reduce in one.
pub(crate) const MATMUL_SMALL_M: KernelSource<'static> = collective!(
    "fused" / "matmul_small_m",
    [WORLDS_OF_2_AND_8, MATMUL_THREADS, ONE, LAMPORT, SUM, BF16, EITHER_LAYOUT, TOKENS, PAIRS],
    [WORLD_OF_2, MATMUL_THREADS, ONE, LAMPORT, SUM, F16, EITHER_LAYOUT, MAX_TOKENS, PAIRS],
    [WORLD_OF_2, MATMUL_THREADS, ONE, LAMPORT, SUM, BF16, BY_ROWS, TOKENS, MORE_THAN_PAIRS],
    [OTHERS, MATMUL_THREADS, ONE, LAMPORT, SUM, BF16, BY_ROWS, MAX_TOKENS, PAIRS],
);

/// The sum of what all ranks send for it.
pub(crate) const MATMUL_SMALL_M_RECEIVED: KernelSource<'static> = collective!(
    "fused" / "matmul_small_m_received",
    [WORLD, WIDE, ONE, LAMPORT, SUM, BF16],
    [WORLD_OF_2, WIDE, ONE, LAMPORT, SUM, F16],
    [ODD, WIDE, ONE, LAMPORT, SUM, BF16],
);

/// The wait for what other ranks send for such a product, in one block.
pub(crate) const MATMUL_WAIT: KernelSource<'static> = collective!(
    "fused" / "matmul_wait",
    [WORLDS_OF_2_AND_8, ("THREADS", &["32"])],
    [OTHERS, ("THREADS", &["32"])],
);

/// Reduces arrays of one device, in the given order: for calls over hosts.
pub(crate) const REDUCE_LOCAL: KernelSource<'static> = KernelSource {
    name: "reduce_local",
    path: "reduce_local/reduce_local.cu",
    entry: "symmpool_reduce_local",
    source: include_str!("../../kernels/reduce_local/reduce_local.cu"),
    asks_for_blocks: false,
    variants: &[
        &[DTYPE, OP],
        // The code of devices older than 8.9 for 8-bit floats, which tests compare on newer ones.
        &[("DTYPE", &["9", "10"]), ("OP", &["1"]), ("SYMMPOOL_PORTABLE_F8", &["1"])],
    ],
};

// A kernel is known by its name.
impl PartialEq for KernelSource<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Eq for KernelSource<'_> {}

impl PartialOrd for KernelSource<'_> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for KernelSource<'_> {
    fn cmp(&self, other: &Self) -> Ordering {
        self.name.cmp(other.name)
    }
}

#[cfg(test)]
impl KernelSource<'static> {
    /// The macros of each variant that tests compile.
    pub(crate) fn test_variants(&self) -> Vec<Vec<(&'static str, &'static str)>> {
        let mut all = Vec::new();
        for row in self.variants {
            let mut combined = vec![Vec::new()];
            for (name, values) in *row {
                combined = combined
                    .into_iter()
                    .flat_map(|so_far: Vec<_>| {
                        values.iter().map(move |value| [&so_far[..], &[(*name, *value)]].concat())
                    })
                    .collect();
            }
            all.append(&mut combined);
        }
        all
    }
}

/// The files of kernels in the repository, by the paths that kernels and their headers have: all of `kernels`, and those
/// that lie beside their launches.
#[cfg(test)]
pub(crate) fn files_of_kernels() -> Vec<String> {
    let package = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut found = Vec::new();
    for (root, ends) in [
        (package.join("kernels"), [".cu", ".cuh"].as_slice()),
        (package.join("src/cuda"), &[".cu"]),
    ] {
        let mut folders = vec![root.clone()];
        while let Some(folder) = folders.pop() {
            for path in std::fs::read_dir(folder)
                .expect("a folder")
                .map(|file| file.expect("an entry").path())
            {
                let name = path.strip_prefix(&root).expect("below").to_str().expect("UTF-8");
                if path.is_dir() {
                    folders.push(path);
                } else if ends.iter().any(|end| name.ends_with(end)) {
                    found.push(name.to_owned());
                }
            }
        }
    }
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::kernels;
    use crate::{DType, ReduceOp};

    #[test]
    fn every_file_of_the_folder_is_held() {
        let found = files_of_kernels();
        let headers = HEADERS.iter().map(|(path, _)| *path);
        let mut held: Vec<&str> = headers.chain(kernels().map(|kernel| kernel.path)).collect();
        held.sort();
        assert_eq!(found, held);
    }

    #[test]
    fn headers_of_the_device_api_are_short() {
        let public = |path: &&str| path.starts_with("symmpool/") && !path.contains("/impl/");
        let paths = HEADERS.iter().map(|(path, _)| *path).filter(public).collect::<Vec<_>>();
        assert!(paths.len() > 8, "{paths:?}");
        let readme = include_str!("../../kernels/symmpool/README.md");
        for path in paths {
            let text = HEADERS.iter().find(|(name, _)| *name == path).expect("a header").1;
            assert!(text.lines().count() <= 60, "{path} has {} lines", text.lines().count());
            let name = path.trim_start_matches("symmpool/");
            assert!(readme.contains(&format!("`{name}`")), "the README lacks {name}");
        }
    }

    #[test]
    fn entry_points_are_where_they_are_said_to_be() {
        for kernel in kernels() {
            assert!(kernel.source.contains(&format!("{}(", kernel.entry)), "{}", kernel.name);
        }
    }

    #[test]
    fn codes_are_those_of_the_rust_types() {
        let types =
            HEADERS.iter().find(|(name, _)| *name == "symmpool/impl/types.cuh").expect("types").1;
        let reduce =
            HEADERS.iter().find(|(name, _)| *name == "symmpool/reduce.cuh").expect("reduce").1;
        for dtype in DType::REDUCED {
            let (name, code) = (dtype.name().to_uppercase(), dtype as u8);
            assert!(types.contains(&format!("constexpr int {name} = {code};")), "{name}");
            assert!(DTYPE.1.contains(&code.to_string().as_str()));
        }
        for op in ReduceOp::ALL {
            let (name, code) = (op.name().to_uppercase(), op as u8);
            assert!(reduce.contains(&format!("constexpr int {name} = {code};")), "{name}");
            assert!(OP.1.contains(&code.to_string().as_str()));
        }
    }

    #[test]
    fn channels_are_as_many_as_the_host_says() {
        let comm =
            HEADERS.iter().find(|(name, _)| *name == "symmpool/impl/comm.cuh").expect("comm").1;
        let line = format!("constexpr u32 CHANNELS = {};", crate::signal::channel::CHANNELS);
        assert!(comm.contains(&line), "{line}");
    }

    #[test]
    fn variants_are_all_combinations_of_each_row() {
        let variants = REDUCE_LOCAL.test_variants();
        assert_eq!(variants.len(), 52);
        assert_eq!(variants[7], [("DTYPE", "2"), ("OP", "3")]);
    }
}
