//! All-to-alls over hosts whose parts differ.

#![allow(unsafe_code)] // hands raw buffers to engines

use symmpool_allocator::{Error, Result, Stream};

use super::ranks::Route;
use super::state::SpanningEngine;
use crate::algorithm::StandardCollective;
use crate::call::CallDescription;
use crate::outer::Transfer;
use crate::types::place::Place;
use crate::{DType, ReduceOp, SplitRows, SplitsAt};

/// Who sends how many bytes to whom, as far as this rank needs to know.
struct HostTraffic {
    /// Bytes that the ranks of this host send: a row for each, with a number for each rank of the group. Empty without phases
    /// inside hosts.
    rows: Vec<i64>,
    /// Bytes that each rank sends this one.
    received: Vec<usize>,
}

impl HostTraffic {
    /// Bytes that all ranks send this one.
    fn arriving(&self) -> Result<usize> {
        let sum = self.received.iter().try_fold(0_usize, |sum, bytes| sum.checked_add(*bytes));
        sum.ok_or_else(|| too_long("all_to_all_v"))
    }
}

/// Bytes to and from each rank.
pub(super) struct SplitBytes {
    send: Vec<usize>,
    receive: Vec<usize>,
}

/// Memory of a call on its way.
#[derive(Default)]
struct Room {
    /// Data for the ranks of one host, one behind the other.
    packed: Vec<u8>,
    /// Data of this host's ranks for those of this index, by host, and how much of it each of them sends.
    sent: Vec<u8>,
    here: Vec<Vec<usize>>,
    /// Data that comes, where it does not lie in the order of ranks.
    arrived: Vec<u8>,
    /// Data that comes, where the output has no room for it.
    all: Vec<u8>,
}

impl SpanningEngine {
    /// Bytes to and from each rank, unless they are not for all ranks, or places are wrong.
    pub(super) fn check_parts(
        &self,
        (input, output): (Place, Place),
        (send, receive): (&[usize], &[usize]),
        dtype: DType,
    ) -> Result<SplitBytes> {
        let (rank, world) = (self.ranks.rank, self.ranks.world());
        if send.len() != world || receive.len() != world {
            return Err(Error::invalid_argument(format!(
                "{} send and {} receive counts for {world} ranks on rank {rank}; one of each per rank is needed",
                send.len(),
                receive.len()
            )));
        }
        let (send, receive) = (bytes_of(send, dtype.size())?, bytes_of(receive, dtype.size())?);
        let total = |parts: &[usize]| Some(parts.iter().sum());
        let places = ((input, total(&send)), (output, total(&receive)));
        self.check_places(places.0, places.1, |_, _| false)?;
        Ok(SplitBytes { send, receive })
    }

    /// Bytes to each rank of a call with counts in memory, and those of a row.
    ///
    /// # Safety
    ///
    /// The counts are readable for all ranks.
    pub(super) unsafe fn check_rows(
        &self,
        (input, output): (Place, Place),
        rows: &SplitRows,
        splits: &SplitsAt,
    ) -> Result<(Vec<usize>, usize)> {
        let SplitRows { dtype, row, length, capacity } = *rows;
        let (rank, world) = (self.ranks.rank, self.ranks.world());
        splits.bytes(rank, world as u32, capacity)?;
        let size = row.checked_mul(dtype.size()).filter(|size| *size > 0);
        let size = size.ok_or_else(|| too_long("all_to_all_v with splits in memory"))?;
        let places = ((input, length.checked_mul(size)), (output, capacity.checked_mul(size)));
        self.check_places(places.0, places.1, |_, _| false)?;
        let mut left = length;
        let mut counts = Vec::with_capacity(world);
        for peer in 0..world {
            // SAFETY: the caller promised that the counts are readable.
            let count = unsafe { splits.read(peer) };
            let fits = usize::try_from(count).ok().filter(|count| *count <= left);
            let fits = fits.ok_or_else(|| {
                Error::invalid_argument(format!(
                    "all_to_all_v on rank {rank}: {count} rows for rank {peer}, where {left} of {length} are left"
                ))
            })?;
            left -= fits;
            counts.push(fits);
        }
        Ok((bytes_of(&counts, size)?, size))
    }

