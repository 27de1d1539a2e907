//! Memory without flags of its own, which peers access behind handshakes and flags of peer blocks.

use symmpool_allocator::models::mutant;

use super::calls::{ModelRanks, data, epochs};
use super::memory::{MemoryPlace, MemoryWord};
use super::search::{Answer, KernelModel, prove};

/// Kinds of flags: `ARRIVED` and `FINISHED` in `symmpool/impl/peer_blocks.cuh`.
const ARRIVED: &str = "ARRIVED";
const FINISHED: &str = "FINISHED";

/// `flag_of`.
fn flag(model: &mut KernelModel, kind: &str, owner: u32, from: u32, epoch: u32) -> MemoryPlace {
    let parity = if mutant("mutant_flags_of_one_parity") { 0 } else { epoch & 1 };
    model.place(format!("the flag {kind} of {from} at {owner}, {parity}"), (0, 0))
}

/// `raise_flags`, behind `stores` that threads of the block make before.
fn raise(
    model: &mut KernelModel,
    ranks: ModelRanks,
    (thread, rank, epoch): (usize, u32, u32),
    kind: &str,
    stores: Vec<(MemoryPlace, MemoryWord)>,
) {
    let flags =
        ranks.peers(rank).map(|peer| (flag(model, kind, peer, rank, epoch), (1, epoch))).collect();
    if mutant("mutant_flag_before_data") {
        model.release(thread, "raises flags", flags);
        model.store(thread, "stores data", stores);
        return;
    }
    if !stores.is_empty() {
        model.store(thread, "stores data", stores);
    }
    if mutant("mutant_flag_relaxed") {
        model.store(thread, "raises flags", flags);
    } else {
        model.release(thread, "raises flags", flags);
    }
}

/// `await_flags`.
fn await_flags(
    model: &mut KernelModel,
    ranks: ModelRanks,
    (thread, rank, epoch): (usize, u32, u32),
    kind: &str,
) {
    let places = ranks.peers(rank).map(|peer| flag(model, kind, rank, peer, epoch)).collect();
    let judge = move |found: &[MemoryWord]| {
        let is_raised = |flag: &MemoryWord| {
            (flag.1 == epoch || mutant("mutant_flag_of_any_epoch")) && flag.0 >= 1
        };
        Answer::when(found.iter().all(is_raised), true)
    };
    if mutant("mutant_flag_wait_relaxed") {
        model.look(thread, "looks at flags", places, judge);
    } else {
        model.acquire(thread, "looks at flags", places, judge);
    }
}

/// Takes what places hold, which is known.
fn take(
    model: &mut KernelModel,
    thread: usize,
    says: &str,
    expected: Vec<(MemoryPlace, MemoryWord)>,
) {
    let (places, words): (Vec<MemoryPlace>, Vec<MemoryWord>) = expected.into_iter().unzip();
    model.look(thread, says, places, move |found| Answer::of(found == words));
}

/// `two_shot_push`: inputs go into peers' scratch, and results into their outputs, which the stream's next kernel reads.
fn push(world: u32, calls: usize) -> KernelModel {
    let (mut model, ranks) = (KernelModel::default(), ModelRanks { world, words: 1, first: 1 });
    let epochs = epochs(1, calls);
    for rank in 0..world {
        let [leader, worker] = ["leader", "worker"].map(|name| model.thread(rank, name));
        for &epoch in &epochs {
            let at = (worker, rank, epoch);
            ranks.lead(&mut model, leader, (rank, epoch), true);
            model.kernel(worker, epoch);
            let sent = |model: &mut KernelModel, owner, from, parity: &str| {
                (
                    model.place(format!("{parity} of {from} at {owner}"), (0, 0)),
                    (data(epoch, from, 0), 0),
                )
            };
            let inputs = ranks.peers(rank).map(|peer| sent(&mut model, peer, rank, "the input"));
            let inputs = inputs.collect();
            raise(&mut model, ranks, at, ARRIVED, inputs);
            let results: Vec<_> =
                ranks.peers(rank).map(|peer| sent(&mut model, peer, rank, "the result")).collect();
            if mutant("mutant_output_unawaited") {
                model.store(worker, "stores results", results.clone());
            }
            ranks.await_handshakes(&mut model, worker, (rank, epoch), false);
            await_flags(&mut model, ranks, at, ARRIVED);
            let inputs = ranks.peers(rank).map(|peer| sent(&mut model, rank, peer, "the input"));
            let inputs = inputs.collect();
            take(&mut model, worker, "reduces inputs", inputs);
            raise(&mut model, ranks, at, FINISHED, results);
            if !mutant("mutant_leaves_before_peers") {
                await_flags(&mut model, ranks, at, FINISHED);
            }
            // The stream's next kernel.
            [leader, worker].iter().for_each(|thread| model.kernel(*thread, epoch));
            let results = ranks.peers(rank).map(|peer| sent(&mut model, rank, peer, "the result"));
            let results = results.collect();
            take(&mut model, worker, "reads results", results);
        }
    }
    model
}

