//! The Lamport protocol: an inbox of three parts, in which words that are empty have not arrived.

use symmpool_allocator::models::mutant;

use super::calls::{ModelRanks, data, epochs};
use super::memory::{MemoryPlace, MemoryWord};
use super::search::{Answer, KernelModel, prove};
use crate::cuda::engine::LAMPORT_PATTERN;

/// `LamportInbox::SUBSTITUTE`.
pub(super) const SUBSTITUTE: u32 = 0xffff_fffe;
/// Parts of an inbox.
pub(super) const PARTS: u32 = 3;
const EMPTY: MemoryWord = (LAMPORT_PATTERN, LAMPORT_PATTERN);

/// A call: how many vectors it has of each rank, 0 if it goes by another protocol, and whether rank 0 alone sends.
#[derive(Clone, Copy)]
struct Call {
    vectors: u32,
    from_root: bool,
}

/// State of a session for the next call: `Session::lamport_turn` and `lamport_used`.
#[derive(Clone, Copy, Default)]
struct Turn {
    part: u32,
    used: u32,
}

/// The halves of a vector in a part of an inbox.
fn vector(model: &mut KernelModel, owner: u32, part: u32, at: u32) -> Vec<MemoryPlace> {
    let place =
        |half| model.place(format!("half {half} of vector {at} of part {part} at {owner}"), EMPTY);
    (0..2).map(place).collect()
}

/// A vector of the data of a call, some of whose words look like empty memory.
fn vector_data(epoch: u32, from: u32, nth: u32) -> [MemoryWord; 2] {
    let word = |half| (data(epoch, from, 4 * nth + half), data(epoch, from, 4 * nth + half + 1));
    let is_odd = (epoch + from + nth) % 3 == 2;
    [if is_odd { (LAMPORT_PATTERN, word(0).1) } else { word(0) }, word(2)]
}

/// `LamportInbox::prepare`.
fn prepare(vector: [MemoryWord; 2]) -> [MemoryWord; 2] {
    let word = |word: u32| {
        let is_empty = word == LAMPORT_PATTERN && !mutant("mutant_empty_words_sent");
        if is_empty { SUBSTITUTE } else { word }
    };
    vector.map(|(low, high)| (word(low), word(high)))
}

/// Whether vectors of which these are the halves have arrived: `LamportInbox::receive`.
fn has_arrived(found: &[MemoryWord]) -> bool {
    let is_there = |half: &MemoryWord| half.0 != LAMPORT_PATTERN && half.1 != LAMPORT_PATTERN;
    let looked_at = if mutant("mutant_half_vector_looked_at") { 1 } else { 2 };
    found.chunks(2).all(|halves| halves[..looked_at].iter().all(is_there))
}

/// The worker of a rank in a call.
fn move_vectors(
    model: &mut KernelModel,
    ranks: ModelRanks,
    (thread, rank, epoch): (usize, u32, u32),
    call: Call,
    turn: &mut Turn,
) {
    model.kernel(thread, epoch);
    if call.vectors == 0 {
        return;
    }
    let parts = if mutant("mutant_two_lamport_parts") { 2 } else { PARTS };
    let part = turn.part;
    let before = if part == 0 { parts - 1 } else { part - 1 };
    let stale = if mutant("mutant_part_in_use_emptied") { part } else { before };
    let slots = ranks.world;
    let emptied =
        if mutant("mutant_as_many_emptied_as_sent") { slots * call.vectors } else { turn.used };
    *turn = Turn { part: if part == parts - 1 { 0 } else { part + 1 }, used: slots * call.vectors };

    let sends = |rank: u32| !call.from_root || rank == 0;
    if sends(rank) {
        let mut stores = Vec::new();
        for peer in ranks.peers(rank) {
            for nth in 0..call.vectors {
                let places = vector(model, peer, part, rank * call.vectors + nth);
                stores.extend(places.into_iter().zip(prepare(vector_data(epoch, rank, nth))));
            }
        }
        model.store(thread, "sends vectors", stores);
    }
    if emptied > 0 && !mutant("mutant_stale_part_kept") {
        let places = (0..emptied).flat_map(|at| vector(model, rank, stale, at));
        let stores = places.map(|place| (place, EMPTY)).collect();
        model.store(thread, "empties the stale part", stores);
    }
    let (mut places, mut expected) = (Vec::new(), Vec::new());
    for peer in ranks.peers(rank).filter(|peer| sends(*peer)) {
        for nth in 0..call.vectors {
            places.extend(vector(model, rank, part, peer * call.vectors + nth));
            expected.extend(prepare(vector_data(epoch, peer, nth)));
        }
    }
    if !places.is_empty() {
        model.look(thread, "looks at vectors", places, move |found| {
            Answer::when(has_arrived(found), found == expected)
        });
    }
}

fn lamport(world: u32, calls: &[u32], from_root: bool) -> KernelModel {
    let (mut model, ranks) = (KernelModel::default(), ModelRanks { world, words: 1, first: 1 });
    let epochs = epochs(1, calls.len());
    ranks.leaders(&mut model, &epochs, false);
    for rank in 0..world {
        let (thread, mut turn) = (model.thread(rank, "worker"), Turn::default());
        for (&epoch, &vectors) in epochs.iter().zip(calls.iter().cycle()) {
            let call = Call { vectors, from_root };
            move_vectors(&mut model, ranks, (thread, rank, epoch), call, &mut turn);
        }
    }
    model
}

#[test]
fn vectors_in_lamport_are_those_of_the_call() {
    let mutants = [
        "mutant_two_lamport_parts",
        "mutant_stale_part_kept",
        "mutant_part_in_use_emptied",
        "mutant_as_many_emptied_as_sent",
        "mutant_empty_words_sent",
        "mutant_half_vector_looked_at",
        "mutant_leaves_without_handshake",
    ];
    prove(&mutants, || {
        vec![
            lamport(2, &[1, 1, 1, 1, 1, 1, 1], false),
            lamport(2, &[2, 1, 1, 2, 1, 2], false),
            // Calls by other protocols in between leave the inbox as it is.
            lamport(2, &[1, 0, 2, 0, 0, 1, 1, 1], false),
            lamport(2, &[1, 1, 1, 1, 1, 1, 1], true),
            lamport(3, &[1, 1, 1, 1, 1], true),
        ]
    });
}
