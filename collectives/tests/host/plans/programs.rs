//! Right programs of all collectives.

use symmpool_collectives::plan::{Buffer, Collective, Contribution, Plan, Span};

use super::builder::{Me, place, plan};

/// Every rank puts its input to all, and reduces what it got.
pub(super) fn one_shot(world: u32) -> Plan {
    plan("one_shot", Collective::AllReduce, world, 1, world, |me| {
        for peer in me.peers() {
            me.put(place(peer, Buffer::Scratch, me.rank), me.input(0));
            me.signal(peer);
        }
        me.wait_all();
        let srcs =
            (0..world).map(|rank| if rank == me.rank { me.input(0) } else { me.scratch(rank) });
        let srcs = srcs.collect();
        me.reduce(me.output(0), srcs);
    })
}

/// Every rank puts to each peer that peer's chunk, and reduces its own.
fn reduce_own_chunk(me: &mut Me, result: Span) {
    let own = me.rank;
    for peer in me.peers() {
        me.put(place(peer, Buffer::Scratch, own), me.input(peer));
        me.signal(peer);
    }
    me.wait_all();
    let of = |rank| if rank == own { me.input(own) } else { me.scratch(rank) };
    let srcs = (0..me.world).map(of).collect();
    me.reduce(result, srcs);
}

/// Every rank reduces its own chunk of all inputs where they lie.
fn reduce_by_reads(me: &mut Me, result: Span) {
    let srcs = (0..me.world).map(|rank| place(rank, Buffer::Input, me.rank)).collect();
    me.reduce(result, srcs);
}

/// Every rank reduces a chunk and gives it to all.
pub(super) fn two_shot(world: u32) -> Plan {
    plan("two_shot", Collective::AllReduce, world, world, world, |me| {
        let own = me.rank;
        reduce_own_chunk(me, me.output(own));
        for peer in me.peers() {
            me.put(place(peer, Buffer::Output, own), me.output(own));
            me.signal(peer);
        }
        me.wait_all();
    })
}

/// Two-shot all-reduce by reads of peers' inputs, without scratch.
pub(super) fn two_shot_pull(world: u32) -> Plan {
    plan("two_shot_pull", Collective::AllReduce, world, world, 0, |me| {
        let own = me.rank;
        me.barrier();
        reduce_by_reads(me, me.output(own));
        for peer in me.peers() {
            me.put(place(peer, Buffer::Output, own), me.output(own));
        }
        me.barrier();
    })
}

/// Partial sums go round, then results do.
pub(super) fn ring(world: u32) -> Plan {
    plan("ring", Collective::AllReduce, world, world, 2 * world, |me| {
        let (next, last) = ((me.rank + 1) % world, (me.rank + world - 1) % world);
        // Chunk c begins at rank c + 1 and ends at rank c.
        for step in 0..world - 1 {
            let chunk = (me.rank + 2 * world - 1 - step) % world;
            let src = if step == 0 { me.input(chunk) } else { me.scratch(world + chunk) };
            me.put(place(next, Buffer::Scratch, chunk), src);
            me.signal(next);
            me.wait(last);
            let got = (chunk + world - 1) % world;
            let dst = if step == world - 2 { me.output(got) } else { me.scratch(world + got) };
            me.reduce(dst, vec![me.scratch(got), me.input(got)]);
        }
        for step in 0..world - 1 {
            let chunk = (me.rank + world - step) % world;
            me.put(place(next, Buffer::Output, chunk), me.output(chunk));
            me.signal(next);
            me.wait(last);
        }
    })
}

pub(super) fn all_gather(world: u32) -> Plan {
    plan("all_gather", Collective::AllGather, world, 1, 0, |me| {
        me.barrier();
        me.copy(me.output(me.rank), me.input(0));
        for peer in me.peers() {
            me.put(place(peer, Buffer::Output, me.rank), me.input(0));
            me.signal(peer);
        }
        me.wait_all();
    })
}

