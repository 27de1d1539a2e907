//! Why a plan is refused, with the rank and line of its program.

use std::fmt;

use symmpool_allocator::Error;

/// What is wrong with a plan.
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
    /// A rank, chunk or peer that is not there, or a place that the operation cannot have.
    OutOfRange,
    /// Ranks reduce in different orders, so their results may differ in the last bits.
    NotReproducible,
    /// What the program does cannot be done in the protocol that it is compiled for.
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
            Self::NotReproducible => "not_reproducible",
            Self::Protocol => "protocol",
        }
    }
}

/// The first thing found wrong with a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanError {
    /// What is wrong.
    pub kind: PlanErrorKind,
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
    /// The error of a call that needs the plan.
    pub fn to_error(&self) -> Error {
        Error::invalid_argument(self.to_string())
    }
}
