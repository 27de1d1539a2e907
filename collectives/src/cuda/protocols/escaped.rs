//! The Lamport protocol with escapes: any words may travel, and escape marks say which of them look like others.

use symmpool_allocator::models::mutant;

use super::calls::{ModelRanks, data, epochs};
use super::memory::{MemoryPlace, MemoryWord};
use super::search::{Answer, KernelModel, prove};
use crate::cuda::engine::ESCAPED_PATTERN as EMPTY;

/// `ESCAPED` in `symmpool/impl/lamport_escaped.cuh`.
pub(super) const ESCAPED: u32 = EMPTY | 1;

const SENDER: u32 = 0;
const RECEIVER: u32 = 1;

/// A place of the receiver's inbox, and what it holds at first.
fn place(model: &mut KernelModel, epoch: u32, says: &str, initial: MemoryWord) -> MemoryPlace {
    let parity = if mutant("mutant_one_escaped_inbox") { 0 } else { epoch & 1 };
    model.place(format!("{says}, {parity}"), initial)
}

/// The two halves of a vector, and the escape mark of its line.
fn places(model: &mut KernelModel, epoch: u32) -> ([MemoryPlace; 2], MemoryPlace) {
    let half = |model: &mut KernelModel, name| place(model, epoch, name, (EMPTY, EMPTY));
    let halves = [half(model, "the first half"), half(model, "the second half")];
    (halves, place(model, epoch, "the mark", (0, 0)))
}

/// A vector as it travels, and its escape mark: `EscapedSlot::send` and `escape`.
fn escape(words: [u32; 4]) -> ([u32; 4], Option<u32>) {
    let bits: u32 = words.iter().zip(0..).map(|(word, nth)| u32::from(*word == EMPTY) << nth).sum();
    let is_marked = if mutant("mutant_escaped_words_unmarked") {
        bits != 0
    } else {
        words.iter().any(|word| word | 1 == ESCAPED)
    };
    let travels = |word| if word == EMPTY { ESCAPED } else { word };
    let words = if mutant("mutant_unescaped") { words } else { words.map(travels) };
    (words, is_marked.then_some(bits))
}

fn halves(words: [u32; 4]) -> [MemoryWord; 2] {
    [(words[0], words[1]), (words[2], words[3])]
}

/// A vector of each call from one rank to the other.
fn escaped(calls: &[[u32; 4]]) -> KernelModel {
    let (mut model, ranks) = (KernelModel::default(), ModelRanks { world: 2, words: 1, first: 1 });
    let epochs = epochs(1, calls.len());
    ranks.leaders(&mut model, &epochs, false);
    let (sender, receiver) = (model.thread(SENDER, "worker"), model.thread(RECEIVER, "worker"));
    for (&epoch, &words) in epochs.iter().zip(calls.iter().cycle()) {
        let (slot, mark) = places(&mut model, epoch);
        let (travels, bits) = escape(words);

        model.kernel(sender, epoch);
        let mut stores: Vec<(MemoryPlace, MemoryWord)> =
            bits.map(|bits| (mark, (bits, epoch))).into_iter().collect();
        stores.extend(slot.into_iter().zip(halves(travels)));
        model.store(sender, "sends a vector", stores);

        model.kernel(receiver, epoch);
        let expected = halves(travels);
        model.look(receiver, "looks at the vector", slot.to_vec(), move |found| {
            let is_there = |half: &MemoryWord| half.0 != EMPTY && half.1 != EMPTY;
            Answer::when(found.iter().all(is_there), found == expected)
        });
        if !mutant("mutant_vector_not_emptied") {
            let empty = slot.map(|half| (half, (EMPTY, EMPTY))).to_vec();
            model.store(receiver, "empties the vector", empty);
        }
        if travels.contains(&ESCAPED) {
            model.look(receiver, "looks at the mark", vec![mark], move |found| {
                let (bits, flag) = found[0];
                let is_there =
                    if mutant("mutant_mark_of_any_epoch") { flag != 0 } else { flag == epoch };
                let mut read = travels;
                for (nth, word) in read.iter_mut().enumerate() {
                    *word = if bits >> nth & 1 != 0 { EMPTY } else { *word };
                }
                Answer::when(is_there, read == words)
            });
        }
    }
    model
}

/// All sequences of `calls` calls whose first word is ordinary, looks like empty memory, or like an escaped word.
fn sequences(calls: usize) -> Vec<Vec<[u32; 4]>> {
    let vectors = |nth: usize| {
        let ordinary = |word| data(nth as u32, SENDER, word);
        [ordinary(0), EMPTY, ESCAPED].map(|word| {
            let second = if word == ESCAPED && nth % 2 == 1 { EMPTY } else { ordinary(1) };
            [word, second, ordinary(2), ordinary(3)]
        })
    };
    (0..calls).fold(vec![Vec::new()], |found, nth| {
        let longer = |calls: Vec<[u32; 4]>| {
            vectors(nth).map(|vector| calls.iter().copied().chain([vector]).collect())
        };
        found.into_iter().flat_map(longer).collect()
    })
}

#[test]
fn any_words_travel_in_escaped_lamport() {
    let mutants = [
        "mutant_one_escaped_inbox",
        "mutant_vector_not_emptied",
        "mutant_unescaped",
        "mutant_escaped_words_unmarked",
        "mutant_mark_of_any_epoch",
        "mutant_leaves_without_handshake",
    ];
    prove(&mutants, || sequences(4).iter().map(|calls| escaped(calls)).collect());
}
