//! Cases of the benchmark: operations and sizes, and the results.

use std::fmt;
use std::str::FromStr;

use clap::ValueEnum;

use crate::matrix::MatrixKind;

/// An operation that all libraries offer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
#[value(rename_all = "snake_case")]
pub(crate) enum BenchedOp {
    AllReduce,
    AllToAll,
    /// Parts have the sizes of a traffic matrix.
    AllToAllV,
}

impl BenchedOp {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::AllToAll => "all_to_all",
            Self::AllToAllV => "all_to_all_v",
        }
    }
}

/// One operation with one size. For all-reduce, the size is that of the input; for all-to-all, all that a rank sends,
/// including to itself; with a traffic matrix, the average of that.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct BenchCase {
    pub(crate) op: BenchedOp,
    pub(crate) matrix: Option<MatrixKind>,
    pub(crate) bytes: usize,
}

impl BenchCase {
    /// The name of the operation, and of its matrix if it has one.
    pub(crate) fn name(&self) -> String {
        match self.matrix {
            Some(kind) => format!("{}/{}", self.op.name(), kind.name()),
            None => self.op.name().to_owned(),
        }
    }

    /// The text that peers' programs read, which includes what each of `ranks` ranks sends to each, row by row.
    pub(crate) fn with_counts(&self, ranks: u32) -> String {
        let Some(kind) = self.matrix else { return self.to_string() };
        let counts = kind.counts(ranks as usize, self.bytes / size_of::<f32>());
        let counts: Vec<String> = counts.iter().flatten().map(ToString::to_string).collect();
        format!("{self}:{}", counts.join(","))
    }
}

impl fmt::Display for BenchCase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.name(), self.bytes)
    }
}

impl FromStr for BenchCase {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (op, bytes) = text.split_once(':').ok_or("a case is like all_reduce:1024")?;
        let (op, matrix) = match op.split_once('/') {
            Some((op, kind)) => (op, Some(MatrixKind::from_str(kind, false)?)),
            None => (op, None),
        };
        let op = BenchedOp::from_str(op, false)?;
        if (op == BenchedOp::AllToAllV) != matrix.is_some() {
            return Err(format!(
                "{text:?}: all_to_all_v needs a matrix, and no other operation has one"
            ));
        }
        let bytes = bytes.parse().map_err(|error| format!("{bytes:?}: {error}"))?;
        Ok(Self { op, matrix, bytes })
    }
}

/// One result, written as `result <op> <bytes> <microseconds> <wrong elements>`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Figure {
    pub(crate) case: BenchCase,
    pub(crate) us: f64,
    pub(crate) wrong: u64,
}

impl Figure {
    /// Parses a line; `None` for other lines.
    pub(crate) fn parse(line: &str) -> Option<Self> {
        let mut words = line.strip_prefix("result ")?.split(' ');
        let case = format!("{}:{}", words.next()?, words.next()?).parse().ok()?;
        Some(Self { case, us: words.next()?.parse().ok()?, wrong: words.next()?.parse().ok()? })
    }
}

impl fmt::Display for Figure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let BenchCase { bytes, .. } = self.case;
        write!(f, "result {} {bytes} {:.4} {}", self.case.name(), self.us, self.wrong)
    }
}
