//! An entry of a board: what its rank says to a group. The rank alone writes it, and uses it for one group after another.

use std::sync::atomic::Ordering;

use super::GroupKey;
use crate::signal::{Atomics, Native, Word};
use crate::sync::{mutant, weakened};

/// Word of a rank that says nothing.
pub(super) const SILENT: u64 = 0;

/// BoardEntry of a rank for a group.
#[repr(C, align(64))]
pub(super) struct BoardEntry<A: Atomics = Native> {
    word: A::U64,
    key: [A::U64; 2],
}

impl<A: Atomics> BoardEntry<A> {
    /// Says a word to a group. No group has the entry, and the word differs from all before.
    pub(super) fn say(&self, key: GroupKey, word: u64) {
        if mutant("mutant_word_before_key") {
            self.word.store(word, Ordering::Release);
        }
        for (half, value) in self.key.iter().zip(key) {
            // Behind the word before, so that nobody takes the old word for the new key's.
            half.store(value, weakened("mutant_relaxed_key", Ordering::Release));
        }
        self.word.store(word, weakened("mutant_relaxed_offer", Ordering::Release));
    }

    /// Says another word to the same group, or [`SILENT`], and then no group has the entry.
    pub(super) fn say_then(&self, word: u64) {
        self.word.store(word, Ordering::Release);
    }

    /// The word for a group, if there is one.
    pub(super) fn said(&self, key: GroupKey) -> Option<u64> {
        let word = self.word.load(Ordering::Acquire);
        if word == SILENT {
            return None;
        }
        let [a, b] = &self.key;
        let is_it = [a.load(Ordering::Acquire), b.load(Ordering::Acquire)] == key;
        // Where the entry was made another one meanwhile, it says another word.
        let stays = self.word.load(Ordering::Acquire) == word || mutant("mutant_word_read_once");
        (is_it && stays).then_some(word)
    }
}

#[cfg(test)]
mod models {
    use std::sync::Arc;

    use loom::sync::atomic::AtomicU64;
    use symmpool_allocator::models::{Watched, prove};

    use super::*;
    use crate::signal::tests::Loom;

    const GROUPS: [GroupKey; 2] = [[3, 4], [5, 4]];

    /// A rank uses an entry for two groups. Whoever looks for a group finds its word alone, and the chunk behind it.
    fn an_entry_is_used_again() {
        let word = || AtomicU64::new(0);
        let entry = BoardEntry::<Loom> { word: word(), key: [word(), word()] };
        let board = Arc::new((entry, [0, 0].map(Watched::new)));
        let theirs = Arc::clone(&board);
        let writer = loom::thread::spawn(move || {
            let (entry, chunks) = &*theirs;
            for (at, key) in GROUPS.into_iter().enumerate() {
                chunks[at].set(7);
                entry.say(key, at as u64 + 10);
                if at == 0 {
                    entry.say_then(SILENT);
                }
            }
        });
        let (entry, chunks) = &*board;
        for (at, key) in GROUPS.into_iter().enumerate().rev() {
            if let Some(word) = entry.said(key) {
                assert_eq!((word, chunks[at].get()), (at as u64 + 10, 7));
            }
        }
        writer.join().unwrap();
    }

    #[test]
    fn loom_a_group_finds_its_own_word() {
        let mutants = [
            "mutant_word_before_key",
            "mutant_relaxed_key",
            "mutant_relaxed_offer",
            "mutant_word_read_once",
        ];
        prove(4, &mutants, an_entry_is_used_again);
    }
}
