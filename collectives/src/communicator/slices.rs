//! Calls on slices of ordinary memory, which pass through the communicator's scratch.

#![allow(unsafe_code)] // hands borrowed slices to an engine as raw memory

use symmpool_allocator::{Result, Stream};

use super::Communicator;
use super::engine::AnyEngine;
use super::request::Request;
use crate::{Element, Place, ReduceOp, StandardCollective};

impl Communicator {
    /// Reduces every rank's `data` in place.
    pub fn all_reduce_slice<T: Element>(
        &self,
        data: &mut [T],
        op: ReduceOp,
        stream: &Stream,
    ) -> Result<()> {
        self.call(&Request::on_slice(StandardCollective::AllReduce, data).op(op), stream)
    }

    /// Reduces part `r` of every rank's `input` into rank `r`'s `out`, which has a part's length.
    pub fn reduce_scatter_slice<T: Element>(
        &self,
        out: &mut [T],
        input: &[T],
        op: ReduceOp,
        stream: &Stream,
    ) -> Result<()> {
        let request = Request::on_slices(StandardCollective::ReduceScatter, out, input);
        self.call(&request.op(op), stream)
    }

    /// Copies rank `r`'s `input` to part `r` of every rank's `out`, which has `world` parts.
    pub fn all_gather_slice<T: Element>(
        &self,
        out: &mut [T],
        input: &[T],
        stream: &Stream,
    ) -> Result<()> {
        self.call(&Request::on_slices(StandardCollective::AllGather, out, input), stream)
    }

    /// Copies the root's `data` into every other rank's.
    pub fn broadcast_slice<T: Element>(
        &self,
        data: &mut [T],
        root: u32,
        stream: &Stream,
    ) -> Result<()> {
        self.call(&Request::on_slice(StandardCollective::Broadcast, data).root(root), stream)
    }

    /// Sends part `r` of `input` to rank `r`, where it becomes part `rank` of `out`.
    pub fn all_to_all_slice<T: Element>(
        &self,
        out: &mut [T],
        input: &[T],
        stream: &Stream,
    ) -> Result<()> {
        self.call(&Request::on_slices(StandardCollective::AllToAll, out, input), stream)
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
        if let AnyEngine::Spanning(_) = &inner.engine {
            inner.holds("input", input.len(), input_split_sizes, stream)?;
            inner.holds("output", out.len(), output_split_sizes, stream)?;
            let from = Place::Unregistered(input.as_ptr().cast_mut().cast());
            let places = (from, Place::Unregistered(out.as_mut_ptr().cast()));
            let sizes = (input_split_sizes, output_split_sizes);
            // SAFETY: both slices are borrowed until the call has returned, and `holds` has checked that neither sum is
            // above its slice's length.
            return unsafe { inner.engine.all_to_all_v(places, sizes, T::DTYPE, stream) };
        }
        let AnyEngine::Host(host) = &mut inner.engine else {
            inner.engine.ready()?;
            let why = self.not_on_devices("all_to_all_v of a slice");
            return Err(inner.engine.decline(why, stream));
        };
        host.all_to_all_v_slices(input, input_split_sizes, out, output_split_sizes)
    }
}
