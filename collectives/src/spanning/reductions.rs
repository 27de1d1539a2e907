//! All-reduces and reduce-scatters over hosts.

#![allow(unsafe_code)] // hands raw buffers to engines

use symmpool_allocator::{Result, Stream};

use super::exchange::HostReduction;
use super::ranks::Route;
use super::staging::{
    PACKED_BYTES, PART_BYTES, SLOT_BYTES, SLOTS, STAGING, StagingPart, elements_of,
};
use super::state::SpanningEngine;
use crate::ReduceOp;
use crate::algorithm::StandardCollective;
use crate::call::Arguments;
use crate::outer::{Ticket, Transfer};
use crate::types::place::Place;

/// All-reduces of up to so many bytes go over each connection whole: one step between hosts instead of two.
const SMALL_BYTES: usize = 16 << 10;

/// A chunk of an all-reduce on its way.
#[derive(Clone, Copy)]
struct Chunk {
    /// First element and number of elements.
    first: usize,
    count: usize,
    part: StagingPart,
    arrived: StagingPart,
    ticket: Ticket,
}

impl SpanningEngine {
    /// All-reduce.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Engine`](crate::engine::Engine)'s unsafe methods.
    pub(super) unsafe fn all_reduce(&mut self, given: &Arguments, stream: &Stream) -> Result<()> {
        let Arguments { input, output, count, dtype, op, .. } = *given;
        let reduction = self.reduction("all_reduce", dtype, op)?;
        if self.divides_unevenly(dtype, op) {
            // SAFETY: the caller promised that input and output are there for `count` elements.
            return unsafe { self.all_reduce_uneven(given, &reduction, stream) };
        }
        let size = dtype.size();
        let route = self.reduction_route(dtype, op);
        // A chunk has as many elements for each rank of the host, and for each host of these.
        let inside = self.ranks.inside(route);
        let grain = inside * self.width(route);
        let large = if count * size <= SMALL_BYTES { 0 } else { count / grain * grain };
        if large > 0 {
            // SAFETY: the caller promised that input and output are there for `count` elements.
            unsafe {
                self.all_reduce_large((input, output), large, grain, &reduction, route, stream)
            }?;
        }
        let mut done = large;
        // Staging holds a small call's elements of each rank of the outer engine.
        let most = elements_of(SLOT_BYTES, self.width(route) + 1, size);
        while done < count {
            let some = (count - done).min(most);
            let skip = (done * size) as u64;
            let places = (input.offset_by(skip), output.offset_by(skip));
            // SAFETY: the caller promised that input and output are there for `count` elements, of which these are
            // some.
            unsafe { self.all_reduce_small(places, some, &reduction, route, stream) }?;
            done += some;
        }
        Ok(())
    }

    /// # Safety
    ///
    /// You must keep the promises of [`Engine`](crate::engine::Engine)'s unsafe methods.
    unsafe fn all_reduce_small(
        &mut self,
        (input, output): (Place, Place),
        count: usize,
        reduction: &HostReduction,
        route: Route,
        stream: &Stream,
    ) -> Result<()> {
        let (width, bytes) = (self.width(route), count * reduction.dtype.size());
        let mut slot = self.staging.slot(0);
        let (own, all) = (slot.take(bytes), slot.take(width * bytes));
        let from = if route == Route::Rail {
            let what = (count, reduction.dtype, reduction.inside);
            // SAFETY: the caller promised that the input is there; staging is the engine's, and long enough.
            unsafe {
                self.inside(StandardCollective::AllReduce, (input, own.place), what, 0, stream)
            }?;
            own.at
        } else {
            self.address(input)
        };
        let gather = Transfer::AllGather { output: all.at, input: from, bytes };
        // SAFETY: staging has room for this, the caller promised that the input is there, and the call waits for the
        // transfer or ends it.
        unsafe { self.transfer(route, gather, stream) }?;
        // SAFETY: the arrays lie in staging one behind the other; the caller promised that the output, which is
        // elsewhere, is there.
        unsafe {
            self.reduce_row(reduction, (all.at, width), count, self.address(output), stream)
        }?;
        Ok(())
    }

