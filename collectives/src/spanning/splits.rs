//! All-to-alls over hosts whose parts differ.

#![allow(unsafe_code)] // hands raw buffers to engines

use symmpool_allocator::{Error, Result, Stream};

use super::ranks::{RankTable, Route};
use super::state::SpanningEngine;
use crate::algorithm::StandardCollective;
use crate::outer::Transfer;
use crate::types::place::Place;
use crate::{DType, ReduceOp, SplitRows, SplitsAt};

/// Who sends how many bytes to whom, as far as this rank needs to know.
struct Traffic {
    /// Bytes that the ranks of this host send: a row for each, with a number for each rank of the group. Empty without phases
    /// inside hosts.
    rows: Vec<i64>,
    /// Bytes that each rank sends this one.
    received: Vec<usize>,
}

impl SpanningEngine {
    /// All-to-all of so many elements to and from each rank.
    ///
    /// # Safety
    ///
    /// You must keep the promises of the engine's methods.
    pub(super) unsafe fn exchange_parts(
        &mut self,
        (input, output): (Place, Place),
        (send, receive): (&[usize], &[usize]),
        dtype: DType,
    ) -> Result<()> {
        let (send, receive) = (bytes_of(send, dtype.size())?, bytes_of(receive, dtype.size())?);
        let traffic = self.traffic(&send)?;
        let differs = |rank: &usize| traffic.received[*rank] != receive[*rank];
        if let Some(rank) = (0..receive.len()).find(differs) {
            let size = dtype.size();
            return Err(Error::mismatch(format!(
                "all_to_all_v: rank {rank} sends rank {} {} elements, which expects {}",
                self.ranks.rank,
                traffic.received[rank] / size,
                receive[rank] / size
            ))
            .naming([rank as u32]));
        }
        let (from, to) = (self.address(input), self.address(output));
        // SAFETY: the caller promised that input and output are there for the sums of their parts.
        unsafe { self.exchange_bytes((from, to), &send, &traffic) }
    }

    /// All-to-all of rows whose counts lie in memory. Returns how many rows came, which may be more than had room.
    ///
    /// # Safety
    ///
    /// You must keep the promises of the engine's methods.
    pub(super) unsafe fn exchange_splits(
        &mut self,
        (input, output): (Place, Place),
        rows: &SplitRows,
        splits: &SplitsAt,
    ) -> Result<usize> {
        let SplitRows { dtype, row, length, capacity } = *rows;
        let (rank, world) = (self.ranks.rank, self.ranks.world());
        splits.bytes(rank, world as u32, capacity)?;
        let size = row.checked_mul(dtype.size()).filter(|size| *size > 0);
        let size = size.ok_or_else(|| too_long("all_to_all_v with splits in memory"))?;
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
        let send = bytes_of(&counts, size)?;
        let traffic = self.traffic(&send)?;
        let arriving: usize = traffic.received.iter().sum();
        let (from, to) = (self.address(input), self.address(output));
        if arriving <= capacity * size {
            // SAFETY: the caller promised that input and output have so many rows.
            unsafe { self.exchange_bytes((from, to), &send, &traffic) }?;
        } else {
            let mut all = vec![0_u8; arriving];
            // SAFETY: the vector has room for all that arrives.
            let made = unsafe { self.exchange_bytes((from, all.as_mut_ptr()), &send, &traffic) };
            // A transfer that failed may still be under way: `fail` ends it.
            made.map_err(|why| self.fail(why))?;
            // SAFETY: the caller promised that the output has room for `capacity` rows.
            unsafe { all.as_ptr().copy_to_nonoverlapping(to, capacity * size) };
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

    /// Tells every rank how many bytes it gets, and learns how many this one gets.
    fn traffic(&mut self, send: &[usize]) -> Result<Traffic> {
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
                self.inside(StandardCollective::AllGather, places, what, 0)
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
        // SAFETY: both are as long as their parts, and live until the transfer has ended: `fail` ends one that failed.
        let made = unsafe { self.transfer(route, exchange) };
        made.map_err(|why| self.fail(why))?;
        let mut received = vec![0; world];
        let senders: Vec<u32> = match route {
            Route::Rail => self.ranks.hosts.iter().flatten().copied().collect(),
            Route::Flat => (0..world as u32).collect(),
        };
        for (sender, bytes) in senders.into_iter().zip(&heard) {
            received[sender as usize] = *bytes as usize;
        }
        Ok(Traffic { rows, received })
    }

    /// # Safety
    ///
    /// `from` is readable for the sum of `send` and `to` writable for all that this rank receives.
    unsafe fn exchange_bytes(
        &mut self,
        (from, to): (*const u8, *mut u8),
        send: &[usize],
        traffic: &Traffic,
    ) -> Result<()> {
        let receive = &traffic.received;
        if self.route() == Route::Flat {
            let exchange = Transfer::AllToAll { output: to, input: from, send, receive };
            // SAFETY: the caller promised that input and output are there; the call waits for the transfer, or ends it.
            return unsafe { self.transfer(Route::Flat, exchange) };
        }
        let (inside, hosts) = (self.ranks.local_world(), self.ranks.host_count());
        let (world, index) = (self.ranks.world(), self.ranks.index as usize);
        let arriving = |peer: usize, host: usize, ranks: &RankTable| {
            traffic.rows[peer * world + ranks.at(host, index)] as usize
        };
        let begins = starts(send);
        let mut sent = Vec::new();
        let mut to_hosts = Vec::with_capacity(hosts);
        for host in 0..hosts {
            let there: Vec<usize> = (0..inside).map(|peer| self.ranks.at(host, peer)).collect();
            let parts: Vec<usize> = there.iter().map(|&rank| send[rank]).collect();
            let here: Vec<usize> =
                (0..inside).map(|peer| arriving(peer, host, &self.ranks)).collect();
            let mut packed = Vec::with_capacity(parts.iter().sum());
            for &rank in there.iter().filter(|rank| send[**rank] > 0) {
                // SAFETY: the caller promised that the input is readable for all parts.
                let part = unsafe {
                    std::slice::from_raw_parts(from.wrapping_add(begins[rank]), send[rank])
                };
                packed.extend_from_slice(part);
            }
            let begin = sent.len();
            sent.resize(begin + here.iter().sum::<usize>(), 0_u8);
            let places = (
                Place::Unregistered(packed.as_mut_ptr()),
                Place::Unregistered(sent[begin..].as_mut_ptr()),
            );
            // SAFETY: both are as long as their parts, and live until the call has returned.
            let made = unsafe {
                self.inner.all_to_all_v(places, (&parts, &here), DType::U8, &Stream::DEFAULT)
            };
            made.map_err(|error| self.in_group(error))?;
            to_hosts.push(here.iter().sum::<usize>());
        }
        let of_host = |host: usize| -> usize {
            (0..inside).map(|peer| receive[self.ranks.at(host, peer)]).sum()
        };
        let from_hosts: Vec<usize> = (0..hosts).map(of_host).collect();
        let direct = self.ranks.is_blocked;
        let mut arrived = vec![0_u8; if direct { 0 } else { from_hosts.iter().sum() }];
        let output = if direct { to } else { arrived.as_mut_ptr() };
        let exchange = Transfer::AllToAll {
            output,
            input: sent.as_ptr(),
            send: &to_hosts,
            receive: &from_hosts,
        };
        // SAFETY: the vectors are as long as their parts; the caller promised the output. They live until the
        // transfer has
        // ended: `fail` ends one that failed.
        let made = unsafe { self.transfer(Route::Rail, exchange) };
        made.map_err(|why| self.fail(why))?;
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
