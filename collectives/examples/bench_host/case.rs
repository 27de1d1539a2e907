//! What is measured: operations, sizes, and the figures that come back.

use std::fmt;
use std::str::FromStr;

use clap::ValueEnum;

/// An operation that all libraries have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
#[value(rename_all = "snake_case")]
pub(crate) enum Op {
    AllReduce,
    AllToAll,
}

impl Op {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::AllToAll => "all_to_all",
        }
    }
}

/// One operation at one size: the message for all-reduce, all that a rank sends, to itself too,
/// for all-to-all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Case {
    pub(crate) op: Op,
    pub(crate) bytes: usize,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.op.name(), self.bytes)
    }
}

impl FromStr for Case {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (op, bytes) = text.split_once(':').ok_or("a case is like all_reduce:1024")?;
        let op = Op::from_str(op, false)?;
        let bytes = bytes.parse().map_err(|error| format!("{bytes:?}: {error}"))?;
        Ok(Self { op, bytes })
    }
}

/// One measurement, as `result <op> <bytes> <microseconds> <wrong elements>`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Figure {
    pub(crate) case: Case,
    pub(crate) us: f64,
    pub(crate) wrong: u64,
}

impl Figure {
    /// Reads a line; `None` for lines that say something else.
    pub(crate) fn parse(line: &str) -> Option<Self> {
        let mut words = line.strip_prefix("result ")?.split(' ');
        let case = format!("{}:{}", words.next()?, words.next()?).parse().ok()?;
        Some(Self { case, us: words.next()?.parse().ok()?, wrong: words.next()?.parse().ok()? })
    }
}

impl fmt::Display for Figure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Case { op, bytes } = self.case;
        write!(f, "result {} {bytes} {:.4} {}", op.name(), self.us, self.wrong)
    }
}
