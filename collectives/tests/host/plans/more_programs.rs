//! The programs that `symmpool.language.library` has besides those of `programs.rs`.

use symmpool_collectives::plan::{Buffer, Collective, Plan, Protocol, Span};

use super::builder::{Me, place, plan};

/// Consecutive chunks.
fn several(rank: u32, buffer: Buffer, index: u32, count: u32) -> Span {
    Span { rank, buffer, index, count }
}

/// The ring of ranks: the next one and the last one.
fn neighbours(me: &Me) -> (u32, u32) {
    ((me.rank + 1) % me.world, (me.rank + me.world - 1) % me.world)
}

/// Two shots through scratch alone, also in LL.
pub(super) fn two_shot_in_scratch(world: u32) -> Plan {
    plan("two_shot_in_scratch", Collective::AllReduce, world, world, 2 * world, |me| {
        let own = me.rank;
        for peer in me.peers() {
            me.put(place(peer, Buffer::Scratch, own), me.input(peer));
        }
        me.signal_all();
        me.wait_all();
        let of = |rank| if rank == own { me.input(own) } else { me.scratch(rank) };
        let srcs = (0..world).map(of).collect();
        me.reduce(me.output(own), srcs);
        for peer in me.peers() {
            me.put(place(peer, Buffer::Scratch, world + own), me.output(own));
            me.signal(peer);
        }
        for peer in me.peers() {
            me.wait(peer);
            me.copy(me.output(peer), me.scratch(world + peer));
        }
    })
}

/// Recursive halving, then doubling, for powers of two.
pub(super) fn halving_doubling(world: u32) -> Plan {
    plan("halving_doubling", Collective::AllReduce, world, world, 2 * world, |me| {
        let rank = me.rank;
        let (mut first, mut count, mut have) = (0, world, (Buffer::Input, 0));
        while count > 1 {
            count /= 2;
            let peer = rank ^ count;
            let upper = rank & count != 0;
            let (keep, give) = if upper { (first + count, first) } else { (first, first + count) };
            let of = |chunk: u32| several(rank, have.0, have.1 + chunk, count);
            me.put(several(peer, Buffer::Scratch, count, count), of(give));
            me.signal(peer);
            me.wait(peer);
            let got = several(rank, Buffer::Scratch, count, count);
            let to = if count > 1 {
                several(rank, Buffer::Scratch, world + keep, count)
            } else {
                several(rank, Buffer::Output, keep, count)
            };
            me.reduce(to, if upper { vec![got, of(keep)] } else { vec![of(keep), got] });
            (first, have) = (keep, (Buffer::Scratch, world));
        }
        while count < world {
            let peer = rank ^ count;
            let chunks = several(rank, Buffer::Output, first, count);
            me.put(several(peer, Buffer::Output, first, count), chunks);
            me.signal(peer);
            me.wait(peer);
            (first, count) = (first & !count, 2 * count);
        }
    })
}

/// Two groups of neighbours: reduce-scatter in each, a sum across, all-gather in each. For even numbers of ranks.
pub(super) fn hierarchical(world: u32) -> Plan {
    let size = world / 2;
    plan("hierarchical", Collective::AllReduce, world, world, 2 * size + 4, |me| {
        let rank = me.rank;
        let (base, at) = (rank / size * size, rank % size);
        let near: Vec<u32> = (base..base + size).filter(|peer| *peer != rank).collect();
        let across = (rank + size) % world;
        let pair = |buffer, index| several(rank, buffer, index, 2);
        let (half, other) = (pair(Buffer::Scratch, 2 * size), pair(Buffer::Scratch, 2 * size + 2));
        for &peer in &near {
            let to = several(peer, Buffer::Scratch, 2 * at, 2);
            me.put(to, pair(Buffer::Input, 2 * (peer - base)));
            me.signal(peer);
        }
        near.iter().for_each(|peer| me.wait(*peer));
        let of = |other: u32| match other == at {
            true => pair(Buffer::Input, 2 * at),
            false => pair(Buffer::Scratch, 2 * other),
        };
        me.reduce(half, (0..size).map(of).collect());
        me.put(Span { rank: across, ..other }, half);
        me.signal(across);
        me.wait(across);
        let sums = if base == 0 { vec![half, other] } else { vec![other, half] };
        me.reduce(pair(Buffer::Output, 2 * at), sums);
        for &peer in &near {
            me.put(several(peer, Buffer::Output, 2 * at, 2), pair(Buffer::Output, 2 * at));
            me.signal(peer);
        }
        near.iter().for_each(|peer| me.wait(*peer));
    })
}

/// Inputs go round.
pub(super) fn ring_all_gather(world: u32) -> Plan {
    plan("ring_all_gather", Collective::AllGather, world, 1, 0, |me| {
        me.barrier();
        me.copy(me.output(me.rank), me.input(0));
        let (next, last) = neighbours(me);
        for step in 0..world - 1 {
            let chunk = (me.rank + world - step) % world;
            me.put(place(next, Buffer::Output, chunk), me.output(chunk));
            me.signal(next);
            me.wait(last);
        }
    })
}

