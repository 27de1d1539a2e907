//! Programs that are right, and do what the usual ones never do: equal operations at two positions, ranks with nothing to
//! do, chunks that lie in the place of a shorter one for a while, and reductions into a peer's scratch.

use symmpool_collectives::plan::{Buffer, Collective, Contribution, Plan, Protocol, Span};

use super::builder::{place, plan};

/// Every chunk goes to every peer by way of the same chunk of scratch, so that equal copies are made again and again.
pub(super) fn relayed(world: u32) -> Plan {
    plan("relayed", Collective::AllGather, world, 2, 1, |me| {
        me.barrier();
        for peer in me.peers() {
            for chunk in 0..2 {
                me.copy(me.scratch(0), me.input(chunk));
                me.put(place(peer, Buffer::Output, 2 * me.rank + chunk), me.scratch(0));
            }
        }
        (0..2).for_each(|chunk| me.copy(me.output(2 * me.rank + chunk), me.input(chunk)));
        me.signal_all();
        me.wait_all();
    })
}

/// Every operation twice.
pub(super) fn all_twice(world: u32) -> Plan {
    plan("all_twice", Collective::AllReduce, world, 1, world + 1, |me| {
        me.barrier();
        let own = me.scratch(me.rank);
        for _ in 0..2 {
            me.copy(own, me.input(0));
            me.copy(me.scratch(world), me.scratch(me.rank));
            for peer in me.peers() {
                (0..2).for_each(|_| me.put(place(peer, Buffer::Scratch, me.rank), me.input(0)));
            }
        }
        me.signal_all();
        me.wait_all();
        for _ in 0..2 {
            me.reduce(me.output(0), (0..world).map(|rank| me.scratch(rank)).collect());
            me.copy(me.scratch(world), me.output(0));
        }
    })
}

/// A collective of one's own in which inputs go round among all ranks but the last one, which has nothing to do and no
/// output.
pub(super) fn last_is_idle(world: u32) -> Plan {
    let round = (world - 1).max(1);
    let next = |rank: u32| (rank + 1) % round;
    let outputs = (0..world)
        .map(|rank| {
            let has = rank < round;
            has.then(|| vec![Contribution { rank: next(rank), chunk: 0 }]).into_iter().collect()
        })
        .collect();
    let collective = Collective::Custom { name: "round".to_owned(), outputs };
    plan("last_is_idle", collective, world, 1, 1, |me| {
        let last = (me.rank + round - 1) % round;
        if me.rank >= round {
            return;
        }
        if round == 1 {
            me.copy(me.scratch(0), me.input(0));
        } else {
            me.put(place(last, Buffer::Scratch, 0), me.input(0));
            me.signal(last);
            me.wait(next(me.rank));
        }
        me.copy(me.output(0), me.scratch(0));
    })
}

/// The first chunk of the input lies in the place of the second chunk of the output for a while, which may be shorter.
pub(super) fn parked(world: u32) -> Plan {
    plan("parked", Collective::AllReduce, world, 2, 2 * world, |me| {
        me.copy(me.output(1), me.input(0));
        let own = 2 * me.rank;
        for peer in me.peers() {
            me.put(place(peer, Buffer::Scratch, own), me.output(1));
            me.put(place(peer, Buffer::Scratch, own + 1), me.input(1));
        }
        me.copy(me.scratch(own), me.output(1));
        me.copy(me.scratch(own + 1), me.input(1));
        me.signal_all();
        me.wait_all();
        for chunk in 0..2 {
            let of = |rank| me.scratch(2 * rank + chunk);
            me.reduce(me.output(chunk), (0..world).map(of).collect());
        }
    })
}

/// An all-gather by reads, in which chunks first hold others that may be longer or shorter. All hold the right ones in the
/// end.
pub(super) fn scribbled(world: u32) -> Plan {
    plan("scribbled", Collective::AllGather, world, 2, 0, |me| {
        let of = |rank: u32, buffer, index| Span { rank, buffer, index, count: 2 };
        me.copy(of(me.rank, Buffer::Output, 2 * me.rank), of(me.rank, Buffer::Input, 0));
        for peer in me.peers() {
            me.copy(me.output(2 * peer + 1), me.input(0));
            me.copy(me.output(2 * peer), me.input(1));
        }
        me.barrier();
        for peer in me.peers() {
            let theirs = 2 * peer;
            me.get(of(me.rank, Buffer::Output, theirs), of(peer, Buffer::Output, theirs));
        }
        me.barrier();
    })
}

