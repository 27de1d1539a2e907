//! The same calls on slices of ordinary memory, which pass through the communicator's scratch.

#![allow(unsafe_code)] // passes on slices as raw buffers, whole

use symmpool_allocator::{Result, Stream};

use super::Communicator;
use super::choice::Request;
use crate::{Element, Place, ReduceOp, StandardCollective};

impl Communicator {
    /// Reduces every rank's `data` in place.
    pub fn all_reduce_slice<T: Element>(
        &self,
        data: &mut [T],
        op: ReduceOp,
        stream: &Stream,
    ) -> Result<()> {
        let mut inner = self.begin(stream)?;
        inner.engine.host("all_reduce of a slice", stream)?;
        let place = Place::Plain(data.as_mut_ptr().cast());
        let (collective, count) = (StandardCollective::AllReduce, data.len());
        let request = Request { op, ..Request::new(collective, (place, place), count, T::DTYPE) };
        // SAFETY: the slice is borrowed exclusively until the call returns, and peers do not touch
        // ordinary memory.
        unsafe { self.run(inner, &request, stream) }
    }

    /// Reduces part `r` of every rank's `input` into rank `r`'s `out`, which has a part's length.
    pub fn reduce_scatter_slice<T: Element>(
        &self,
        out: &mut [T],
        input: &[T],
        op: ReduceOp,
        stream: &Stream,
    ) -> Result<()> {
        let mut inner = self.begin(stream)?;
        inner.engine.host("reduce_scatter of a slice", stream)?;
        inner.engine.fits("reduce_scatter", input.len(), self.parts(out.len()), stream)?;
        let places = places(input, out);
        let collective = StandardCollective::ReduceScatter;
        let request = Request { op, ..Request::new(collective, places, out.len(), T::DTYPE) };
        // SAFETY: both slices are borrowed until the call returns, and have these lengths.
        unsafe { self.run(inner, &request, stream) }
    }

    /// Copies rank `r`'s `input` to part `r` of every rank's `out`, which has `world` parts.
    pub fn all_gather_slice<T: Element>(
        &self,
        out: &mut [T],
        input: &[T],
        stream: &Stream,
    ) -> Result<()> {
        let mut inner = self.begin(stream)?;
        inner.engine.host("all_gather of a slice", stream)?;
        inner.engine.fits("all_gather", out.len(), self.parts(input.len()), stream)?;
        let places = places(input, out);
        let collective = StandardCollective::AllGather;
        let request = Request::new(collective, places, input.len(), T::DTYPE);
        // SAFETY: both slices are borrowed until the call returns, and have these lengths.
        unsafe { self.run(inner, &request, stream) }
    }

    /// Copies the root's `data` into every other rank's.
    pub fn broadcast_slice<T: Element>(
        &self,
        data: &mut [T],
        root: u32,
        stream: &Stream,
    ) -> Result<()> {
        let mut inner = self.begin(stream)?;
        inner.engine.host("broadcast of a slice", stream)?;
        let place = Place::Plain(data.as_mut_ptr().cast());
        let (collective, count) = (StandardCollective::Broadcast, data.len());
        let request = Request { root, ..Request::new(collective, (place, place), count, T::DTYPE) };
        // SAFETY: the slice is borrowed exclusively until the call returns.
        unsafe { self.run(inner, &request, stream) }
    }

    /// Sends part `r` of `input` to rank `r`, where it becomes part `rank` of `out`.
    pub fn all_to_all_slice<T: Element>(
        &self,
        out: &mut [T],
        input: &[T],
        stream: &Stream,
    ) -> Result<()> {
        let mut inner = self.begin(stream)?;
        inner.engine.host("all_to_all of a slice", stream)?;
        let count = input.len() / self.world() as usize;
        inner.engine.fits("all_to_all", input.len(), self.parts(count), stream)?;
        inner.engine.fits("all_to_all", out.len(), Some(input.len()), stream)?;
        let places = places(input, out);
        let request = Request::new(StandardCollective::AllToAll, places, count, T::DTYPE);
        // SAFETY: both slices are borrowed until the call returns, and have `world` times this length.
        unsafe { self.run(inner, &request, stream) }
    }

    /// Sends `input_split_sizes[r]` elements to rank `r`, and receives `output_split_sizes[r]`
    /// from it. Each slice is as long as the sum of its parts.
    pub fn all_to_all_v_slice<T: Element>(
        &self,
        out: &mut [T],
        input: &[T],
        output_split_sizes: &[usize],
        input_split_sizes: &[usize],
        stream: &Stream,
    ) -> Result<()> {
        let mut inner = self.begin(stream)?;
        let host = inner.engine.host("all_to_all_v of a slice", stream)?;
        host.all_to_all_v_slices(input, input_split_sizes, out, output_split_sizes)
    }
}

fn places<T>(input: &[T], out: &mut [T]) -> (Place, Place) {
    let output = Place::Plain(out.as_mut_ptr().cast());
    (Place::Plain(input.as_ptr().cast_mut().cast()), output)
}
