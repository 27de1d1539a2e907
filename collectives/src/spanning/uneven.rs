//! Reductions among hosts of different numbers of ranks.
//!
//! In an all-reduce each host reduces inside, so that each of its ranks has a segment of the host's sum: as many segments as the host has ranks.
//! Segments of different hosts overlap. A rank exchanges with each rank of another host what their segments share, adds up
//! the hosts in their order, and all segments are gathered inside. A reduce-scatter does so with the parts of other hosts' ranks:
//! a host's sums of them are its segments, and each rank gets what its own part shares with them. So sums have the bits of those
//! that leaders make.

#![allow(unsafe_code)] // hands raw buffers to engines

use symmpool_allocator::{Result, Stream};

use super::exchange::HostReduction;
use super::ranks::Route;
use super::staging::{PART_BYTES, SLOT_BYTES, STAGING, StagingPart, elements_of};
use super::state::SpanningEngine;
use crate::ReduceOp;
use crate::algorithm::StandardCollective;
use crate::call::Arguments;
use crate::outer::{Ticket, Transfer};
use crate::types::place::Place;

/// A chunk on its way.
#[derive(Clone, Copy)]
struct UnevenChunk {
    /// First element and number of elements.
    first: usize,
    count: usize,
    /// This rank's segment of its host's sum, and what other ranks have sent of theirs, in rank order.
    own: StagingPart,
    arrived: StagingPart,
    /// The other hosts' segments, one behind the other.
    others: StagingPart,
    ticket: Ticket,
}

impl SpanningEngine {
    /// All-reduce of hosts of different numbers of ranks.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Engine`](crate::engine::Engine)'s unsafe methods.
    pub(super) unsafe fn all_reduce_uneven(
        &mut self,
        given: &Arguments,
        reduction: &HostReduction,
        stream: &Stream,
    ) -> Result<()> {
        let Arguments { input, output, count, dtype, .. } = *given;
        let (size, hosts) = (dtype.size(), self.ranks.host_count());
        // Every host divides a chunk among its ranks. One that has a single rank keeps all of it in staging.
        let grain = self.ranks.common_multiple();
        let wished = PART_BYTES / size * self.ranks.hosts.max_ranks() as usize;
        let most = wished.min(elements_of(SLOT_BYTES, 3 * hosts, size)) / grain * grain;
        let large = if most > 0 { count / grain * grain } else { 0 };
        let chunks = if large > 0 { large.div_ceil(most) } else { 0 };
        let mut begun: Option<UnevenChunk> = None;
        for turn in 0..=chunks {
            let next = if turn < chunks {
                let first = turn * most;
                let from = input.offset_by((first * size) as u64);
                // SAFETY: the caller promised that the input is there; the chunk that had this part of staging has ended.
                let chunk = unsafe {
                    self.begin_uneven(
                        from,
                        (turn, first),
                        most.min(large - first),
                        reduction,
                        stream,
                    )
                };
                Some(chunk?)
            } else {
                None
            };
            if let Some(chunk) = begun {
                let to = output.offset_by((chunk.first * size) as u64);
                // SAFETY: the caller promised that the output is there for the chunk.
                unsafe { self.end_uneven(&chunk, to, reduction, stream) }?;
            }
            begun = next;
        }
        let mut done = large;
        let most = elements_of(SLOT_BYTES, hosts + 1, size);
        while done < count {
            let some = most.min(count - done);
            let skip = (done * size) as u64;
            let places = (input.offset_by(skip), output.offset_by(skip));
            // SAFETY: the caller promised that input and output are there for `count` elements, of which these are some.
            unsafe { self.all_reduce_rest(places, some, reduction, stream) }?;
            done += some;
        }
        Ok(())
    }