/// The second chunk of each input goes through the scratch of the first, beside it.
pub(super) fn swapped_in_scratch(world: u32) -> Plan {
    plan("swapped_in_scratch", Collective::AllGather, world, 2, 2 * world, |me| {
        for peer in me.peers() {
            for chunk in 0..2 {
                let at = 2 * me.rank + 1 - chunk;
                me.put(place(peer, Buffer::Scratch, at), me.input(chunk));
            }
            me.signal(peer);
        }
        (0..2).for_each(|chunk| me.copy(me.output(2 * me.rank + chunk), me.input(chunk)));
        for peer in me.peers() {
            me.wait(peer);
            for chunk in 0..2 {
                me.copy(me.output(2 * peer + chunk), me.scratch(2 * peer + 1 - chunk));
            }
        }
    })
}

/// Partial sums go round: each is reduced into the next rank's scratch. Also in LL.
pub(super) fn reduced_into_peers(world: u32) -> Plan {
    plan("reduced_into_peers", Collective::ReduceScatter, world, world, world, |me| {
        let (next, last) = ((me.rank + 1) % world, (me.rank + world - 1) % world);
        for step in 0..world - 1 {
            let chunk = (me.rank + 2 * world - 1 - step) % world;
            let to = place(next, Buffer::Scratch, chunk);
            if step == 0 {
                me.put(to, me.input(chunk));
            } else {
                me.wait(last);
                me.reduce(to, vec![me.scratch(chunk), me.input(chunk)]);
            }
            me.signal(next);
        }
        if world > 1 {
            me.wait(last);
            me.reduce(me.output(0), vec![me.scratch(me.rank), me.input(me.rank)]);
        } else {
            me.copy(me.output(0), me.input(0));
        }
    })
}

/// Everybody gets the sum of all chunks of all inputs, by one reduction of as many chunks as devices reduce at once.
pub(super) fn wide(world: u32) -> Plan {
    let chunks = 64 / world;
    let all = || (0..world).flat_map(|rank| (0..chunks).map(move |chunk| (rank, chunk)));
    let sum: Vec<_> = all().map(|(rank, chunk)| Contribution { rank, chunk }).collect();
    let outputs = vec![vec![sum]; world as usize];
    let collective = Collective::Custom { name: "sum_of_all".to_owned(), outputs };
    plan("wide", collective, world, chunks, 0, |me| {
        me.barrier();
        me.reduce(me.output(0), all().map(|(rank, at)| place(rank, Buffer::Input, at)).collect());
        me.barrier();
    })
}

/// All of them for so many ranks. Those in LL have it at the end of their names.
pub(super) fn all(world: u32) -> Vec<Plan> {
    let in_ll = [swapped_in_scratch(world), reduced_into_peers(world)].map(|plan| Plan {
        name: format!("{}_ll", plan.name),
        protocol: Protocol::Ll,
        ..plan
    });
    let mut all = vec![
        relayed(world),
        all_twice(world),
        last_is_idle(world),
        parked(world),
        scribbled(world),
        swapped_in_scratch(world),
        reduced_into_peers(world),
        wide(world),
    ];
    all.extend(in_ll);
    all
}

/// A collective of two ranks that is right where input and output are one memory on both or on none, and wrong where that
/// is so on one.
pub(crate) fn right_in_place_on_both_or_none() -> Plan {
    let one = |chunk, rank| vec![Contribution { rank, chunk }];
    let outputs = vec![vec![one(0, 1), one(0, 0)], vec![one(0, 0), one(1, 1)]];
    let collective = Collective::Custom { name: "crossed".to_owned(), outputs };
    plan("crossed", collective, 2, 2, 3, |me| {
        if me.rank == 0 {
            me.put(place(1, Buffer::Scratch, 0), me.input(0));
            me.signal(1);
            me.wait(1);
            me.copy(me.output(0), me.scratch(1));
            me.copy(me.output(1), me.input(0));
            me.copy(me.output(0), me.scratch(2));
        } else {
            me.put(place(0, Buffer::Scratch, 2), me.input(0));
            me.wait(0);
            me.copy(me.output(0), me.scratch(0));
            me.put(place(0, Buffer::Scratch, 1), me.input(0));
            me.signal(0);
            me.copy(me.output(1), me.input(1));
        }
    })
}