    /// All-to-all of so many bytes to and from each rank.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Engine`](crate::engine::Engine)'s unsafe methods.
    pub(super) unsafe fn exchange_parts(
        &mut self,
        call: CallDescription,
        (input, output): (Place, Place),
        SplitBytes { send, receive }: &SplitBytes,
        dtype: DType,
    ) -> Result<()> {
        let traffic = self.traffic(send)?;
        let differs = |rank: &usize| traffic.received[*rank] != receive[*rank];
        let sound = match (0..receive.len()).find(differs) {
            Some(rank) => Err(Error::mismatch(format!(
                "all_to_all_v: rank {rank} sends rank {} {} elements, which expects {}",
                self.ranks.rank,
                traffic.received[rank] / dtype.size(),
                receive[rank] / dtype.size()
            ))
            .naming([rank as u32])),
            None => self.room_for(send, &traffic, None),
        };
        let mut room = self.confirm(call, sound)?;
        let (from, to) = (self.address(input), self.address(output));
        // SAFETY: the caller promised that input and output are there for the sums of their parts.
        let made = unsafe { self.exchange_bytes((from, to), send, &traffic, &mut room) };
        made.map_err(|why| self.behind_transfers(why))
    }

    /// All-to-all of so many bytes to and from each rank, which goes from input to output between all ranks: on devices.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Engine`](crate::engine::Engine)'s unsafe methods.
    pub(super) unsafe fn exchange_directly(
        &mut self,
        (input, output): (Place, Place),
        SplitBytes { send, receive }: &SplitBytes,
        stream: &Stream,
    ) -> Result<()> {
        let exchange = Transfer::AllToAll {
            output: self.address(output),
            input: self.address(input),
            send,
            receive,
        };
        // SAFETY: the caller promised that input and output are there for the sums of their parts.
        unsafe { self.transfer(Route::Flat, exchange, stream) }
    }

    /// All-to-all of rows whose counts lie in memory. Returns how many rows came, which may be more than had room.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Engine`](crate::engine::Engine)'s unsafe methods.
    pub(super) unsafe fn exchange_splits(
        &mut self,
        call: CallDescription,
        (input, output): (Place, Place),
        (send, size): (&[usize], usize),
        rows: &SplitRows,
        splits: &SplitsAt,
    ) -> Result<usize> {
        let traffic = self.traffic(send)?;
        let (arriving, capacity) = (traffic.arriving()?, rows.capacity * size);
        let overflowing = (arriving > capacity).then_some(arriving);
        let sound = self.room_for(send, &traffic, overflowing);
        let mut room = self.confirm(call, sound)?;
        let (from, to) = (self.address(input), self.address(output));
        let mut all = std::mem::take(&mut room.all);
        let target = if overflowing.is_some() { all.as_mut_ptr() } else { to };
        // SAFETY: the caller promised that input and output have so many rows; the vector has room for all that arrives.
        let made = unsafe { self.exchange_bytes((from, target), send, &traffic, &mut room) };
        made.map_err(|why| self.behind_transfers(why))?;
        if overflowing.is_some() {
            // SAFETY: the caller promised that the output has room for `capacity` rows.
            unsafe { all.as_ptr().copy_to_nonoverlapping(to, capacity) };
        }
        let mut offset = 0;
        for (peer, bytes) in traffic.received.iter().enumerate() {
            let count = (bytes / size) as u64;
            // SAFETY: the caller promised that the array is null or writable for a count for each rank.
            unsafe { splits.write(splits.output, peer, count) };
            // SAFETY: the caller promised that the array is null or writable for a count for each rank.
            unsafe { splits.write(splits.offsets, peer, offset) };
            offset += count;
        }
        Ok(arriving / size)
    }

