//! All-to-alls, and how they divide their tensors between ranks: split sizes, and splits that are tensors.

#![allow(unsafe_code)] // passes on addresses that tensors gave

use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes};
use symmpool_collectives::ReduceOp::Sum as SUM;
use symmpool_collectives::StandardCollective::AllToAll;
use symmpool_collectives::{SplitRows, SplitsAt};

use crate::arguments::{Argument, CommunicatorCalls, RankContext, rows_of};
use crate::name::Name;
use crate::reading::{Refusal, Tensor};

/// Arguments of `all_to_all_single`, once they are known to fit.
pub(crate) struct Divided {
    output: Tensor,
    input: Tensor,
    parts: SplitSizes,
}

/// Numbers of elements.
pub(crate) enum SplitSizes {
    /// Each rank has this number of elements, and both tensors have no others.
    Even(usize),
    /// A number for every rank; no sum is above its tensor's length.
    Uneven { receive: Vec<usize>, send: Vec<usize> },
}

/// Arguments of `all_to_all_v`, once they are known to fit.
pub(crate) struct RowsBySplits {
    output: Tensor,
    input: Tensor,
    rows: SplitRows,
    splits: ExchangedSplits,
}

/// Addresses of numbers of rows, one for every rank.
pub(crate) struct ExchangedSplits(SplitsAt);

// SAFETY: the addresses are only handed on to a call, whose contract says who may touch what they
// point to; no thread is part of it.
unsafe impl Send for ExchangedSplits {}
// SAFETY: a reference allows no more than a copy of the addresses, which are only handed on to a call.
unsafe impl Sync for ExchangedSplits {}

impl ExchangedSplits {
    fn at(&self) -> &SplitsAt {
        &self.0
    }
}

impl CommunicatorCalls {
    /// `Communicator.all_to_all_single`, with split sizes of output and input.
    pub(crate) fn all_to_all_single(
        &self,
        py: Python<'_>,
        (output, input): (Argument<'_, '_>, Argument<'_, '_>),
        sizes: (Option<Argument<'_, '_>>, Option<Argument<'_, '_>>),
        algorithm: Option<Name<'_>>,
        stream: Option<Argument<'_, '_>>,
    ) -> PyResult<()> {
        let stream = self.stream(py, stream)?;
        if algorithm.is_some() && (sizes.0.is_some() || sizes.1.is_some()) {
            let why = "algorithm is for equal parts; leave out the split sizes".to_owned();
            return Err(self.decline(py, stream, Refusal::Invalid(why)));
        }
        let found = self.parts_of(output, input, sizes.0, sizes.1);
        let Divided { output, input, parts } = self.or_decline(py, stream, found)?;
        let dtype = input.dtype;
        match parts {
            // SAFETY: contiguous tensors on the pool's device, each with `world` times this length; the caller's
            // frame keeps them alive for the call, and the documented contract of the class says how long a stream
            // needs them.
            SplitSizes::Even(count) => unsafe {
                self.make(py, (AllToAll, algorithm, SUM, 0), (output, input), count, stream)
            },
            // SAFETY: contiguous tensors on the pool's device, each at least as long as the sum of its counts; the
            // caller's frame keeps them alive for the call, and the documented contract of the class says how long a
            // stream needs them.
            SplitSizes::Uneven { receive, send } => self.run(py, || unsafe {
                let (to, from) = (output.to(), input.from());
                self.comm.all_to_all_v_at(to, from, &receive, &send, dtype, &stream)
            }),
        }
    }

    /// `Communicator.all_to_all_v`, with the splits and the offsets of the output if they are to be written.
    pub(crate) fn all_to_all_v(
        &self,
        py: Python<'_>,
        (output, input): (Argument<'_, '_>, Argument<'_, '_>),
        splits: Argument<'_, '_>,
        written: (Option<Argument<'_, '_>>, Option<Argument<'_, '_>>),
        stream: Option<Argument<'_, '_>>,
    ) -> PyResult<()> {
        let stream = self.stream(py, stream)?;
        let found = self.rows_by_splits(output, input, splits, written.0, written.1);
        let RowsBySplits { output, input, rows, splits } = self.or_decline(py, stream, found)?;
        // SAFETY: contiguous tensors on the pool's device, with these rows, and splits with an element for every
        // rank; the caller's frame keeps them alive for the call, and the documented contract of the class says how
        // long a stream needs them.
        self.run(py, || unsafe {
            let (to, from) = (output.to(), input.from());
            self.comm.all_to_all_v_splits_at(to, from, &rows, splits.at(), &stream)
        })
    }
}