/// Rule S3.
#[test]
fn data_behind_flags_is_that_of_the_call() {
    let mutants = [
        "mutant_flag_before_data",
        "mutant_flag_relaxed",
        "mutant_flag_wait_relaxed",
        "mutant_flag_of_any_epoch",
        "mutant_output_unawaited",
        "mutant_leaves_before_peers",
    ];
    prove(&mutants, || vec![push(2, 5), push(3, 2)]);
}

/// A kernel on `Collective` that gets from peers' windows: these hold what the stream's kernel before has stored, and are
/// stored to again by the one behind it.
fn pull(world: u32, calls: usize) -> KernelModel {
    let (mut model, ranks) = (KernelModel::default(), ModelRanks { world, words: 1, first: 1 });
    for rank in 0..world {
        let [leader, worker] = ["leader", "worker"].map(|name| model.thread(rank, name));
        for epoch in epochs(1, calls) {
            let at = (worker, rank, epoch);
            let input = |model: &mut KernelModel, of| {
                (model.place(format!("the input of {of}"), (0, 0)), (data(epoch, of, 0), 0))
            };
            [leader, worker].iter().for_each(|thread| model.kernel(*thread, epoch));
            let own = input(&mut model, rank);
            model.store(worker, "stores its input", vec![own]);

            ranks.lead(&mut model, leader, (rank, epoch), true);
            model.kernel(worker, epoch);
            ranks.await_handshakes(&mut model, worker, (rank, epoch), true);
            let inputs = ranks.peers(rank).map(|peer| input(&mut model, peer)).collect();
            take(&mut model, worker, "gets inputs", inputs);
            raise(&mut model, ranks, at, FINISHED, Vec::new());
            if !mutant("mutant_leaves_before_peers") {
                await_flags(&mut model, ranks, at, FINISHED);
            }
        }
    }
    model
}

#[test]
fn windows_behind_handshakes_hold_what_the_stream_stored_before() {
    let mutants = [
        "mutant_handshake_unfenced",
        "mutant_handshake_not_acquired",
        "mutant_leaves_before_peers",
    ];
    prove(&mutants, || vec![pull(2, 5), pull(3, 2)]);
}

/// `MemoryChannel`: rank 0 puts data into the other's scratch, and both leave without waiting for each other.
fn channel(calls: usize) -> KernelModel {
    let (mut model, ranks) = (KernelModel::default(), ModelRanks { world: 2, words: 1, first: 1 });
    let epochs = epochs(1, calls);
    ranks.leaders(&mut model, &epochs, true);
    let [putter, waiter] = [0, 1].map(|rank| model.thread(rank, "worker"));
    for &epoch in &epochs {
        // `Collective::scratch`.
        let parity = if mutant("mutant_scratch_of_one_parity") { 0 } else { epoch & 1 };
        let scratch = model.place(format!("scratch of parity {parity}"), (0, 0));
        let put = vec![(scratch, (data(epoch, 0, 0), 0))];
        model.kernel(putter, epoch);
        raise(&mut model, ranks, (putter, 0, epoch), ARRIVED, put.clone());
        model.kernel(waiter, epoch);
        await_flags(&mut model, ranks, (waiter, 1, epoch), ARRIVED);
        take(&mut model, waiter, "takes what was put", put);
    }
    model
}

/// Rule S4.
#[test]
fn channels_and_scratch_take_turns() {
    let mutants = [
        "mutant_flags_of_one_parity",
        "mutant_scratch_of_one_parity",
        "mutant_leaves_without_handshake",
    ];
    prove(&mutants, || vec![channel(6)]);
}
