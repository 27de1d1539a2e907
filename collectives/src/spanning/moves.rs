//! Collectives over hosts that only move data.

#![allow(unsafe_code)] // hands raw buffers to engines

use symmpool_allocator::{Result, Stream};

use super::ranks::Route;
use super::staging::{PACKED_BYTES, STAGING, elements_of};
use super::state::SpanningEngine;
use crate::algorithm::StandardCollective;
use crate::call::Arguments;
use crate::outer::Transfer;
use crate::types::place::Place;
use crate::{DType, ReduceOp};

/// Broadcasts of up to so many bytes leave the root's host over one connection to each other host.
const SMALL_BROADCAST: usize = 64 << 10;

/// Bytes of a part from which on an all-to-all sends each rank its own message: below, one message to a host takes as long or
/// less.
const DIRECT_BYTES: usize = 128 << 10;

impl SpanningEngine {
    /// All-gather of `count` elements of each rank.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Engine`](crate::engine::Engine)'s unsafe methods.
    pub(super) unsafe fn all_gather(&mut self, given: &Arguments, stream: &Stream) -> Result<()> {
        let Arguments { input, output, count, dtype, .. } = *given;
        let (route, size, world) = (self.route(), dtype.size(), self.ranks.world());
        let width = self.width(route);
        let inside = self.ranks.inside(route);
        let (from, to) = (self.address(input), self.address(output));
        // An input that is no part of the output is disjoint from it.
        let is_part = from == to.wrapping_add(self.ranks.rank as usize * count * size);
        if route == Route::Flat && (!is_part || count <= elements_of(STAGING, 1, size)) {
            let bytes = count * size;
            let mut input = from.cast_const();
            if is_part {
                let own = self.staging.whole().take(bytes);
                // SAFETY: the caller promised that the input is there; staging, which has room for it, does not overlap it.
                unsafe { self.copy((input, own.at), bytes, stream) }?;
                input = own.at;
            }
            let gather = Transfer::AllGather { output: to, input, bytes };
            // SAFETY: the caller promised that input and output are there, which do not overlap; the call waits for the
            // transfer or ends it.
            return unsafe { self.transfer(route, gather, stream) };
        }
        // Parts of one host lie side by side in the output, so they are gathered there.
        let in_place = self.ranks.is_blocked
            && world * count * size > PACKED_BYTES
            && count <= elements_of(STAGING, width + 1, size);
        let most =
            if in_place { count } else { elements_of(STAGING, 1 + width + world, size).min(count) };
        let order = self.ranks.by_index(route);
        let mut done = 0;
        while done < count {
            let some = most.min(count - done);
            let bytes = some * size;
            let mut slot = self.staging.whole();
            // The input may be part of the output.
            let (own, across) = (slot.take(bytes), slot.take(width * bytes));
            // SAFETY: the caller promised that the input is there; staging is the engine's.
            unsafe { self.copy((from.wrapping_add(done * size), own.at), bytes, stream) }?;
            let gather = Transfer::AllGather { output: across.at, input: own.at, bytes };
            // SAFETY: staging has room for these bytes of each rank, the caller promised the rest, and the call waits
            // for the transfer or ends it.
            unsafe { self.transfer(route, gather, stream) }?;
            let what = (some, dtype, ReduceOp::Sum);
            if in_place && inside > 1 {
                for host in 0..width {
                    let from = across.place.offset_by((host * bytes) as u64);
                    let to = output.offset_by((host * inside * bytes) as u64);
                    // SAFETY: the caller promised that the output is there for all parts; staging is the engine's.
                    unsafe {
                        self.inside(StandardCollective::AllGather, (from, to), what, 0, stream)
                    }?;
                }
                return Ok(());
            }
            let all = if inside > 1 {
                let all = slot.take(world * bytes);
                let what = (width * some, dtype, ReduceOp::Sum);
                let places = (across.place, all.place);
                // SAFETY: staging is the engine's, and long enough.
                unsafe { self.inside(StandardCollective::AllGather, places, what, 0, stream) }?;
                all
            } else {
                across
            };
            let parts = (to.wrapping_add(done * size), count * size);
            // SAFETY: the caller promised that the output is there for all parts; staging does not overlap it.
            unsafe { self.unpack_parts(all.at, &order, bytes, parts, stream) }?;
            done += some;
        }
        Ok(())
    }