    /// Reduce-scatter inside hosts, then an all-reduce of the part between hosts, then all-gather inside, of one chunk each. Two
    /// ranks of an outer engine exchange their parts, and more of them exchange pieces and gather the sums.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Engine`](crate::engine::Engine)'s unsafe methods, for `count` elements, a multiple of `grain`.
    unsafe fn all_reduce_large(
        &mut self,
        (input, output): (Place, Place),
        count: usize,
        grain: usize,
        reduction: &HostReduction,
        route: Route,
        stream: &Stream,
    ) -> Result<()> {
        let (size, width) = (reduction.dtype.size(), self.width(route));
        let inside = grain / width;
        let part = (PART_BYTES / size).min(elements_of(SLOT_BYTES, 2, size)) / width * width;
        let most = (part.max(width) * inside).min(count);
        let chunks = count.div_ceil(most);
        let mut arriving: [Option<Chunk>; SLOTS] = [None; SLOTS];
        let mut returning: [Option<(Chunk, Option<Ticket>)>; SLOTS] = [None; SLOTS];
        for turn in 0..chunks + 2 {
            if turn < chunks {
                let first = turn * most;
                let count = most.min(count - first);
                let bytes = count / inside * size;
                let mut slot = self.staging.slot(turn);
                let (part, arrived) = (slot.take(bytes), slot.take(bytes));
                let from = input.offset_by((first * size) as u64);
                // SAFETY: the caller promised that the input is there; staging is the engine's, and long enough, and the
                // chunk that had this part of it has ended.
                let begun = unsafe {
                    self.begin_chunk(
                        (from, count / inside),
                        (part, arrived),
                        reduction,
                        route,
                        stream,
                    )
                };
                arriving[turn % SLOTS] =
                    Some(Chunk { first, count, part, arrived, ticket: begun? });
            }
            if let Some(chunk) = (turn >= 1).then(|| arriving[(turn - 1) % SLOTS].take()).flatten()
            {
                self.finish_on(route, chunk.ticket, stream)?;
                let to = match inside {
                    1 => self.address(output.offset_by((chunk.first * size) as u64)),
                    _ => chunk.part.at,
                };
                let ticket = if width == 2 {
                    let from = self.address(input.offset_by((chunk.first * size) as u64));
                    let own = if inside == 1 { from } else { chunk.part.at };
                    let mut parts = [own.cast_const(), chunk.arrived.at.cast_const()];
                    if self.outer(route).rank() == 1 {
                        parts.swap(0, 1);
                    }
                    // SAFETY: the parts of both ranks are there, and are no longer sent; the result goes where this rank's
                    // part is, or to the output, which the caller promised.
                    unsafe { self.reduce(reduction, &parts, chunk.count / inside, to, stream) }?;
                    None
                } else {
                    let piece = chunk.count / grain;
                    // SAFETY: pieces of all hosts lie one behind the other in staging, and the first is where the result
                    // goes.
                    unsafe {
                        self.reduce_row(
                            reduction,
                            (chunk.arrived.at, width),
                            piece,
                            chunk.arrived.at,
                            stream,
                        )
                    }?;
                    let gather = Transfer::AllGather {
                        output: to,
                        input: chunk.arrived.at,
                        bytes: piece * size,
                    };
                    // SAFETY: the part is no longer sent; the output is there for the chunk, and nobody else uses it. The
                    // call finishes the transfer, or ends it.
                    Some(unsafe { self.begin_on(route, gather, stream) }?)
                };
                returning[(turn - 1) % SLOTS] = Some((chunk, ticket));
            }
            if let Some((chunk, ticket)) =
                (turn >= 2).then(|| returning[(turn - 2) % SLOTS].take()).flatten()
            {
                if let Some(ticket) = ticket {
                    self.finish_on(route, ticket, stream)?;
                }
                if inside > 1 {
                    let to = output.offset_by((chunk.first * size) as u64);
                    let what = (chunk.count / inside, reduction.dtype, ReduceOp::Sum);
                    // SAFETY: the caller promised that the output is there; the part is the engine's.
                    unsafe {
                        self.inside(
                            StandardCollective::AllGather,
                            (chunk.part.place, to),
                            what,
                            0,
                            stream,
                        )
                    }?;
                }
            }
        }
        Ok(())
    }

