//! Collectives on ordinary slices: the safe methods of [`HostEngine`].
//!
//! Slices are memory of this process alone, so their data passes through scratch; see [`Place::Plain`]. Lengths that
//! do not fit each other are refused, and the other ranks get an error as well.

#![allow(unsafe_code)] // passes on slices as raw buffers, whole

use symmpool_allocator::{Error, Result};

use crate::{AllReduceAlgorithm, Element, HostEngine, Place, ReduceOp};

fn input<T: Element>(data: &[T]) -> Place {
    Place::Plain(data.as_ptr().cast_mut().cast())
}

fn output<T: Element>(data: &mut [T]) -> Place {
    Place::Plain(data.as_mut_ptr().cast())
}

impl HostEngine {
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