    /// Reduce-scatter of hosts of different numbers of ranks: rank `r` gets the reduction of all ranks' part `r`.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Engine`](crate::engine::Engine)'s unsafe methods.
    pub(super) unsafe fn reduce_scatter_uneven(
        &mut self,
        given: &Arguments,
        reduction: &HostReduction,
        stream: &Stream,
    ) -> Result<()> {
        let Arguments { input, output, count, dtype, .. } = *given;
        let (size, world, hosts) = (dtype.size(), self.ranks.world(), self.ranks.host_count());
        let (from, to) = (self.address(input).cast_const(), self.address(output));
        let grain = self.ranks.common_multiple();
        let most = elements_of(STAGING, 2 * world + 2 * hosts, size) / grain * grain;
        let large = if most > 0 { count / grain * grain } else { 0 };
        let mut done = 0;
        while done < large {
            let some = most.min(large - done);
            let parts = (from.wrapping_add(done * size), count * size);
            // SAFETY: the caller promised that the input is there for all parts, and the output for its elements.
            unsafe {
                self.scatter_chunk(parts, some, to.wrapping_add(done * size), reduction, stream)
            }?;
            done += some;
        }
        // Behind these, as many elements of each part as staging has room for are reduced on all ranks.
        let most = elements_of(SLOT_BYTES, (hosts + 1) * world, size);
        let all: Vec<usize> = (0..world).collect();
        while done < count {
            let some = most.min(count - done);
            let mut slot = self.staging.slot(1);
            let whole = slot.take(world * some * size);
            let parts = (from.wrapping_add(done * size), count * size);
            // SAFETY: the caller promised that the input is there for all parts; staging, which has room for them, does not
            // overlap it.
            unsafe { self.pack_parts(parts, &all, some * size, whole.at, stream) }?;
            // SAFETY: the packed parts are the engine's.
            unsafe {
                self.all_reduce_rest((whole.place, whole.place), world * some, reduction, stream)
            }?;
            let own = whole.at.wrapping_add(self.ranks.rank as usize * some * size).cast_const();
            // SAFETY: the caller promised that the output is there for its elements; staging does not overlap it.
            unsafe { self.copy((own, to.wrapping_add(done * size)), some * size, stream) }?;
            done += some;
        }
        Ok(())
    }

    /// Reduces `some` elements of every rank's part, which begin at `from` and are `pitch` bytes apart: as many as every host
    /// can divide.
    ///
    /// # Safety
    ///
    /// The input is readable for these elements of all parts, and `to` is writable for `some` of them.
    unsafe fn scatter_chunk(
        &mut self,
        (from, pitch): (*const u8, usize),
        some: usize,
        to: *mut u8,
        reduction: &HostReduction,
        stream: &Stream,
    ) -> Result<()> {
        let (size, inside) = (reduction.dtype.size(), self.ranks.local_world());
        let (world, hosts) = (self.ranks.world(), self.ranks.host_count());
        let (here, bytes) = (self.ranks.host as usize, some * size);
        let near: Vec<usize> = (0..inside).map(|index| self.ranks.at(here, index)).collect();
        let far = self.far_ranks(here);
        let mut slot = self.staging.whole();
        let (own, segment) = (slot.take(bytes), slot.take(far.len() * bytes / inside));
        let packed = slot.take(world * bytes);
        let behind = inside * bytes;
        for (ranks, to) in [(&near, packed.at), (&far, packed.at.wrapping_add(behind))] {
            // SAFETY: the caller promised that the input is there for all parts; staging, which has room for them, does not
            // overlap it.
            unsafe { self.pack_parts((from, pitch), ranks, bytes, to, stream) }?;
        }
        let each = far.len() * some / inside;
        let far_place = packed.place.offset_by(behind as u64);
        for (input, output, count) in
            [(packed.place, own.place, some), (far_place, segment.place, each)]
        {
            let what = (count, reduction.dtype, reduction.inside);
            // SAFETY: the parts of staging have room for the elements of all ranks, and do not overlap.
            unsafe {
                self.inside(StandardCollective::ReduceScatter, (input, output), what, 0, stream)
            }?;
        }
        // Elements that this rank's segment has of each other rank's part, and other ranks' segments of this one's.
        let mut send = vec![0; world];
        let begin = self.ranks.index as usize * each;
        for (nth, &rank) in far.iter().enumerate() {
            send[rank] = shared((begin, begin + each), (nth * some, (nth + 1) * some)).1 * size;
        }
        let mut receive = vec![0; world];
        for host in self.ranks.other_hosts() {
            let theirs = self.far_ranks(host);
            let ranks = self.ranks.ranks_on(host);
            let each = theirs.len() * some / ranks;
            let mine =
                theirs.iter().position(|&rank| rank == self.ranks.rank as usize).unwrap_or(0);
            for index in 0..ranks {
                let segment = (index * each, (index + 1) * each);
                let (_, count) = shared(segment, (mine * some, (mine + 1) * some));
                receive[self.ranks.at(host, index)] = count * size;
            }
        }
        // Parts of other hosts' ranks follow each other by rank, and so do a segment's elements for them.
        let arrived = slot.take((hosts - 1) * bytes);
        let exchange = Transfer::AllToAll {
            output: arrived.at,
            input: segment.at,
            send: &send,
            receive: &receive,
        };
        // SAFETY: staging has room for these bytes, and the call waits for the transfer or ends it.
        unsafe { self.transfer(Route::Flat, exchange, stream) }?;
        let others = if hosts > 2 { slot.take((hosts - 1) * bytes) } else { arrived };
        let sums = self.places_of_sums(own, others, bytes);
        if hosts > 2 {
            let mut filled = vec![0; hosts];
            let mut from = arrived.at.cast_const();
            for (rank, &count) in receive.iter().enumerate().filter(|(_, count)| **count > 0) {
                let host = self.ranks.hosts.of(rank as u32) as usize;
                // SAFETY: every other host sends as many bytes as this rank's part has, for which there is room.
                unsafe { self.copy((from, sums[host].wrapping_add(filled[host])), count, stream) }?;
                filled[host] += count;
                from = from.wrapping_add(count);
            }
        }
        let partials: Vec<*const u8> = sums.iter().map(|sum| sum.cast_const()).collect();
        // SAFETY: all hosts' sums are there; the caller promised that the output is. It may be part of the input, which is read
        // no more.
        unsafe { self.reduce(reduction, &partials, some, to, stream) }?;
        Ok(())
    }