/// Partial sums go round.
pub(super) fn ring_reduce_scatter(world: u32) -> Plan {
    plan("ring_reduce_scatter", Collective::ReduceScatter, world, world, 2 * world, |me| {
        let (next, last) = neighbours(me);
        for step in 0..world - 1 {
            let chunk = (me.rank + 2 * world - 1 - step) % world;
            let src = if step == 0 { me.input(chunk) } else { me.scratch(world + chunk) };
            me.put(place(next, Buffer::Scratch, chunk), src);
            me.signal(next);
            me.wait(last);
            let got = (chunk + world - 1) % world;
            let dst = if step == world - 2 { me.output(0) } else { me.scratch(world + got) };
            me.reduce(dst, vec![me.scratch(got), me.input(got)]);
        }
    })
}

/// The root puts its input to all, when they have entered the call.
pub(super) fn flat_broadcast(world: u32) -> Plan {
    plan("flat_broadcast", Collective::Broadcast, world, 1, 0, |me| {
        if me.rank > 0 {
            me.signal(0);
            me.wait(0);
            return;
        }
        me.copy(me.output(0), me.input(0));
        for peer in me.peers() {
            me.wait(peer);
            me.put(place(peer, Buffer::Output, 0), me.input(0));
            me.signal(peer);
        }
    })
}

/// A chain through scratch: no rank hears of those behind it.
pub(super) fn broadcast_chain(world: u32) -> Plan {
    plan("broadcast_chain", Collective::Broadcast, world, 2, 2, |me| {
        let last = me.rank + 1 == world;
        for chunk in 0..2 {
            let from = if me.rank == 0 { me.input(chunk) } else { me.scratch(chunk) };
            if me.rank > 0 {
                me.wait_on(me.rank - 1, chunk);
            }
            if !last {
                me.put(place(me.rank + 1, Buffer::Scratch, chunk), from);
                me.signal_on(me.rank + 1, chunk);
            }
            me.copy(me.output(chunk), from);
        }
    })
}

/// In each step every rank puts to one peer and waits for one.
pub(super) fn rotated_all_to_all(world: u32) -> Plan {
    plan("rotated_all_to_all", Collective::AllToAll, world, world, 0, |me| {
        me.barrier();
        me.copy(me.output(me.rank), me.input(me.rank));
        for distance in 1..world {
            let (to, of) = ((me.rank + distance) % world, (me.rank + world - distance) % world);
            me.put(place(to, Buffer::Output, me.rank), me.input(to));
            me.signal(to);
            me.wait(of);
        }
    })
}

/// Every rank puts its input to all, and then takes what they put. Each chunk is sent before one is awaited.
pub(super) fn all_gather_in_scratch(world: u32) -> Plan {
    plan("all_gather_in_scratch", Collective::AllGather, world, 1, world, |me| {
        for peer in me.peers() {
            me.put(place(peer, Buffer::Scratch, me.rank), me.input(0));
            me.signal(peer);
        }
        me.copy(me.output(me.rank), me.input(0));
        for peer in me.peers() {
            me.wait(peer);
            me.copy(me.output(peer), me.scratch(peer));
        }
    })
}

/// All-to-all with another chunk for each rank, which is sent between two that are awaited.
pub(super) fn all_to_all_in_turns(world: u32) -> Plan {
    plan("all_to_all_in_turns", Collective::AllToAll, world, world, world, |me| {
        me.copy(me.output(me.rank), me.input(me.rank));
        for distance in 1..world {
            let (to, of) = ((me.rank + distance) % world, (me.rank + world - distance) % world);
            me.put(place(to, Buffer::Scratch, me.rank), me.input(to));
            me.signal(to);
            me.wait(of);
            me.copy(me.output(of), me.scratch(of));
        }
    })
}

/// All of them for so many ranks.
pub(super) fn all(world: u32) -> Vec<Plan> {
    let mut all = vec![
        two_shot_in_scratch(world),
        ring_all_gather(world),
        ring_reduce_scatter(world),
        flat_broadcast(world),
        broadcast_chain(world),
        rotated_all_to_all(world),
        all_gather_in_scratch(world),
        all_to_all_in_turns(world),
    ];
    if world.is_power_of_two() {
        all.push(halving_doubling(world));
    }
    if world.is_multiple_of(2) {
        all.push(hierarchical(world));
    }
    all
}

/// Those that can also be compiled for the LL protocol, so compiled.
pub(super) fn in_ll(world: u32) -> Vec<Plan> {
    let mut all = vec![
        super::programs::one_shot(world),
        super::programs::reduce_scatter(world),
        two_shot_in_scratch(world),
        ring_reduce_scatter(world),
        broadcast_chain(world),
        all_gather_in_scratch(world),
        all_to_all_in_turns(world),
    ];
    for plan in &mut all {
        plan.protocol = Protocol::Ll;
        plan.name.push_str("_ll");
    }
    all
}
