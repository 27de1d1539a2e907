//! The LL and the LL128 protocol: data that shows by flags of its own that it has arrived.

use symmpool_allocator::models::mutant;

use super::calls::{LAST, ModelRanks, data, epochs, left_flag, ll_arrived, ll_data, ll_halves};
use super::memory::{MemoryPlace, MemoryWord};
use super::search::{Answer, KernelModel, prove};

/// A call: how many vectors each sender sends to each receiver, and whether rank 0 alone sends.
#[derive(Clone, Copy)]
struct Call {
    vectors: u32,
    from_root: bool,
}

impl Call {
    fn sends(self, rank: u32) -> bool {
        !self.from_root || rank == 0
    }
}

fn inbox_parity(epoch: u32) -> u32 {
    if mutant("mutant_one_inbox") { 0 } else { epoch & 1 }
}

/// The halves of a vector in an inbox: `LlChannel::place`. Where it lies depends on how many vectors the call has.
fn vector(
    model: &mut KernelModel,
    ranks: ModelRanks,
    owner: u32,
    epoch: u32,
    at: u32,
) -> Vec<MemoryPlace> {
    let parity = inbox_parity(epoch);
    let flag = left_flag(ranks.first, parity);
    let place = |half| {
        model.place(format!("half {half} of vector {at} at {owner}, {parity}"), (half, flag))
    };
    (0..4).map(place).collect()
}

/// The halves of a vector as it travels: `ll_store_vector`.
fn halves(epoch: u32, from: u32, nth: u32) -> Vec<MemoryWord> {
    let words = [0, 2].map(|word| [word, word + 1].map(|half| data(epoch, from, 4 * nth + half)));
    words.into_iter().flat_map(|word| ll_halves(word, epoch)).collect()
}

/// The worker of a rank in a call.
fn move_vectors(
    model: &mut KernelModel,
    ranks: ModelRanks,
    thread: usize,
    rank: u32,
    epoch: u32,
    call: Call,
) {
    model.kernel(thread, epoch);
    if call.sends(rank) {
        let mut stores = Vec::new();
        for peer in ranks.peers(rank) {
            for nth in 0..call.vectors {
                let places = vector(model, ranks, peer, epoch, rank * call.vectors + nth);
                stores.extend(places.into_iter().zip(halves(epoch, rank, nth)));
            }
        }
        model.store(thread, "sends vectors", stores);
    }
    let (mut places, mut expected) = (Vec::new(), Vec::new());
    for peer in ranks.peers(rank).filter(|peer| call.sends(*peer)) {
        for nth in 0..call.vectors {
            places.extend(vector(model, ranks, rank, epoch, peer * call.vectors + nth));
            expected.extend(ll_data(&halves(epoch, peer, nth)));
        }
    }
    if !places.is_empty() {
        model.look(thread, "looks at vectors", places, move |found| {
            Answer::when(ll_arrived(found, epoch), ll_data(found) == expected)
        });
    }
}

fn ll(world: u32, first: u32, calls: &[Call]) -> KernelModel {
    let (mut model, ranks) = (KernelModel::default(), ModelRanks { world, words: 1, first });
    let epochs = epochs(first, calls.len());
    ranks.leaders(&mut model, &epochs, false);
    for rank in 0..world {
        let thread = model.thread(rank, "worker");
        for (epoch, call) in epochs.iter().zip(calls.iter().cycle()) {
            move_vectors(&mut model, ranks, thread, rank, *epoch, *call);
        }
    }
    model
}

/// Calls of these numbers of vectors.
fn sizes(vectors: &[u32], from_root: bool) -> Vec<Call> {
    vectors.iter().map(|&vectors| Call { vectors, from_root }).collect()
}

#[test]
fn vectors_in_ll_are_those_of_the_call() {
    let mutants = [
        "mutant_one_inbox",
        "mutant_any_flag",
        "mutant_one_flag_of_two",
        "mutant_leaves_without_handshake",
    ];
    prove(&mutants, || {
        vec![
            ll(2, 1, &sizes(&[1, 1, 1, 1, 1], false)),
            ll(2, LAST - 2, &sizes(&[1, 2, 1, 1, 2], false)),
            ll(2, 1, &sizes(&[1, 1, 1, 1, 1], true)),
            // A place has another sender in every second call.
            ll(3, 1, &sizes(&[1, 1, 2, 1], true)),
        ]
    });
}

/// A line of 128 bytes, which is stored and loaded whole between devices that are linked directly: its payload, and its
/// flags. `mutant_line_in_parts` has them apart, as they are elsewhere.
fn line(
    model: &mut KernelModel,
    ranks: ModelRanks,
    owner: u32,
    from: u32,
    epoch: u32,
) -> [MemoryPlace; 2] {
    let parity = inbox_parity(epoch);
    let flag = left_flag(ranks.first, parity);
    let whole = model.place(format!("the line of {from} at {owner}, {parity}"), (0, flag));
    if mutant("mutant_line_in_parts") {
        [model.place(format!("the payload of {from} at {owner}, {parity}"), (0, 0)), whole]
    } else {
        [whole; 2]
    }
}

/// The line as its last thread sees it, and the other threads.
fn has_line(found: &[MemoryWord], epoch: u32, expected: u32) -> Answer {
    let (payload, flags) = (found[0], found[1]);
    let is_there = if mutant("mutant_any_line_flag") { flags.1 != 0 } else { flags.1 == epoch };
    // Threads load again until the last one has the flags: all have the same look.
    let same = if mutant("mutant_line_looked_at_apart") { payload } else { flags };
    let payload = if mutant("mutant_line_in_parts") { payload } else { same };
    Answer::when(is_there, payload.0 == expected)
}

/// `one_shot_ll128`.
fn ll128(world: u32, first: u32, calls: usize) -> KernelModel {
    let (mut model, ranks) = (KernelModel::default(), ModelRanks { world, words: 1, first });
    let epochs = epochs(first, calls);
    ranks.leaders(&mut model, &epochs, false);
    for rank in 0..world {
        let thread = model.thread(rank, "worker");
        for &epoch in &epochs {
            model.kernel(thread, epoch);
            let mut stores = Vec::new();
            for peer in ranks.peers(rank) {
                let [payload, flags] = line(&mut model, ranks, peer, rank, epoch);
                let word = (data(epoch, rank, 0), epoch);
                stores.push((payload, word));
                if flags != payload {
                    stores.push((flags, word));
                }
            }
            model.store(thread, "sends lines", stores);
            for peer in ranks.peers(rank) {
                let places = line(&mut model, ranks, rank, peer, epoch).to_vec();
                let expected = data(epoch, peer, 0);
                model.look(thread, "looks at a line", places, move |found| {
                    has_line(found, epoch, expected)
                });
            }
        }
    }
    model
}

#[test]
fn lines_are_those_of_the_call() {
    let mutants = [
        "mutant_one_inbox",
        "mutant_line_in_parts",
        "mutant_line_looked_at_apart",
        "mutant_any_line_flag",
    ];
    prove(&mutants, || vec![ll128(2, 1, 6), ll128(2, LAST - 2, 6), ll128(3, 1, 4)]);
}
