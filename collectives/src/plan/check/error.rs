//! Why a plan is refused, with the rank and line of its program.

use std::fmt;

use symmpool_allocator::Error;

/// Kind of a plan's error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlanErrorKind {
    /// Ranks wait for each other in a circle.
    Deadlock,
    /// Two accesses of a chunk, of which one writes, are not ordered by program order and signals; or a peer's memory
    /// is accessed before it is known that the peer has entered the call, or after it may have left.
    Race,
    /// A chunk of an output does not hold what the collective promises.
    WrongResult,
    /// A wait without a signal, a signal that nobody waits for, or barriers that not all ranks come to.
    UnmatchedSignal,
    /// A rank, chunk or peer that is not there, or a span that the operation cannot have.
    OutOfRange,
    /// An operation writes to an input, which stays the caller's.
    ReadOnly,
    /// Ranks reduce in different orders, so their results may differ in the last bits.
    NotReproducible,
    /// The program does something that cannot be done in the protocol that it is compiled for.
    Protocol,
}

impl PlanErrorKind {
    /// The name, as in `sl.PlanError.kind`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Deadlock => "deadlock",
            Self::Race => "race",
            Self::WrongResult => "wrong_result",
            Self::UnmatchedSignal => "unmatched_signal",
            Self::OutOfRange => "out_of_range",
            Self::ReadOnly => "read_only",
            Self::NotReproducible => "not_reproducible",
            Self::Protocol => "protocol",
        }
    }
}

/// Reason for which a plan, or a plan in place, is refused. docs/language.md lists them all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PlanErrorReason {
    /// Ranks wait in a circle.
    Circle,
    /// Nothing orders two accesses of a chunk.
    Unordered,
    /// A peer's input or output is accessed before the peer is known to have entered the call.
    NotEntered,
    /// A peer's input or output is accessed when the peer may have left the call.
    MayHaveLeft,
    /// Two block groups use one channel.
    SharedChannel,
    /// A chunk of an output is never written.
    NeverWritten,
    /// A chunk of an output holds other contributions than it must.
    Contributions,
    /// An operation reads what was never written.
    Undefined,
    /// A signal without a wait.
    NobodyWaits,
    /// A wait without a signal.
    NobodySignals,
    /// Barriers to which not all ranks come.
    Barriers,
    /// More operations, ranks, chunks, block groups or channels than are possible.
    Limits,
    /// Other numbers of programs, chunks or outputs than ranks and parts ask for.
    Shape,
    /// A chunk of a custom collective's output must hold what is not there.
    Promise,
    /// A chunk or a rank that is not there.
    NotThere,
    /// A signal to, or a wait for, no peer.
    NoPeer,
    /// A barrier in a block group.
    GroupedBarrier,
    /// A source and a destination of different lengths.
    Lengths,
    /// A reduction of nothing.
    NoSources,
    /// A source and a destination that overlap.
    Overlap,
    /// A copy, put or get between other ranks than it is for.
    Direction,
    /// A write to an input.
    WritesInput,
    /// Reductions in different orders.
    Orders,
    /// LL: a read of a peer's memory.
    LlReads,
    /// LL: a barrier.
    LlBarrier,
    /// LL: a write to a peer's input or output.
    LlWrites,
    /// LL: a second write to a chunk of scratch.
    LlTwice,
    /// In place alone: an operation would take another value.
    OtherValue,
    /// In place alone: chunks are shorter than what passes through them.
    OtherLength,
    /// In place alone: peers look for a buffer where it is not.
    OtherOffset,
}

impl PlanErrorReason {
    /// All reasons, in the order of the manual.
    pub const ALL: [Self; 30] = [
        Self::Circle,
        Self::Unordered,
        Self::NotEntered,
        Self::MayHaveLeft,
        Self::SharedChannel,
        Self::NeverWritten,
        Self::Contributions,
        Self::Undefined,
        Self::NobodyWaits,
        Self::NobodySignals,
        Self::Barriers,
        Self::NotThere,
        Self::NoPeer,
        Self::Lengths,
        Self::NoSources,
        Self::Overlap,
        Self::Direction,
        Self::GroupedBarrier,
        Self::Promise,
        Self::Shape,
        Self::Limits,
        Self::WritesInput,
        Self::Orders,
        Self::LlReads,
        Self::LlBarrier,
        Self::LlWrites,
        Self::LlTwice,
        Self::OtherValue,
        Self::OtherLength,
        Self::OtherOffset,
    ];

    /// Which kind of error it is.
    pub const fn kind(self) -> PlanErrorKind {
        match self {
            Self::Circle => PlanErrorKind::Deadlock,
            Self::Unordered
            | Self::NotEntered
            | Self::MayHaveLeft
            | Self::SharedChannel
            | Self::OtherOffset => PlanErrorKind::Race,
            Self::NeverWritten
            | Self::Contributions
            | Self::Undefined
            | Self::OtherValue
            | Self::OtherLength => PlanErrorKind::WrongResult,
            Self::NobodyWaits | Self::NobodySignals | Self::Barriers => {
                PlanErrorKind::UnmatchedSignal
            }
            Self::Limits
            | Self::Shape
            | Self::Promise
            | Self::NotThere
            | Self::NoPeer
            | Self::GroupedBarrier
            | Self::Lengths
            | Self::NoSources
            | Self::Overlap
            | Self::Direction => PlanErrorKind::OutOfRange,
            Self::WritesInput => PlanErrorKind::ReadOnly,
            Self::Orders => PlanErrorKind::NotReproducible,
            Self::LlReads | Self::LlBarrier | Self::LlWrites | Self::LlTwice => {
                PlanErrorKind::Protocol
            }
        }
    }