    /// Where sums of `bytes` lie, by host: this host's own one, and those of the others one behind the other.
    fn places_of_sums(&self, own: StagingPart, others: StagingPart, bytes: usize) -> Vec<*mut u8> {
        let here = self.ranks.host as usize;
        let behind = |host: usize| (host - usize::from(host > here)) * bytes;
        let place = |host| if host == here { own.at } else { others.at.wrapping_add(behind(host)) };
        (0..self.ranks.host_count()).map(place).collect()
    }

    /// Ranks of all hosts but one, in their order.
    fn far_ranks(&self, host: usize) -> Vec<usize> {
        (0..self.ranks.world())
            .filter(|&rank| self.ranks.hosts.of(rank as u32) as usize != host)
            .collect()
    }

    /// Elements of this rank's segment of `count` that each rank of another host has in its own: where they begin in this
    /// rank's, and how many they are.
    fn shared_elements(&self, count: usize) -> Vec<(usize, usize)> {
        let segment = |host: usize, index: usize| {
            let each = count / self.ranks.ranks_on(host);
            (index * each, (index + 1) * each)
        };
        let (begin, end) = segment(self.ranks.host as usize, self.ranks.index as usize);
        let mut all = vec![(0, 0); self.ranks.world()];
        for host in self.ranks.other_hosts() {
            for index in 0..self.ranks.ranks_on(host) {
                all[self.ranks.at(host, index)] = shared((begin, end), segment(host, index));
            }
        }
        all
    }

    /// Reduces a chunk inside the host, and begins to exchange segments.
    ///
    /// # Safety
    ///
    /// The input is readable for `count` elements, which every host can divide, and the turn's part of staging is not in use.
    unsafe fn begin_uneven(
        &mut self,
        input: Place,
        (turn, first): (usize, usize),
        count: usize,
        reduction: &HostReduction,
        stream: &Stream,
    ) -> Result<UnevenChunk> {
        let (size, inside) = (reduction.dtype.size(), self.ranks.local_world());
        let (each, others) = (count / inside, self.ranks.host_count() - 1);
        let mut slot = self.staging.slot(turn);
        let own = slot.take(each * size);
        if inside > 1 {
            let what = (each, reduction.dtype, reduction.inside);
            // SAFETY: the caller promised that the input is there; staging is the engine's, and long enough.
            unsafe {
                self.inside(StandardCollective::ReduceScatter, (input, own.place), what, 0, stream)
            }?;
        } else {
            let from = self.address(input).cast_const();
            // SAFETY: the caller promised that the input is there for `count` elements, as many as the segment has.
            unsafe { self.copy((from, own.at), each * size, stream) }?;
        }
        let arrived = slot.take(others * each * size);
        let shared = self.shared_elements(count);
        let bytes: Vec<usize> = shared.iter().map(|(_, count)| count * size).collect();
        let (from, held) = if others == 1 {
            // Ranks of the other host follow each other, and so do their parts of this segment.
            (own.at, arrived)
        } else {
            let packed = slot.take(others * each * size);
            let mut to = packed.at;
            for (first, count) in &shared {
                let from = own.at.wrapping_add(first * size);
                // SAFETY: the segment has these elements, and there is room for it once for each other host.
                unsafe { self.copy((from, to), count * size, stream) }?;
                to = to.wrapping_add(count * size);
            }
            (packed.at, slot.take(others * each * size))
        };
        let exchange =
            Transfer::AllToAll { output: arrived.at, input: from, send: &bytes, receive: &bytes };
        // SAFETY: staging is the engine's, and long enough; the call finishes the transfer, or ends it.
        let ticket = unsafe { self.begin_on(Route::Flat, exchange, stream) }?;
        Ok(UnevenChunk { first, count, own, arrived, others: held, ticket })
    }