    /// Broadcast of `count` elements from `root`.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Engine`](crate::engine::Engine)'s unsafe methods.
    pub(super) unsafe fn broadcast(&mut self, given: &Arguments, stream: &Stream) -> Result<()> {
        let Arguments { output, count, dtype, root, .. } = *given;
        let route = self.route();
        let (bytes, data) = (count * dtype.size(), self.address(output));
        if route == Route::Flat {
            // SAFETY: the caller promised that the data is there; the call waits for the transfer, or ends it.
            return unsafe {
                self.transfer(route, Transfer::Broadcast { data, bytes, root }, stream)
            };
        }
        let (index, home) = (self.ranks.index_of(root), self.ranks.hosts.of(root));
        let inside = self.ranks.local_world();
        let whole = (count, dtype, ReduceOp::Sum);
        if bytes <= SMALL_BROADCAST || !count.is_multiple_of(inside) {
            if self.ranks.index == index {
                let move_all = Transfer::Broadcast { data, bytes, root: home };
                // SAFETY: the caller promised that the data is there on every rank until the call has returned.
                unsafe { self.transfer(route, move_all, stream) }?;
            } else {
                // All ranks of a host know that a call fails before they go on inside it.
                self.settle()?;
            }
            // SAFETY: the caller promised that the data is there on every rank until the call has returned.
            return unsafe {
                self.inside(StandardCollective::Broadcast, (output, output), whole, index, stream)
            };
        }
        let part = bytes / inside;
        if self.ranks.host == home {
            // SAFETY: the caller promised that the data is there on every rank until the call has returned.
            unsafe {
                self.inside(StandardCollective::Broadcast, (output, output), whole, index, stream)
            }?;
        }
        // Each rank of the root's host sends a part to the ranks of its index.
        let skip = self.ranks.index as usize * part;
        let own = Transfer::Broadcast { data: data.wrapping_add(skip), bytes: part, root: home };
        // SAFETY: the caller promised that the data is there on every rank until the call has returned.
        unsafe { self.transfer(route, own, stream) }?;
        if self.ranks.host != home {
            let places = (output.offset_by(skip as u64), output);
            let what = (count / inside, dtype, ReduceOp::Sum);
            // SAFETY: the caller promised that the data is there on every rank; each rank's input is its part of the
            // output.
            unsafe { self.inside(StandardCollective::AllGather, places, what, 0, stream) }?;
        }
        Ok(())
    }

