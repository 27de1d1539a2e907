//! Modes of kernels whose files can do several things: values of macros that the files name.

use crate::call::matmul::CLUSTER;
use crate::{DType, NormOutput};

/// Bytes of shared memory of a block, and 1024 more for their alignment: `SHARED_BYTES` in `fused/matmul_tiles.cuh`.
const GEMM_SHARED_BYTES: u32 = 3 * (128 + 256) * 128 + 65_536 + 2 * 8192 + 32 * 16 + 1024;

/// Bytes of shared memory of a block, and 1024 more for their alignment: `SHARED_BYTES` in `fused/matmul_small_m.cu`.
const fn small_m_shared_bytes(tokens: u32) -> u32 {
    8 * (tokens + 128) * 128 + tokens * (128 + 4) * 4 + 2 * 8 * 16 + 1024
}

/// Mode of a kernel: what it is compiled to do, where its file can do several things.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::cuda) enum KernelMode {
    /// The file does one thing.
    Only,
    /// A handshake alone; whether it notifies a companion kernel.
    Barrier {
        notify_companion: bool,
    },
    AllToAll(AllToAllMode),
    /// One of the collectives that `two_shot.cu`, `two_shot_pipeline.cu` and `two_shot_pull.cu` run.
    Collective(TwoShotCollective),
    OneSided(OneSidedMode),
    PointToPoint(P2pMode),
    Norm(NormMode),
    Experts(ExpertsMode),
    Matmul(MatmulMode),
    SmallM(SmallMMode),
}

/// How a product of tensor cores is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::cuda) struct MatmulMode {
    /// Whether rows of the right matrix in memory are those of the inner dimension.
    pub(in crate::cuda) right_by_rows: bool,
    /// Whether the result is of 16-bit floats of the IEEE's kind.
    pub(in crate::cuda) output_f16: bool,
}

impl MatmulMode {
    pub(in crate::cuda) fn new(right_by_rows: bool, out_dtype: DType) -> Self {
        Self { right_by_rows, output_f16: out_dtype == DType::F16 }
    }
}

/// How a product of few rows is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::cuda) struct SmallMMode {
    /// Layout of the right factor, as in [`MatmulMode`].
    pub(in crate::cuda) right_by_rows: bool,
    /// Blocks of a cluster, each of which has a part of the inner dimension: 2, 4 or 8.
    pub(in crate::cuda) cluster: u32,
    /// Rows of the product, filled up: 8, 16, 32 or 64.
    pub(in crate::cuda) tokens: u32,
}

/// Mode of the dispatches and combines of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::cuda) struct ExpertsMode {
    /// Whether rows lie by expert.
    pub(in crate::cuda) by_expert: bool,
    /// Whether a dispatch quantises tokens.
    pub(in crate::cuda) quantizes: bool,
    /// Whether rows of every rank travel through inboxes alone, as no rank can have more tokens than fit there.
    pub(in crate::cuda) only_low_latency: bool,
}

/// Output that a fused all-reduce makes of the sum, and the division of rows among threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::cuda) struct NormMode {
    pub(in crate::cuda) output: NormOutput,
    /// Units of a row that a thread has at once.
    pub(in crate::cuda) units: u8,
    /// Whether these are all that it has.
    pub(in crate::cuda) held: bool,
}

/// How the data of an all-to-all may travel, and where its counts are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::cuda) struct AllToAllMode {
    /// Whether data may also be written into outputs directly, or pass through scratch, and not only through inboxes.
    pub(in crate::cuda) direct: bool,
    pub(in crate::cuda) device_counts: bool,
}

impl AllToAllMode {
    pub(in crate::cuda) const INBOXES: Self = Self { direct: false, device_counts: false };
    pub(in crate::cuda) const DIRECT: Self = Self { direct: true, device_counts: false };
    pub(in crate::cuda) const DEVICE_COUNTS: Self = Self { direct: true, device_counts: true };
}

/// Collective that is made of two shots: of the first one, of the second one, or of both.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::cuda) enum TwoShotCollective {
    AllReduce,
    ReduceScatter,
    AllGather,
    Broadcast,
}

impl TwoShotCollective {
    pub(in crate::cuda) fn reduces(self) -> bool {
        matches!(self, Self::AllReduce | Self::ReduceScatter)
    }
}

/// Operation of a one-sided kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::cuda) enum OneSidedMode {
    Copy,
    CopyAndSignal,
    Signal,
    Wait,
}

/// Which end of a message a point-to-point kernel serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::cuda) enum P2pMode {
    Send,
    Receive,
}

impl KernelMode {
    /// Bytes of shared memory that a launch asks for.
    pub(in crate::cuda) fn shared_bytes(self) -> u32 {
        match self {
            Self::Matmul(_) => GEMM_SHARED_BYTES,
            Self::SmallM(mode) => small_m_shared_bytes(mode.tokens),
            _ => 0,
        }
    }

    /// The macros of the kernel's file and their values.
    pub(in crate::cuda) fn defines(self) -> Vec<(&'static str, &'static str)> {
        let number = |yes: bool| if yes { "1" } else { "0" };
        let power_of_two =
            |number: u32| ["1", "2", "4", "8", "16", "32", "64"][number.ilog2() as usize];
        match self {
            Self::Only => Vec::new(),
            Self::Barrier { notify_companion } => {
                vec![("NOTIFY_COMPANION", number(notify_companion))]
            }
            Self::AllToAll(AllToAllMode { direct, device_counts }) => {
                vec![("DIRECT", number(direct)), ("DEVICE_COUNTS", number(device_counts))]
            }
            Self::Collective(collective) => {
                let name = match collective {
                    TwoShotCollective::AllReduce => "ALL_REDUCE",
                    TwoShotCollective::ReduceScatter => "REDUCE_SCATTER",
                    TwoShotCollective::AllGather => "ALL_GATHER",
                    TwoShotCollective::Broadcast => "BROADCAST",
                };
                vec![("COLLECTIVE", name)]
            }
            Self::OneSided(mode) => {
                let name = match mode {
                    OneSidedMode::Copy => "COPY",
                    OneSidedMode::CopyAndSignal => "COPY_AND_SIGNAL",
                    OneSidedMode::Signal => "SIGNAL",
                    OneSidedMode::Wait => "WAIT",
                };
                vec![("OPERATION", name)]
            }
            Self::PointToPoint(mode) => {
                let name = match mode {
                    P2pMode::Send => "SEND",
                    P2pMode::Receive => "RECEIVE",
                };
                vec![("OPERATION", name)]
            }
            Self::Norm(NormMode { output, units, held }) => {
                let units = if units == 1 { "1" } else { "2" };
                vec![("OUTPUT", output.name()), ("UNITS", units), ("HELD", number(held))]
            }
            Self::Experts(ExpertsMode { by_expert, quantizes, only_low_latency }) => vec![
                ("BY_EXPERT", number(by_expert)),
                ("QUANTIZES", number(quantizes)),
                ("ONLY_LOW_LATENCY", number(only_low_latency)),
            ],
            Self::Matmul(MatmulMode { right_by_rows, output_f16 }) => vec![
                ("RIGHT_BY_ROWS", number(right_by_rows)),
                ("OUTPUT_F16", number(output_f16)),
                ("CLUSTER", power_of_two(CLUSTER as u32)),
            ],
            Self::SmallM(SmallMMode { right_by_rows, cluster, tokens }) => vec![
                ("RIGHT_BY_ROWS", number(right_by_rows)),
                ("CLUSTER", power_of_two(cluster)),
                ("TOKENS", power_of_two(tokens)),
            ],
        }
    }
}