    /// Adds up what all hosts have of this rank's segment, and gathers segments inside the host.
    ///
    /// # Safety
    ///
    /// The output is writable for the chunk.
    unsafe fn end_uneven(
        &mut self,
        chunk: &UnevenChunk,
        output: Place,
        reduction: &HostReduction,
        stream: &Stream,
    ) -> Result<()> {
        let (size, inside) = (reduction.dtype.size(), self.ranks.local_world());
        let each = chunk.count / inside;
        self.finish_on(Route::Flat, chunk.ticket, stream)?;
        let hosts = self.ranks.host_count();
        let sums = self.places_of_sums(chunk.own, chunk.others, each * size);
        if hosts > 2 {
            let mut from = chunk.arrived.at.cast_const();
            for (rank, (first, count)) in self.shared_elements(chunk.count).into_iter().enumerate()
            {
                if count > 0 {
                    let to = sums[self.ranks.hosts.of(rank as u32) as usize];
                    // SAFETY: every other host's segment has room for the elements that its ranks have sent.
                    unsafe {
                        self.copy((from, to.wrapping_add(first * size)), count * size, stream)
                    }?;
                    from = from.wrapping_add(count * size);
                }
            }
        }
        let partials: Vec<*const u8> = sums.iter().map(|sum| sum.cast_const()).collect();
        let to = if inside == 1 { self.address(output) } else { chunk.own.at };
        // SAFETY: all hosts' segments are there and are no longer sent; the result goes where this host's segment is, or to
        // the output, which the caller promised.
        unsafe { self.reduce(reduction, &partials, each, to, stream) }?;
        if inside > 1 {
            let what = (each, reduction.dtype, ReduceOp::Sum);
            let places = (chunk.own.place, output);
            // SAFETY: the caller promised that the output is there; the segment is the engine's.
            unsafe { self.inside(StandardCollective::AllGather, places, what, 0, stream) }?;
        }
        Ok(())
    }

    /// All-reduce of the few elements that hosts cannot divide: the leaders gather the hosts' sums, and add them up.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Engine`](crate::engine::Engine)'s unsafe methods, for so many elements as staging has
    /// room for once for each host and once more.
    unsafe fn all_reduce_rest(
        &mut self,
        (input, output): (Place, Place),
        count: usize,
        reduction: &HostReduction,
        stream: &Stream,
    ) -> Result<()> {
        let (hosts, bytes) = (self.ranks.host_count(), count * reduction.dtype.size());
        let inside = self.ranks.local_world();
        let mut slot = self.staging.slot(0);
        let (own, all) = (slot.take(bytes), slot.take(hosts * bytes));
        let mut from = self.address(input);
        if inside > 1 {
            let what = (count, reduction.dtype, reduction.inside);
            // SAFETY: the caller promised that the input is there; staging is the engine's, and long enough.
            unsafe {
                self.inside(StandardCollective::AllReduce, (input, own.place), what, 0, stream)
            }?;
            from = own.at;
        }
        if self.leads() {
            let gather = Transfer::AllGather { output: all.at, input: from, bytes };
            // SAFETY: staging has room for this, the caller promised that the input is there, and the call waits for the
            // transfer or ends it.
            unsafe { self.transfer(Route::Rail, gather, stream) }?;
            // SAFETY: the arrays lie in staging one behind the other; the caller promised that the output is there.
            unsafe {
                self.reduce_row(reduction, (all.at, hosts), count, self.address(output), stream)
            }?;
        } else {
            // All ranks of a host know that a call fails before they go on inside it.
            self.settle()?;
        }
        if inside == 1 {
            return Ok(());
        }
        let what = (count, reduction.dtype, ReduceOp::Sum);
        // SAFETY: the caller promised that the output is there on every rank; the leader's has the result.
        unsafe { self.inside(StandardCollective::Broadcast, (output, output), what, 0, stream) }
    }
}

/// Elements that two ranges share: where they begin in the first one, and how many they are.
fn shared((begin, end): (usize, usize), (first, last): (usize, usize)) -> (usize, usize) {
    let (from, to) = (begin.max(first), end.min(last));
    if from < to { (from - begin, to - from) } else { (0, 0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_share_what_lies_in_both() {
        assert_eq!(shared((10, 20), (0, 12)), (0, 2));
        assert_eq!(shared((10, 20), (15, 30)), (5, 5));
        assert_eq!(shared((10, 20), (5, 40)), (0, 10));
        assert_eq!(shared((10, 20), (20, 30)), (0, 0));
    }
}
