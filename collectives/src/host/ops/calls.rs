//! The collectives of [`HostEngine`], on places and on ordinary slices.
//!
//! Slices are memory of this process alone, so their data passes through scratch; see [`Place::Unregistered`]. Lengths that
//! do not fit each other are refused, and the other ranks get an error as well.

#![allow(unsafe_code)] // passes on the caller's promises, and slices as raw buffers, whole

use symmpool_allocator::{Error, Result};

use crate::algorithm::{AUTO, AlgorithmId, StandardCollective};
use crate::call::{Arguments, StandardCall};
use crate::{AllReduceAlgorithm, DType, Element, HostEngine, Place, ReduceOp};

fn input<T: Element>(data: &[T]) -> Place {
    Place::Unregistered(data.as_ptr().cast_mut().cast())
}

fn output<T: Element>(data: &mut [T]) -> Place {
    Place::Unregistered(data.as_mut_ptr().cast())
}

/// A call by the engine's rule, which neither reduces nor has a root.
fn call(
    collective: StandardCollective,
    (input, output): (Place, Place),
    count: usize,
    dtype: DType,
) -> StandardCall {
    let arguments = Arguments { input, output, count, dtype, op: ReduceOp::Sum, root: 0 };
    StandardCall { collective, algorithm: AUTO, arguments }
}

impl HostEngine {
    /// Runs a call of a collective.
    ///
    /// # Safety
    ///
    /// You must keep the promises of the method of the collective.
    #[inline]
    pub(crate) unsafe fn run(&mut self, call: &StandardCall) -> Result<()> {
        let run: unsafe fn(&mut Self, &StandardCall) -> Result<()> = match call.collective {
            StandardCollective::AllReduce => Self::run_all_reduce,
            StandardCollective::ReduceScatter => Self::run_reduce_scatter,
            StandardCollective::AllGather => Self::run_all_gather,
            StandardCollective::Broadcast => Self::run_broadcast,
            StandardCollective::AllToAll => Self::run_all_to_all,
        };
        // SAFETY: the caller promised what the method of the collective asks of input and output, for the lengths of
        // this call.
        unsafe { run(self, call) }
    }

    /// Reduces `count` elements of every rank's `input` into every rank's `output`. In place if
    /// both begin at one address; otherwise they must not overlap.
    ///
    /// # Errors
    ///
    /// `is_diverged`, on every rank, if ranks make different calls; `is_invalid_argument` if buffers overlap or
    /// do not fit, or `dtype` is none of [`DType::REDUCED`]; `is_unsupported` if the algorithm does not run in
    /// host memory, or not over the links there are; `is_timeout` or `is_peer_lost` if a rank does not make the
    /// call.
    ///
    /// # Safety
    ///
    /// `input` is readable and `output` writable for `count` elements of `dtype`, and nobody else accesses
    /// either, in any rank's slot if it is a window, until the call returns on every rank.
    pub unsafe fn all_reduce(
        &mut self,
        input: Place,
        output: Place,
        count: usize,
        dtype: DType,
        op: ReduceOp,
        algorithm: AllReduceAlgorithm,
    ) -> Result<()> {
        let mut call = call(StandardCollective::AllReduce, (input, output), count, dtype);
        call.algorithm = AlgorithmId::of_all_reduce(algorithm);
        call.arguments.op = op;
        // SAFETY: the caller promised that `input` is readable and `output` writable for `count` elements until the
        // call returns on every rank.
        unsafe { self.run(&call) }
    }