    /// Memory for the data of a call on its way, which ranks take before any of it moves.
    fn room_for(
        &self,
        send: &[usize],
        traffic: &HostTraffic,
        overflowing: Option<usize>,
    ) -> Result<Room> {
        let rank = self.ranks.rank;
        let mut room = Room { all: zeros(rank, overflowing.unwrap_or(0))?, ..Room::default() };
        if self.route() == Route::Flat {
            return Ok(room);
        }
        let (inside, hosts) = (self.ranks.local_world(), self.ranks.host_count());
        let (world, index) = (self.ranks.world(), self.ranks.index as usize);
        for host in 0..hosts {
            let column = self.ranks.at(host, index);
            let sent = (0..inside).map(|peer| traffic.rows[peer * world + column] as usize);
            room.here.push(sent.collect());
        }
        let largest = (0..hosts)
            .map(|host| -> usize { (0..inside).map(|peer| send[self.ranks.at(host, peer)]).sum() });
        room.packed = zeros(rank, largest.max().unwrap_or(0))?;
        let sent = room.here.iter().flatten().try_fold(0_usize, |sum, part| sum.checked_add(*part));
        room.sent = zeros(rank, sent.ok_or_else(|| too_long("all_to_all_v"))?)?;
        if !self.ranks.is_blocked {
            room.arrived = zeros(rank, traffic.arriving()?)?;
        }
        Ok(room)
    }

    /// Tells every rank how many bytes it gets, and learns how many this one gets.
    fn traffic(&mut self, send: &[usize]) -> Result<HostTraffic> {
        let world = self.ranks.world();
        let row: Vec<i64> = send.iter().map(|bytes| *bytes as i64).collect();
        let mut rows = Vec::new();
        let route = self.route();
        // For each rank of the outer engine, what it is told.
        let told: Vec<i64> = if route == Route::Rail {
            let (inside, index) = (self.ranks.local_world(), self.ranks.index as usize);
            rows = vec![0_i64; inside * world];
            let places = (
                Place::Unregistered(row.as_ptr().cast_mut().cast()),
                Place::Unregistered(rows.as_mut_ptr().cast()),
            );
            // SAFETY: both are as long as the call needs, and live until it has returned.
            unsafe {
                let what = (world, DType::I64, ReduceOp::Sum);
                self.inside(StandardCollective::AllGather, places, what, 0, &Stream::DEFAULT)
            }?;
            let hosts = 0..self.ranks.host_count();
            let pairs = hosts.flat_map(|host| (0..inside).map(move |peer| (host, peer)));
            pairs.map(|(host, peer)| rows[peer * world + self.ranks.at(host, index)]).collect()
        } else {
            row
        };
        let mut heard = vec![0_i64; told.len()];
        let each = vec![8 * told.len() / self.width(route); self.width(route)];
        let exchange = Transfer::AllToAll {
            output: heard.as_mut_ptr().cast(),
            input: told.as_ptr().cast(),
            send: &each,
            receive: &each,
        };
        // SAFETY: both are as long as their parts, and live until the transfer has ended, or is ended behind it.
        let made = unsafe { self.transfer(route, exchange, &Stream::DEFAULT) };
        made.map_err(|why| self.behind_transfers(why))?;
        let mut received = vec![0; world];
        let senders: Vec<u32> = match route {
            Route::Rail => self.ranks.hosts.iter().flatten().copied().collect(),
            Route::Flat => (0..world as u32).collect(),
        };
        for (sender, bytes) in senders.into_iter().zip(&heard) {
            received[sender as usize] = *bytes as usize;
        }
        Ok(HostTraffic { rows, received })
    }