    /// The reason in words, as the manual has it.
    pub const fn words(self) -> &'static str {
        match self {
            Self::Circle => "ranks wait for each other in a circle",
            Self::Unordered => {
                "two accesses of a chunk, of which one writes, are not ordered by program order and signals"
            }
            Self::NotEntered => {
                "a peer's input or output is accessed before anything shows that the peer has entered the call"
            }
            Self::MayHaveLeft => {
                "a peer's input or output is accessed, and the peer may have left the call by then"
            }
            Self::SharedChannel => "two block groups use one channel, and nothing orders the two",
            Self::NeverWritten => "a chunk of an output is never written",
            Self::Contributions => {
                "a chunk of an output lacks a contribution, has one twice, or has one that does not belong there"
            }
            Self::Undefined => {
                "an operation reads what nothing has written, whether or not the value is used"
            }
            Self::NobodyWaits => "nobody waits for a signal",
            Self::NobodySignals => "nobody sends a signal that is waited for",
            Self::Barriers => "ranks come to different numbers of barriers",
            Self::NotThere => "a rank or a chunk is not there",
            Self::NoPeer => "a signal or a wait names the rank itself, or a rank that is not there",
            Self::Lengths => "a source has more or fewer chunks than the destination",
            Self::NoSources => "there is nothing to reduce",
            Self::Overlap => "a source and the destination overlap, and are not the same",
            Self::Direction => {
                "a copy reaches a peer, a put does not write to one, or a get does not read from one"
            }
            Self::GroupedBarrier => "a barrier stands in a block group",
            Self::Promise => {
                "a collective of one's own promises nothing for a chunk, or a chunk that is not there"
            }
            Self::Shape => {
                "there are not as many programs and outputs as ranks, or no chunks, or not as many for each part"
            }
            Self::Limits => {
                "there are more than 262,144 operations, 1,048,576 chunks that they read and write, 1,024 ranks, \
                 65,536 chunks of a buffer, 16 block groups, or 16 channels, or thread blocks that are not 1 to 1,024"
            }
            Self::WritesInput => "an operation writes to an input, which stays the caller's",
            Self::Orders => "outputs hold the same reduction in different orders",
            Self::LlReads => "in LL a rank reads a peer's memory",
            Self::LlBarrier => "in LL there is a barrier",
            Self::LlWrites => "in LL a rank writes to a peer's output",
            Self::LlTwice => "in LL a chunk of scratch is written twice",
            Self::OtherValue => {
                "in place, an operation reads an input that an output has overwritten by then"
            }
            Self::OtherLength => "in place, a chunk passes through a shorter one",
            Self::OtherOffset => {
                "in place, peers access a buffer that lies at another offset on each rank"
            }
        }
    }

    /// Whether only calls in place are refused.
    pub const fn is_in_place_alone(self) -> bool {
        matches!(self, Self::OtherValue | Self::OtherLength | Self::OtherOffset)
    }
}

/// The first thing found wrong with a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PlanError {
    /// Kind of the error.
    pub kind: PlanErrorKind,
    /// Reason of the error.
    pub reason: PlanErrorReason,
    /// The rank whose operation it is.
    pub rank: u32,
    /// The line of that operation in the program's source; 0 where it is not known.
    pub line: u32,
    /// The story: which operation, on which rank, and what it lacks.
    pub message: String,
}

impl fmt::Display for PlanError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.kind.name(), self.message)
    }
}

impl std::error::Error for PlanError {}

impl PlanError {
    pub(super) fn new(reason: PlanErrorReason, rank: u32, line: u32, message: String) -> Self {
        Self { kind: reason.kind(), reason, rank, line, message }
    }

    /// The error of a call that needs the plan.
    pub fn to_error(&self) -> Error {
        Error::invalid_argument(self.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The manual has a table of all reasons, by kind and in this order.
    #[test]
    fn the_manual_lists_every_reason() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/language.md");
        let manual = std::fs::read_to_string(path).expect("the manual");
        let rows = manual.lines().skip_while(|line| !line.starts_with("| kind |")).skip(2);
        let rows: Vec<String> =
            rows.take_while(|line| line.starts_with('|')).map(str::to_owned).collect();
        let wanted: Vec<String> = PlanErrorReason::ALL
            .map(|reason| format!("| `{}` | {} |", reason.kind().name(), reason.words()))
            .to_vec();
        let first = rows.iter().zip(&wanted).find(|(row, wanted)| row != wanted);
        assert!(rows == wanted, "first that differs: {first:?}; wanted:\n{}", wanted.join("\n"));
    }
}
