//! Calls on slices of ordinary memory, which pass through the communicator's scratch.

use symmpool_allocator::{Result, Stream};

use super::Communicator;
use super::engine::AnyEngine;
use super::request::Request;
use crate::{Element, ReduceOp, StandardCollective};

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
        let AnyEngine::Host(host) = &mut inner.engine else {
            inner.engine.ready()?;
            let why = self.not_on_devices("all_to_all_v of a slice");
            return Err(inner.engine.decline(why, stream));
        };
        host.all_to_all_v_slices(input, input_split_sizes, out, output_split_sizes)
    }
}
