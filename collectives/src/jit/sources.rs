//! The kernels of `collectives/kernels`, held by the program itself.

/// A kernel file, which defines one `extern "C"` entry point.
#[derive(Debug)]
pub(crate) struct Kernel {
    /// The file's name without the ending.
    pub(crate) name: &'static str,
    /// The file below `collectives/kernels`.
    pub(crate) path: &'static str,
    /// The entry point.
    pub(crate) entry: &'static str,
    pub(crate) source: &'static str,
    /// Variants that are compiled by the tests: for each row, every combination of its defines'
    /// values.
    #[cfg_attr(not(test), expect(dead_code, reason = "tests compile them"))]
    pub(crate) variants: &'static [&'static [Axis]],
}

/// A define and the values it takes.
pub(crate) type Axis = (&'static str, &'static [&'static str]);

macro_rules! headers {
    ($($path:literal),+ $(,)?) => {
        &[$(($path, include_str!(concat!("../../kernels/", $path)))),+]
    };
}

/// What kernels include, by their paths below `collectives/kernels`, which are the names that kernels use.
pub(crate) const HEADERS: &[(&str, &str)] = headers![
    "all_reduce/reduce_share.cuh",
    "all_to_all/exchange.cuh",
    "all_to_all/inbox_pipeline.cuh",
    "all_to_all/scratch_pipeline.cuh",
    "all_to_all/traffic.cuh",
    "all_to_all/work_assignment.cuh",
    "protocol/inbox.cuh",
    "protocol/lamport_escaped.cuh",
    "protocol/ll128.cuh",
    "symmpool/comm.cuh",
    "symmpool/companion.cuh",
    "symmpool/copy.cuh",
    "symmpool/handshake.cuh",
    "symmpool/partition.cuh",
    "symmpool/peer_blocks.cuh",
    "symmpool/ptx.cuh",
    "symmpool/reduce.cuh",
    "symmpool/reduce_ranks.cuh",
    "symmpool/span.cuh",
    "symmpool/types.cuh",
    "symmpool/vector.cuh",
];

/// Every kernel.
pub(crate) const KERNELS: &[&Kernel] = &[
    &ALL_TO_ALL,
    &BARRIER,
    &COPY_COMPANION,
    &ONE_SHOT,
    &ONE_SHOT_LL128,
    &ONE_SIDED,
    &P2P,
    &PULL,
    &TWO_SHOT_PUSH,
    &TWO_SHOT_COPY,
    &REDUCE_LOCAL,
    &ROW_EXCHANGE,
    &TWO_SHOT,
];

/// Every code of [`DType::REDUCED`](crate::DType::REDUCED), the 8-bit floats included.
const DTYPE: Axis = ("DTYPE", &["1", "2", "3", "4", "5", "6", "7", "8", "9", "10"]);
/// Every code of [`ReduceOp`](crate::ReduceOp).
const OP: Axis = ("OP", &["1", "2", "3", "4", "5"]);

/// Ranks: those of usual machines, and the most.
const WORLD: Axis = ("WORLD", &["2", "4", "8"]);
/// One type of each way to widen, fold and narrow, for kernels that differ by more than that.
const SOME_DTYPES: Axis = ("DTYPE", &["1", "2", "4", "6", "9"]);
const SUM: Axis = ("OP", &["1"]);
const WIDE: Axis = ("THREADS", &["512"]);
/// Blocks of a processor: two where registers suffice.
const UP_TO_4: Axis = ("WORLD", &["2", "4"]);
const ABOVE_4: Axis = ("WORLD", &["8"]);
/// Ranks of machines that are not usual: each kernel with one type.
const ODD: Axis = ("WORLD", &["3", "5", "6", "7"]);
const ODD_UP_TO_4: Axis = ("WORLD", &["3"]);
const ODD_ABOVE_4: Axis = ("WORLD", &["5", "6", "7"]);
const BYTES: Axis = ("DTYPE", &["7"]);
const F32: Axis = ("DTYPE", &["1"]);
const NARROW: Axis = ("THREADS", &["256"]);
const TWO: Axis = ("BLOCKS", &["2"]);
const ONE: Axis = ("BLOCKS", &["1"]);
/// The sizes of what kernels are given, which they compare with their own.
const COMM_BYTES: Axis = ("COMM_BYTES", &["168"]);
const CALL_BYTES: Axis = ("CALL_BYTES", &["72"]);
const FAULT_BYTES: Axis = ("FAULT_BYTES", &["136"]);

// Every row has the sizes too.
macro_rules! collective {
    ($folder:literal / $name:literal, $([$($axis:expr),+ $(,)?]),+ $(,)?) => {
        Kernel {
            name: $name,
            path: concat!($folder, "/", $name, ".cu"),
            entry: concat!("symmpool_", $name),
            source: include_str!(concat!("../../kernels/", $folder, "/", $name, ".cu")),
            variants: &[$(&[$($axis,)+ COMM_BYTES, CALL_BYTES, FAULT_BYTES]),+],
        }
    };
}

/// The entry of a call alone.
pub(crate) const BARRIER: Kernel = collective!(
    "barrier" / "barrier",
    [WORLD, ("THREADS", &["128"]), ("SHOTS", &["0", "1"])],
    [("WORLD", &["1", "3", "5", "6", "7"]), ("THREADS", &["128"]), ("SHOTS", &["0", "1"])],
);

/// All-to-all with any counts.
pub(crate) const ALL_TO_ALL: Kernel = collective!(
    "all_to_all" / "all_to_all",
    [
        ("WORLD", &["1", "2", "4"]),
        WIDE,
        ("DTYPE", &["7"]),
        ("SHOTS", &["1", "3", "7"]),
        ("TRAFFIC_BYTES", &["328"])
    ],
    [ABOVE_4, NARROW, ("DTYPE", &["7"]), ("SHOTS", &["1", "3", "7"]), ("TRAFFIC_BYTES", &["328"])],
    [ODD_UP_TO_4, WIDE, BYTES, ("SHOTS", &["7"]), ("TRAFFIC_BYTES", &["328"])],
    [ODD_ABOVE_4, NARROW, BYTES, ("SHOTS", &["7"]), ("TRAFFIC_BYTES", &["328"])],
);

/// What processors do beside the copies of an all-to-all.
pub(crate) const COPY_COMPANION: Kernel =
    collective!("all_to_all" / "copy_companion", [WORLD, WIDE], [ODD, WIDE],);

/// Copies and signals between two ranks.
pub(crate) const ONE_SIDED: Kernel = collective!(
    "one_sided" / "one_sided",
    [("WORLD", &["1", "2", "8"]), ("SHOTS", &["1", "3"]), WIDE],
    [("WORLD", &["1", "2", "8"]), ("SHOTS", &["2", "4"]), ("THREADS", &["32"])],
    [ODD, ("SHOTS", &["1"]), WIDE],
    [ODD, ("SHOTS", &["2"]), ("THREADS", &["32"])],
);

/// Messages between two ranks.
pub(crate) const P2P: Kernel = collective!(
    "p2p" / "p2p",
    [WORLD, ("SHOTS", &["1", "2"]), WIDE],
    [ODD, ("SHOTS", &["1", "2"]), WIDE],
);

/// Rows into the order of an all-to-all, and back.
pub(crate) const ROW_EXCHANGE: Kernel = collective!(
    "row_exchange" / "row_exchange",
    [
        ("WORLD", &["1", "2", "4", "8"]),
        NARROW,
        ("SHOTS", &["1", "2", "4", "8"]),
        ("ROW_WORK_BYTES", &["152"])
    ],
    [ODD, NARROW, ("SHOTS", &["2", "8"]), ("ROW_WORK_BYTES", &["152"])],
);

/// All-reduce through inboxes, in one shot.
pub(crate) const ONE_SHOT: Kernel = collective!(
    "all_reduce" / "one_shot",
    [WORLD, SOME_DTYPES, SUM, WIDE],
    [WORLD, ("DTYPE", &["1", "4", "9"]), SUM, WIDE, ("SENTINELS", &["1"])],
    [ODD, F32, SUM, WIDE, ("SENTINELS", &["0", "1"])],
    // An average of integers divides.
    [("WORLD", &["4"]), ("DTYPE", &["6"]), ("OP", &["5"]), WIDE],
);

/// All-reduce through lines, in one shot.
pub(crate) const ONE_SHOT_LL128: Kernel = collective!(
    "all_reduce" / "one_shot_ll128",
    [WORLD, SOME_DTYPES, SUM, WIDE],
    [ODD, F32, SUM, WIDE],
);

/// All-reduce and its halves through inboxes, in two shots.
pub(crate) const TWO_SHOT: Kernel = collective!(
    "all_reduce" / "two_shot",
    [UP_TO_4, WIDE, ONE, SOME_DTYPES, SUM, ("SHOTS", &["1", "3"])],
    [UP_TO_4, WIDE, ONE, ("DTYPE", &["7"]), SUM, ("SHOTS", &["2", "4"])],
    [
        UP_TO_4,
        WIDE,
        ONE,
        ("DTYPE", &["1", "4", "9"]),
        SUM,
        ("SHOTS", &["1", "3"]),
        ("SENTINELS", &["1"])
    ],
    [ODD_UP_TO_4, WIDE, ONE, F32, SUM, ("SHOTS", &["3"]), ("SENTINELS", &["0", "1"])],
    [ODD_ABOVE_4, NARROW, ONE, F32, SUM, ("SHOTS", &["3"]), ("SENTINELS", &["0", "1"])],
    [ABOVE_4, NARROW, ONE, SOME_DTYPES, SUM, ("SHOTS", &["1", "3"])],
    [ABOVE_4, NARROW, ONE, ("DTYPE", &["7"]), SUM, ("SHOTS", &["2", "4"])],
    [
        ABOVE_4,
        NARROW,
        ONE,
        ("DTYPE", &["1", "4", "9"]),
        SUM,
        ("SHOTS", &["1", "3"]),
        ("SENTINELS", &["1"])
    ],
    [
        UP_TO_4,
        WIDE,
        TWO,
        ("DTYPE", &["1", "3", "4"]),
        SUM,
        ("SHOTS", &["1", "3"]),
        ("SENTINELS", &["1"])
    ],
);

/// All-reduce through scratch and straight into outputs, and reduce-scatter.
pub(crate) const TWO_SHOT_PUSH: Kernel = collective!(
    "all_reduce" / "two_shot_push",
    [WORLD, SOME_DTYPES, SUM, ("SHOTS", &["1", "3"]), WIDE],
    [ODD, F32, SUM, ("SHOTS", &["3"]), WIDE],
);

/// What copy engines carry of an all-reduce, reduced.
pub(crate) const TWO_SHOT_COPY: Kernel = collective!(
    "all_reduce" / "two_shot_copy",
    [WORLD, SOME_DTYPES, SUM, WIDE],
    [ODD, F32, SUM, WIDE],
);

/// All-reduce by loads from peers.
pub(crate) const PULL: Kernel = collective!(
    "all_reduce" / "pull",
    [WORLD, SOME_DTYPES, SUM, ("SHOTS", &["1", "3"]), WIDE],
    [ODD, F32, SUM, ("SHOTS", &["3"]), WIDE],
);

/// Reduces arrays of one device, in order.
pub(crate) const REDUCE_LOCAL: Kernel = Kernel {
    name: "reduce_local",
    path: "reduce_local/reduce_local.cu",
    entry: "symmpool_reduce_local",
    source: include_str!("../../kernels/reduce_local/reduce_local.cu"),
    variants: &[
        &[DTYPE, OP],
        // What devices older than 8.9 do with 8-bit floats, for comparison on newer ones.
        &[("DTYPE", &["9", "10"]), ("OP", &["1"]), ("SYMMPOOL_PORTABLE_F8", &["1"])],
    ],
};

impl Kernel {
    /// The kernel of this file name, which there is.
    pub(crate) fn named(name: &str) -> &'static Self {
        KERNELS.iter().copied().find(|kernel| kernel.name == name).expect("a kernel of ours")
    }
}

#[cfg(test)]
impl Kernel {
    /// The defines of each variant to test.
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

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::{DType, ReduceOp};

    #[test]
    fn every_file_of_the_folder_is_held() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
        let mut found = Vec::new();
        for folder in std::fs::read_dir(root).expect("the kernels") {
            let folder = folder.expect("an entry");
            let folder_name = folder.file_name().into_string().expect("UTF-8");
            for file in std::fs::read_dir(folder.path()).expect("folders alone") {
                let name = file.expect("an entry").file_name().into_string().expect("UTF-8");
                found.push(format!("{folder_name}/{name}"));
            }
        }
        found.sort();
        let headers = HEADERS.iter().map(|(path, _)| *path);
        let mut held: Vec<&str> = headers.chain(KERNELS.iter().map(|kernel| kernel.path)).collect();
        held.sort();
        assert_eq!(found, held);
    }

    #[test]
    fn entry_points_are_where_they_are_said_to_be() {
        for kernel in KERNELS {
            assert!(kernel.source.contains(&format!("{}(", kernel.entry)), "{}", kernel.name);
        }
    }

    #[test]
    fn codes_are_those_of_the_rust_types() {
        let types =
            HEADERS.iter().find(|(name, _)| *name == "symmpool/types.cuh").expect("types").1;
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
        let comm = HEADERS.iter().find(|(name, _)| *name == "symmpool/comm.cuh").expect("comm").1;
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
