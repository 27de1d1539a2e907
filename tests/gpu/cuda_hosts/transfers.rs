//! Transfers by outer engines over NCCL, on memory of devices.

#![allow(unsafe_code)] // names blocks by their addresses

use std::time::Duration;

use symmpool_allocator::{Error, Pool, Result, Stream};
use symmpool_collectives::{Outer, Outers, Transfer};

use crate::job::{RankOfJob, ensure};
use crate::memory::{read, write};

const STREAM: &Stream = &Stream::DEFAULT;

/// The byte at a place of what a rank sends.
fn byte(rank: usize, at: usize) -> u8 {
    (at * 31 + rank * 67 + at / 251) as u8
}

/// Moves bytes by each kind of transfer on both engines.
pub(crate) fn run(rank: &RankOfJob) -> Result<()> {
    let pool = rank.pool()?;
    let before = other_bytes(&pool)?;
    let mut outers = Outers::nccl(&pool, rank.timeout)?;
    for bytes in [1, 4096, 300_001] {
        each_kind(&pool, &mut *outers.flat, bytes)?;
        if let Some(rail) = &mut outers.rail {
            each_kind(&pool, &mut **rail, bytes)?;
        }
    }
    if rank.rank == 0 {
        let took = other_bytes(&pool)?.saturating_sub(before) >> 20;
        println!(
            "two communicators, connected, take {took} MiB of rank 0's device, if no other rank has it"
        );
    }
    Ok(())
}

/// Bytes of the device that are in use, but for the pool's.
fn other_bytes(pool: &Pool) -> Result<u64> {
    let cuda = pool.driver().as_cuda().ok_or_else(|| Error::unsupported("no device"))?;
    let (free, total) = cuda.memory_info()?;
    Ok((total - free).saturating_sub(pool.stats()?.reserved()))
}

fn each_kind(pool: &Pool, outer: &mut dyn Outer, bytes: usize) -> Result<()> {
    let (me, world) = (outer.rank() as usize, outer.world() as usize);
    outer.set_timeout(Duration::from_secs(30));
    let doing = |what: &str| format!("{what} of {bytes} bytes on rank {me} of {world}");
    let input: Vec<u8> = (0..bytes * world).map(|at| byte(me, at)).collect();
    let from = pool.alloc::<u8>(input.len())?;
    let to = pool.alloc::<u8>(input.len())?;
    write(pool, &from, &input)?;
    write(pool, &to, &vec![0; input.len()])?;
    let gather = Transfer::AllGather { output: to.as_ptr(), input: from.as_ptr(), bytes };
    // SAFETY: both blocks live and have room for it, and nobody touches them until the stream is past it.
    let ticket = unsafe { outer.begin(gather, STREAM) }?;
    outer.finish(ticket, STREAM)?;
    let wanted: Vec<u8> = (0..world).flat_map(|r| (0..bytes).map(move |at| byte(r, at))).collect();
    ensure(read(pool, &to, wanted.len())? == wanted, || doing("an all-gather"))?;

    // Two at once, of which the second is finished first; rank r sends r more bytes to each following rank, and none to
    // itself.
    let count = |sender: usize, owner: usize| match (sender, owner) {
        _ if sender == owner => 0,
        _ => (bytes + sender * (owner + 1)) % (bytes + 1),
    };
    let send: Vec<usize> = (0..world).map(|peer| count(me, peer)).collect();
    let receive: Vec<usize> = (0..world).map(|peer| count(peer, me)).collect();
    let exchange = Transfer::AllToAll {
        output: to.as_ptr(),
        input: from.as_ptr(),
        send: &send,
        receive: &receive,
    };
    let last = pool.alloc::<u8>(bytes)?;
    let root = world as u32 - 1;
    write(pool, &last, &input[..bytes])?;
    let copy = Transfer::Broadcast { data: last.as_ptr(), bytes, root };
    // SAFETY: both blocks live and have room for it, and nobody touches them until the stream is past it.
    let first = unsafe { outer.begin(exchange, STREAM) }?;
    // SAFETY: the block lives and has room for it, and nobody touches it until the stream is past it.
    let second = unsafe { outer.begin(copy, STREAM) }?;
    outer.finish(second, STREAM)?;
    outer.finish(first, STREAM)?;
    let wanted: Vec<u8> = (0..world)
        .flat_map(|sender| {
            let skip: usize = (0..me).map(|owner| count(sender, owner)).sum();
            (skip..skip + count(sender, me)).map(move |at| byte(sender, at))
        })
        .collect();
    ensure(read(pool, &to, wanted.len())? == wanted, || doing("an all-to-all"))?;
    let wanted: Vec<u8> = (0..bytes).map(|at| byte(root as usize, at)).collect();
    ensure(read(pool, &last, bytes)? == wanted, || doing("a broadcast"))
}