    /// Reduces part `r` of every rank's `input`, which has `world * count` elements, into rank `r`'s `output` of
    /// `count` elements. The call is in place if the output is this rank's part of the input; otherwise the two
    /// must not overlap.
    ///
    /// # Errors
    ///
    /// The errors of [`Self::all_reduce`].
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Self::all_reduce`], for these lengths.
    pub unsafe fn reduce_scatter(
        &mut self,
        input: Place,
        output: Place,
        count: usize,
        dtype: DType,
        op: ReduceOp,
    ) -> Result<()> {
        let mut call = call(StandardCollective::ReduceScatter, (input, output), count, dtype);
        call.arguments.op = op;
        // SAFETY: the caller promised that `input` is readable for all parts and `output` writable for one until the
        // call returns on every rank.
        unsafe { self.run(&call) }
    }

    /// Copies the `count` elements of rank `r`'s `input` to part `r` of every rank's `output`, which has
    /// `world * count` elements. The call is in place if the input is this rank's part of the output; otherwise
    /// the two must not overlap.
    ///
    /// # Errors
    ///
    /// The errors of [`Self::all_reduce`].
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Self::all_reduce`], for these lengths.
    pub unsafe fn all_gather(
        &mut self,
        input: Place,
        output: Place,
        count: usize,
        dtype: DType,
    ) -> Result<()> {
        // SAFETY: the caller promised that `input` is readable for one part and `output` writable for all until the
        // call returns on every rank.
        unsafe { self.run(&call(StandardCollective::AllGather, (input, output), count, dtype)) }
    }

    /// Copies `count` elements of the root's `buffer` into every other rank's.
    ///
    /// # Errors
    ///
    /// The errors of [`Self::all_reduce`], and `is_invalid_argument` for a root that is not below the number of
    /// ranks.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Self::all_reduce`], of the buffer as input and output.
    pub unsafe fn broadcast(
        &mut self,
        buffer: Place,
        count: usize,
        dtype: DType,
        root: u32,
    ) -> Result<()> {
        let mut call = call(StandardCollective::Broadcast, (buffer, buffer), count, dtype);
        call.arguments.root = root;
        // SAFETY: the caller promised that `buffer` is readable and writable for `count` elements until the call
        // returns on every rank.
        unsafe { self.run(&call) }
    }

    /// Sends `count` elements to every rank: segment `r` of `input` goes to rank `r`, where it
    /// becomes segment `rank` of `output`. Both hold `world * count` elements and must not overlap.
    ///
    /// # Errors
    ///
    /// The errors of [`Self::all_reduce`].
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Self::all_reduce`], for these lengths.
    pub unsafe fn all_to_all(
        &mut self,
        input: Place,
        output: Place,
        count: usize,
        dtype: DType,
    ) -> Result<()> {
        // SAFETY: the caller promised that `input` is readable and `output` writable for all parts until the call
        // returns on every rank.
        unsafe { self.run(&call(StandardCollective::AllToAll, (input, output), count, dtype)) }
    }

    /// [`Self::all_reduce`] in place.
    pub fn all_reduce_slice<T: Element>(&mut self, data: &mut [T], op: ReduceOp) -> Result<()> {
        let place = output(data);
        // SAFETY: the slice is borrowed exclusively until the call returns, and peers do not access ordinary memory.
        unsafe { self.all_reduce(place, place, data.len(), T::DTYPE, op, AllReduceAlgorithm::Auto) }
    }

    /// [`Self::all_reduce`] from one slice to another of the same length.
    pub fn all_reduce_slices<T: Element>(
        &mut self,
        from: &[T],
        to: &mut [T],
        op: ReduceOp,
    ) -> Result<()> {
        let auto = AllReduceAlgorithm::Auto;
        self.fits("all_reduce", to.len(), Some(from.len()))?;
        // SAFETY: both slices are borrowed until the call returns, and have this length.
        unsafe { self.all_reduce(input(from), output(to), from.len(), T::DTYPE, op, auto) }
    }

    /// [`Self::reduce_scatter`]: `from` is `world` times as long as `to`.
    pub fn reduce_scatter_slices<T: Element>(
        &mut self,
        from: &[T],
        to: &mut [T],
        op: ReduceOp,
    ) -> Result<()> {
        self.fits("reduce_scatter", from.len(), to.len().checked_mul(self.world() as usize))?;
        // SAFETY: both slices are borrowed until the call returns, and have these lengths.
        unsafe { self.reduce_scatter(input(from), output(to), to.len(), T::DTYPE, op) }
    }

    /// [`Self::all_gather`]: `to` is `world` times as long as `from`.
    pub fn all_gather_slices<T: Element>(&mut self, from: &[T], to: &mut [T]) -> Result<()> {
        self.fits("all_gather", to.len(), from.len().checked_mul(self.world() as usize))?;
        // SAFETY: both slices are borrowed until the call returns, and have these lengths.
        unsafe { self.all_gather(input(from), output(to), from.len(), T::DTYPE) }
    }

    /// [`Self::broadcast`].
    pub fn broadcast_slice<T: Element>(&mut self, data: &mut [T], root: u32) -> Result<()> {
        // SAFETY: the slice is borrowed exclusively until the call returns.
        unsafe { self.broadcast(output(data), data.len(), T::DTYPE, root) }
    }

    /// [`Self::all_to_all`]: both slices have the same length, a multiple of the number of ranks.
    pub fn all_to_all_slices<T: Element>(&mut self, from: &[T], to: &mut [T]) -> Result<()> {
        let count = from.len() / self.world() as usize;
        self.fits("all_to_all", from.len(), Some(count * self.world() as usize))?;
        self.fits("all_to_all", to.len(), Some(from.len()))?;
        // SAFETY: both slices are borrowed until the call returns, and have this length.
        unsafe { self.all_to_all(input(from), output(to), count, T::DTYPE) }
    }

    /// [`Self::all_to_all_v`]: `from` is as long as the sum of `send`, `to` of `receive`.
    pub fn all_to_all_v_slices<T: Element>(
        &mut self,
        from: &[T],
        send: &[usize],
        to: &mut [T],
        receive: &[usize],
    ) -> Result<()> {
        let sum = |counts: &[usize]| counts.iter().try_fold(0usize, |sum, n| sum.checked_add(*n));
        self.fits("all_to_all_v", from.len(), sum(send))?;
        self.fits("all_to_all_v", to.len(), sum(receive))?;
        // SAFETY: both slices are borrowed until the call returns, and have these lengths.
        unsafe { self.all_to_all_v(input(from), send, output(to), receive, T::DTYPE) }
    }

    /// Declines the call if a length is wrong, so that the other ranks get an error instead of waiting.
    pub(crate) fn fits(
        &mut self,
        what: &str,
        length: usize,
        expected: Option<usize>,
    ) -> Result<()> {
        self.ready()?;
        let found = expect_length(what, self.rank(), length, expected);
        self.or_decline(found)
    }
}

/// Returns an error if a length is not the expected one. `None` stands for an expected length that is too large.
pub(crate) fn expect_length(
    what: &str,
    rank: u32,
    length: usize,
    expected: Option<usize>,
) -> Result<()> {
    if expected == Some(length) {
        return Ok(());
    }
    let expected = expected.map_or_else(|| "an impossible number".into(), |n| n.to_string());
    Err(Error::invalid_argument(format!(
        "{what} on rank {rank}: {length} elements where {expected} are needed"
    )))
}