    /// Reduces a chunk inside the host, and begins to send each host its piece of this rank's part.
    ///
    /// # Safety
    ///
    /// The input is readable for the chunk, and the parts of staging are not in use.
    unsafe fn begin_chunk(
        &mut self,
        (input, part_count): (Place, usize),
        (part, arrived): (StagingPart, StagingPart),
        reduction: &HostReduction,
        route: Route,
        stream: &Stream,
    ) -> Result<Ticket> {
        let size = reduction.dtype.size();
        let from = if route == Route::Rail {
            let what = (part_count, reduction.dtype, reduction.inside);
            // SAFETY: the caller promised that input and part are there for the call's lengths.
            unsafe {
                self.inside(StandardCollective::ReduceScatter, (input, part.place), what, 0, stream)
            }?;
            part.at
        } else {
            self.address(input)
        };
        let width = self.width(route);
        let mut pieces = vec![part_count / width * size; width];
        if width == 2 {
            // The other rank gets the whole part, and reduces it as well: one step between hosts instead of two, with as
            // many bytes.
            let me = self.outer(route).rank() as usize;
            (pieces[me], pieces[1 - me]) = (0, part_count * size);
        }
        let exchange =
            Transfer::AllToAll { output: arrived.at, input: from, send: &pieces, receive: &pieces };
        // SAFETY: the caller promised that the memory is not in use; the call finishes the transfer, or ends it.
        unsafe { self.begin_on(route, exchange, stream) }
    }

    /// Reduce-scatter: rank `r` gets the reduction of all ranks' part `r`, of `count` elements.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Engine`](crate::engine::Engine)'s unsafe methods.
    pub(super) unsafe fn reduce_scatter(
        &mut self,
        given: &Arguments,
        stream: &Stream,
    ) -> Result<()> {
        let Arguments { input, output, count, dtype, op, .. } = *given;
        let reduction = self.reduction("reduce_scatter", dtype, op)?;
        if self.divides_unevenly(dtype, op) {
            // SAFETY: the caller promised that input and output are there for their parts of `count` elements.
            return unsafe { self.reduce_scatter_uneven(given, &reduction, stream) };
        }
        let size = dtype.size();
        let route = self.reduction_route(dtype, op);
        let (world, width) = (self.ranks.world(), self.width(route));
        let inside = self.ranks.inside(route);
        // Parts of one host lie side by side, so it is reduced where it lies.
        let in_place = inside > 1
            && self.ranks.is_blocked
            && world * count * size > PACKED_BYTES
            && count <= elements_of(STAGING, 2 * width, size);
        let most =
            if in_place { count } else { elements_of(STAGING, world + 2 * width, size).min(count) };
        let order = self.ranks.by_index(route);
        let mut done = 0;
        while done < count {
            let some = most.min(count - done);
            let mut slot = self.staging.whole();
            let own = slot.take(width * some * size);
            let arrived = slot.take(width * some * size);
            let what = (some, dtype, reduction.inside);
            if in_place {
                for host in 0..width {
                    let from = input.offset_by((host * inside * count * size) as u64);
                    let to = own.place.offset_by((host * some * size) as u64);
                    // SAFETY: the caller promised that the input is there for all parts; staging is the engine's.
                    unsafe {
                        self.inside(StandardCollective::ReduceScatter, (from, to), what, 0, stream)
                    }?;
                }
            } else {
                let packed = slot.take(world * some * size);
                let from = self.address(input);
                let parts = (from.wrapping_add(done * size).cast_const(), count * size);
                // SAFETY: the caller promised that the input is there for all parts; staging, which has room for them,
                // does not overlap it.
                unsafe { self.pack_parts(parts, &order, some * size, packed.at, stream) }?;
                if inside > 1 {
                    let what = (width * some, dtype, reduction.inside);
                    let places = (packed.place, own.place);
                    // SAFETY: the parts of staging have room for the elements of all ranks, and do not overlap.
                    unsafe {
                        self.inside(StandardCollective::ReduceScatter, places, what, 0, stream)
                    }?;
                } else {
                    // SAFETY: the parts of staging have room for the elements of all ranks, and do not overlap.
                    unsafe { self.copy((packed.at, own.at), width * some * size, stream) }?;
                }
            }
            let pieces = vec![some * size; width];
            let exchange = Transfer::AllToAll {
                output: arrived.at,
                input: own.at,
                send: &pieces,
                receive: &pieces,
            };
            let to = self.address(output).wrapping_add(done * size);
            // SAFETY: staging has room for this, the caller promised that the input is there, and the call waits for
            // the transfer or ends it.
            unsafe { self.transfer(route, exchange, stream) }?;
            // SAFETY: the arrays lie in staging; the caller promised that the output is there. It may be part of the
            // input, of which these elements are read no more.
            unsafe { self.reduce_row(&reduction, (arrived.at, width), some, to, stream) }?;
            done += some;
        }
        Ok(())
    }
}
