//! What is measured: operations, sizes, and the figures that come back.

use std::fmt;
use std::str::FromStr;

use clap::ValueEnum;

use crate::matrix::Kind;

/// An operation that all libraries have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
#[value(rename_all = "snake_case")]
pub(crate) enum Op {
    AllReduce,
    AllToAll,
    /// With parts of any size, by a matrix.
    AllToAllV,
}

impl Op {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::AllToAll => "all_to_all",
            Self::AllToAllV => "all_to_all_v",
        }
    }
}

/// One operation at one size: the message for all-reduce, all that a rank sends, to itself too,
/// for all-to-all, on average where a matrix says how much.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Case {
    pub(crate) op: Op,
    pub(crate) matrix: Option<Kind>,
    pub(crate) bytes: usize,
}

impl Case {
    /// The operation, with its matrix where it has one.
    pub(crate) fn name(&self) -> String {
        match self.matrix {
            Some(kind) => format!("{}/{}", self.op.name(), kind.name()),
            None => self.op.name().to_owned(),
        }
    }

    /// As peers read it: with what each of so many ranks sends to each, row by row.
    pub(crate) fn with_counts(&self, ranks: u32) -> String {
        let Some(kind) = self.matrix else { return self.to_string() };
        let counts = kind.counts(ranks as usize, self.bytes / size_of::<f32>());
        let counts: Vec<String> = counts.iter().flatten().map(ToString::to_string).collect();
        format!("{self}:{}", counts.join(","))
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.name(), self.bytes)
    }
}

impl FromStr for Case {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (op, bytes) = text.split_once(':').ok_or("a case is like all_reduce:1024")?;
        let (op, matrix) = match op.split_once('/') {
            Some((op, kind)) => (op, Some(Kind::from_str(kind, false)?)),
            None => (op, None),
        };
        let op = Op::from_str(op, false)?;
        if (op == Op::AllToAllV) != matrix.is_some() {
            return Err(format!("{text:?}: all_to_all_v has a matrix, and nothing else has"));
        }
        let bytes = bytes.parse().map_err(|error| format!("{bytes:?}: {error}"))?;
        Ok(Self { op, matrix, bytes })
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
        let Case { bytes, .. } = self.case;
        write!(f, "result {} {bytes} {:.4} {}", self.case.name(), self.us, self.wrong)
    }
}