pub(super) fn reduce_scatter(world: u32) -> Plan {
    plan("reduce_scatter", Collective::ReduceScatter, world, world, world, |me| {
        reduce_own_chunk(me, me.output(0));
    })
}

/// Reduce-scatter by reads of peers' inputs, without scratch.
pub(super) fn reduce_scatter_pull(world: u32) -> Plan {
    plan("reduce_scatter_pull", Collective::ReduceScatter, world, world, 0, |me| {
        me.barrier();
        reduce_by_reads(me, me.output(0));
        me.barrier();
    })
}

/// A tree: each rank that has the data gives it to one that has not.
pub(super) fn broadcast_tree(world: u32) -> Plan {
    plan("broadcast_tree", Collective::Broadcast, world, 2, 0, |me| {
        me.barrier();
        if me.rank == 0 {
            (0..2).for_each(|chunk| me.copy(me.output(chunk), me.input(chunk)));
        }
        let mut distance = 1;
        while distance < world {
            let peer = me.rank + distance;
            if me.rank < distance && peer < world {
                (0..2)
                    .for_each(|chunk| me.put(place(peer, Buffer::Output, chunk), me.output(chunk)));
                me.signal(peer);
            } else if (distance..2 * distance).contains(&me.rank) {
                me.wait(me.rank - distance);
            }
            distance *= 2;
        }
    })
}

pub(super) fn all_to_all(world: u32) -> Plan {
    plan("all_to_all", Collective::AllToAll, world, world, 0, |me| {
        me.barrier();
        me.copy(me.output(me.rank), me.input(me.rank));
        for peer in me.peers() {
            me.put(place(peer, Buffer::Output, me.rank), me.input(peer));
            me.signal(peer);
        }
        me.wait_all();
    })
}

/// Two block groups, each with half of the chunks and a channel of its own.
pub(super) fn grouped_all_gather(world: u32) -> Plan {
    plan("grouped_all_gather", Collective::AllGather, world, 2, 0, |me| {
        me.barrier();
        for group in 0..2 {
            let (own, world) = (me.rank, me.world);
            me.in_group(group, |me| {
                me.copy(me.output(2 * own + group), me.input(group));
                for peer in me.peers() {
                    me.put(place(peer, Buffer::Output, 2 * own + group), me.input(group));
                    me.signal_on(peer, group);
                }
                (0..world).filter(|peer| *peer != own).for_each(|peer| me.wait_on(peer, group));
            });
        }
        me.join();
    })
}

/// Everybody gets the sum of the first chunks of all, and the second chunk of the next rank.
pub(super) fn custom(world: u32) -> Plan {
    let sum: Vec<_> = (0..world).map(|rank| Contribution { rank, chunk: 0 }).collect();
    let outputs = (0..world)
        .map(|rank| vec![sum.clone(), vec![Contribution { rank: (rank + 1) % world, chunk: 1 }]])
        .collect();
    let collective = Collective::Custom { name: "sum_and_shift".to_owned(), outputs };
    plan("custom", collective, world, 2, 0, |me| {
        me.barrier();
        me.reduce(me.output(0), (0..world).map(|rank| place(rank, Buffer::Input, 0)).collect());
        match (me.rank + 1) % world {
            next if next == me.rank => me.copy(me.output(1), me.input(1)),
            next => me.get(me.output(1), place(next, Buffer::Input, 1)),
        }
        me.barrier();
    })
}

/// All of them that reduce nothing of partial results.
pub(super) fn all(world: u32) -> Vec<Plan> {
    vec![
        one_shot(world),
        two_shot(world),
        two_shot_pull(world),
        ring(world),
        all_gather(world),
        reduce_scatter(world),
        reduce_scatter_pull(world),
        broadcast_tree(world),
        all_to_all(world),
        grouped_all_gather(world),
        custom(world),
    ]
}