    /// # Safety
    ///
    /// `from` is readable for the sum of `send` and `to` writable for all that this rank receives. Where this fails, you must end
    /// the transfers before either goes.
    unsafe fn exchange_bytes(
        &mut self,
        (from, to): (*const u8, *mut u8),
        send: &[usize],
        traffic: &HostTraffic,
        room: &mut Room,
    ) -> Result<()> {
        let receive = &traffic.received;
        if self.route() == Route::Flat {
            let exchange = Transfer::AllToAll { output: to, input: from, send, receive };
            // SAFETY: the caller promised that input and output are there, and ends the transfer if it fails.
            return unsafe { self.transfer(Route::Flat, exchange, &Stream::DEFAULT) };
        }
        let (inside, hosts) = (self.ranks.local_world(), self.ranks.host_count());
        let begins = starts(send);
        let Room { packed, sent, arrived, here, .. } = room;
        let mut to_hosts = Vec::with_capacity(hosts);
        let mut begin = 0;
        for (host, here) in here.iter().enumerate() {
            let there: Vec<usize> = (0..inside).map(|peer| self.ranks.at(host, peer)).collect();
            let parts: Vec<usize> = there.iter().map(|&rank| send[rank]).collect();
            packed.clear();
            for &rank in there.iter().filter(|rank| send[**rank] > 0) {
                // SAFETY: the caller promised that the input is readable for all parts.
                let part = unsafe {
                    std::slice::from_raw_parts(from.wrapping_add(begins[rank]), send[rank])
                };
                packed.extend_from_slice(part);
            }
            let places = (
                Place::Unregistered(packed.as_mut_ptr()),
                Place::Unregistered(sent[begin..].as_mut_ptr()),
            );
            // SAFETY: both are as long as their parts, and live until the call has returned.
            let made = unsafe {
                self.inner.all_to_all_v(places, (&parts, here), DType::U8, &Stream::DEFAULT)
            };
            made.map_err(|error| self.in_group(error))?;
            to_hosts.push(here.iter().sum::<usize>());
            begin += here.iter().sum::<usize>();
        }
        let of_host = |host: usize| -> usize {
            (0..inside).map(|peer| receive[self.ranks.at(host, peer)]).sum()
        };
        let from_hosts: Vec<usize> = (0..hosts).map(of_host).collect();
        let direct = self.ranks.is_blocked;
        let output = if direct { to } else { arrived.as_mut_ptr() };
        let exchange = Transfer::AllToAll {
            output,
            input: sent.as_ptr(),
            send: &to_hosts,
            receive: &from_hosts,
        };
        // SAFETY: the vectors are as long as their parts; the caller promised the output, and ends the transfer if it fails.
        unsafe { self.transfer(Route::Rail, exchange, &Stream::DEFAULT) }?;
        if !direct {
            let places = starts(receive);
            let mut at = 0;
            for &rank in self.ranks.hosts.iter().flatten() {
                let (rank, bytes) = (rank as usize, receive[rank as usize]);
                let part = &arrived[at..at + bytes];
                // SAFETY: the caller promised that the output is writable for all parts.
                unsafe {
                    part.as_ptr().copy_to_nonoverlapping(to.wrapping_add(places[rank]), bytes);
                };
                at += bytes;
            }
        }
        Ok(())
    }
}

/// So many bytes, unless there is no memory for them.
fn zeros(rank: u32, count: usize) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(count).map_err(|_| {
        Error::out_of_memory(format!(
            "all_to_all_v on rank {rank}: no memory for {count} bytes on their way between hosts; send less at once"
        ))
    })?;
    bytes.resize(count, 0);
    Ok(bytes)
}

/// Bytes of parts of so many elements.
fn bytes_of(parts: &[usize], size: usize) -> Result<Vec<usize>> {
    let bytes: Option<Vec<usize>> = parts.iter().map(|count| count.checked_mul(size)).collect();
    let sum = bytes
        .as_ref()
        .and_then(|bytes| bytes.iter().try_fold(0_usize, |sum, bytes| sum.checked_add(*bytes)));
    match (bytes, sum) {
        (Some(bytes), Some(sum)) if sum <= isize::MAX as usize => Ok(bytes),
        _ => Err(too_long("all_to_all_v")),
    }
}

fn too_long(what: &str) -> Error {
    Error::invalid_argument(format!("{what} of more elements than memory can have"))
}

/// Where each part begins, where they follow each other.
fn starts(parts: &[usize]) -> Vec<usize> {
    let mut next = 0;
    let begin = |bytes: &usize| {
        let here = next;
        next += bytes;
        here
    };
    parts.iter().map(begin).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_there_is_not_is_an_error() {
        assert_eq!(zeros(3, 5).unwrap(), [0; 5]);
        let error = zeros(3, isize::MAX as usize).unwrap_err();
        assert!(error.is_out_of_memory() && error.to_string().contains("rank 3"), "{error}");
    }
}