impl RankContext {
    /// Reads two tensors, and split sizes of neither, one or both.
    pub(crate) fn parts_of(
        &self,
        to: Argument<'_, '_>,
        from: Argument<'_, '_>,
        output_split_sizes: Option<Argument<'_, '_>>,
        input_split_sizes: Option<Argument<'_, '_>>,
    ) -> Result<Divided, Refusal> {
        let input = self.read("input", from, false)?;
        let output = self.output("output", to, &input, None)?;
        if output_split_sizes.is_none() && input_split_sizes.is_none() {
            let count = input.count / self.world as usize;
            self.fits("input", input.count, self.parts(count), "a part for every rank")?;
            self.fits("output", output.count, Some(input.count), "as many as input")?;
            return Ok(Divided { output, input, parts: SplitSizes::Even(count) });
        }
        let send = self.splits("input", from, &input, input_split_sizes)?;
        if output_split_sizes.is_none() && send.iter().any(|count| *count != send[0]) {
            return Err(Refusal::Invalid(format!(
                "output_split_sizes: none are given where the parts of input, of {send:?} \
                 elements, are uneven; say what each rank sends"
            )));
        }
        let receive = self.splits("output", to, &output, output_split_sizes)?;
        Ok(Divided { output, input, parts: SplitSizes::Uneven { receive, send } })
    }

    /// Reads two tensors of equal parts: the output, the input, and the elements of a part.
    pub(crate) fn equal_parts_of(
        &self,
        to: Argument<'_, '_>,
        from: Argument<'_, '_>,
    ) -> Result<(Tensor, Tensor, usize), Refusal> {
        let Divided { output, input, .. } = self.parts_of(to, from, None, None)?;
        Ok((output, input, input.count / self.world as usize))
    }

    /// Elements for every rank, from rows for every rank; even parts where none are given.
    fn splits(
        &self,
        name: &'static str,
        object: Argument<'_, '_>,
        tensor: &Tensor,
        rows: Option<Argument<'_, '_>>,
    ) -> Result<Vec<usize>, Refusal> {
        let world = self.world as usize;
        let invalid = |why: String| Refusal::Invalid(format!("{name}_split_sizes: {why}"));
        let Some(rows) = rows else {
            let count = tensor.count / world;
            self.fits(name, tensor.count, self.parts(count), "a part for every rank")?;
            return Ok(vec![count; world]);
        };
        // Bytes are a sequence of numbers, too, which nobody means.
        let text = rows.is_instance_of::<PyBytes>() || rows.is_instance_of::<PyByteArray>();
        let Some(sizes) = rows.extract::<Vec<usize>>().ok().filter(|_| !text) else {
            return Err(invalid(format!("{rows:?} is no sequence of numbers of rows")));
        };
        if sizes.len() != world {
            return Err(invalid(format!("{} of them for {world} ranks", sizes.len())));
        }
        let (length, row) = rows_of(name, object)?;
        let sum = sizes.iter().try_fold(0_usize, |sum, size| sum.checked_add(*size));
        if sum.is_none_or(|sum| sum > length) {
            return Err(invalid(format!("{sizes:?} are more than the {length} rows of {name}")));
        }
        Ok(sizes.into_iter().map(|size| size * row).collect())
    }

    /// Reads two tensors of rows, and those that hold numbers of them.
    pub(crate) fn rows_by_splits(
        &self,
        to: Argument<'_, '_>,
        from: Argument<'_, '_>,
        input_splits: Argument<'_, '_>,
        output_splits: Option<Argument<'_, '_>>,
        output_offsets: Option<Argument<'_, '_>>,
    ) -> Result<RowsBySplits, Refusal> {
        let input = self.read("input", from, false)?;
        let output = self.output("output", to, &input, None)?;
        let ((length, row), (capacity, row_of_output)) =
            (rows_of("input", from)?, rows_of("output", to)?);
        if row == 0 {
            let why = "input: rows of no elements; what is counted here has one or more";
            return Err(Refusal::Invalid(why.to_owned()));
        }
        if row != row_of_output {
            return Err(Refusal::Invalid(format!(
                "output: rows of {row_of_output} elements where the input has rows of {row}"
            )));
        }
        let world = self.world as usize;
        let counts = self.read("input_splits", input_splits, false)?;
        self.fits("input_splits", counts.count, Some(world), "one for every rank")?;
        let written = |name, tensor: Option<Argument<'_, '_>>| {
            let Some(tensor) = tensor else { return Ok(std::ptr::null_mut()) };
            let found = self.output(name, tensor, &counts, None)?;
            self.fits(name, found.count, Some(world), "one for every rank")?;
            Ok::<_, Refusal>(found.to())
        };
        let splits = ExchangedSplits(SplitsAt {
            input: counts.from(),
            output: written("output_splits", output_splits)?,
            offsets: written("output_offsets", output_offsets)?,
            dtype: counts.dtype,
        });
        let rows = SplitRows { dtype: input.dtype, row, length, capacity };
        Ok(RowsBySplits { output, input, rows, splits })
    }
}