    /// All-to-all of `count` elements from each rank to each.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Engine`](crate::engine::Engine)'s unsafe methods.
    pub(super) unsafe fn all_to_all(&mut self, given: &Arguments, stream: &Stream) -> Result<()> {
        let Arguments { input, output, count, dtype, .. } = *given;
        let (route, size, world) = (self.route(), dtype.size(), self.ranks.world());
        let (from, to) = (self.address(input), self.address(output));
        if route == Route::Flat {
            let parts = vec![count * size; world];
            let exchange =
                Transfer::AllToAll { output: to, input: from, send: &parts, receive: &parts };
            // SAFETY: the caller promised that input and output are there and do not overlap; the call waits for the
            // transfer, or ends it.
            return unsafe { self.transfer(route, exchange, stream) };
        }
        let (inside, hosts) = (self.ranks.local_world(), self.ranks.host_count());
        // Where parts for other hosts are large, and one piece in input and output, nothing needs to be copied.
        let home = self.ranks.host as usize;
        if self.ranks.is_blocked && hosts == 2 && count * size >= DIRECT_BYTES {
            // SAFETY: the caller promised that input and output are there and do not overlap.
            return unsafe { self.all_to_all_directly((input, output), count, dtype, stream) };
        }
        let in_place = self.ranks.is_blocked
            && world * count * size > PACKED_BYTES
            && count <= elements_of(STAGING, world, size);
        // Parts of this host go to the output at once, if those of the others are one piece then.
        let stays = in_place && (home == 0 || home + 1 == hosts);
        let most = if in_place { count } else { elements_of(STAGING, 4 * world, size).min(count) };
        let (order, by_host) = (self.ranks.by_index(route), self.ranks.by_host());
        let mut done = 0;
        while done < count {
            let some = most.min(count - done);
            let bytes = some * size;
            let mut slot = self.staging.whole();
            // Parts of this host's ranks for the rank of this index on each host.
            let sent = slot.take(world * bytes);
            if in_place {
                for host in 0..hosts {
                    let skip = (host * inside * bytes) as u64;
                    let to = if stays && host == home { output } else { sent.place };
                    let places = (input.offset_by(skip), to.offset_by(skip));
                    let what = (some, dtype, ReduceOp::Sum);
                    // SAFETY: the caller promised that input and output are there for all parts; staging is the engine's.
                    unsafe { self.inside(StandardCollective::AllToAll, places, what, 0, stream) }?;
                }
            } else {
                let (packed, mixed) = (slot.take(world * bytes), slot.take(world * bytes));
                let parts = (from.wrapping_add(done * size).cast_const(), count * size);
                // SAFETY: the caller promised that the input is there for all parts; staging, which has room for them,
                // does not overlap it.
                unsafe { self.pack_parts(parts, &order, bytes, packed.at, stream) }?;
                let what = (hosts * some, dtype, ReduceOp::Sum);
                let places = (packed.place, mixed.place);
                // SAFETY: staging is the engine's, and long enough.
                unsafe { self.inside(StandardCollective::AllToAll, places, what, 0, stream) }?;
                for (host, index) in
                    (0..hosts).flat_map(|host| (0..inside).map(move |at| (host, at)))
                {
                    let source = mixed.at.wrapping_add((index * hosts + host) * bytes);
                    let target = sent.at.wrapping_add((host * inside + index) * bytes);
                    // SAFETY: all parts of staging have room for the elements of all ranks, and do not overlap.
                    unsafe { self.copy((source, target), bytes, stream) }?;
                }
            }
            let mut parts = vec![inside * bytes; hosts];
            let arrived = if in_place { to } else { slot.take(world * bytes).at };
            let mut skip = 0;
            if stays {
                parts[home] = 0;
                skip = if home == 0 { inside * bytes } else { 0 };
            }
            let exchange = Transfer::AllToAll {
                output: arrived.wrapping_add(skip),
                input: sent.at.wrapping_add(skip),
                send: &parts,
                receive: &parts,
            };
            // SAFETY: staging has room for these bytes of each rank, the caller promised the rest, and the call waits
            // for the transfer or ends it.
            unsafe { self.transfer(route, exchange, stream) }?;
            if !in_place {
                let parts = (to.wrapping_add(done * size), count * size);
                // SAFETY: the caller promised that the output is there for all parts; staging does not overlap it.
                unsafe { self.unpack_parts(arrived, &by_host, bytes, parts, stream) }?;
            }
            done += some;
        }
        Ok(())
    }

    /// All-to-all between two hosts: parts for the other host go there straight from the input, while those of this host go
    /// by shared memory.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Engine`](crate::engine::Engine)'s unsafe methods, for input and output of parts of `count` elements.
    unsafe fn all_to_all_directly(
        &mut self,
        (input, output): (Place, Place),
        count: usize,
        dtype: DType,
        stream: &Stream,
    ) -> Result<()> {
        let (world, inside, bytes) =
            (self.ranks.world(), self.ranks.local_world(), count * dtype.size());
        let host = self.ranks.host as usize;
        // Parts of host 0 come first.
        let (here, there) = (host * inside * bytes, (1 - host) * inside * bytes);
        let mut parts = vec![0; world];
        parts[(1 - host) * inside..][..inside].fill(bytes);
        let exchange = Transfer::AllToAll {
            output: self.address(output).wrapping_add(there),
            input: self.address(input).wrapping_add(there),
            send: &parts,
            receive: &parts,
        };
        // SAFETY: the caller promised that input and output are there for all parts, of which these are half; the call
        // finishes the transfer, or ends it.
        let ticket = unsafe { self.begin_on(Route::Flat, exchange, stream) }?;
        let places = (input.offset_by(here as u64), output.offset_by(here as u64));
        let what = (count, dtype, ReduceOp::Sum);
        // SAFETY: the caller promised that input and output are there for all parts; these are the other half.
        unsafe { self.inside(StandardCollective::AllToAll, places, what, 0, stream) }?;
        self.finish_on(Route::Flat, ticket, stream)
    }
}
