//! Changes to inputs: what a fuzzer does, without looking which code they reach.

use symmpool_allocator::testing::SplitMix64;

/// Numbers at which arithmetic goes wrong.
const EDGES: [u64; 14] = [
    0,
    1,
    7,
    8,
    0x7f,
    0x80,
    0xff,
    0xffff,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    0x7fff_ffff_ffff_ffff,
    0x8000_0000_0000_0000,
    0xffff_ffff_ffff_ffff,
];

/// Makes inputs out of others.
#[derive(Debug)]
pub struct Mutator {
    random: SplitMix64,
    words: &'static [&'static str],
    max_input: usize,
}

impl Mutator {
    /// One whose changes follow from the seed.
    pub fn new(seed: u64, words: &'static [&'static str], max_input: usize) -> Self {
        Self { random: SplitMix64::new(seed), words, max_input }
    }

    /// An input: of random bytes, or one of the kept ones with some changes.
    pub fn next(&mut self, kept: &[Vec<u8>]) -> Vec<u8> {
        if kept.is_empty() || self.below(8) == 0 {
            let length = self.below(256);
            return (0..length).map(|_| self.byte()).collect();
        }
        let mut input = kept[self.below(kept.len())].clone();
        for _ in 0..=self.below(6) {
            let other = &kept[self.below(kept.len())];
            self.change(&mut input, other);
        }
        input.truncate(self.max_input);
        input
    }

    fn below(&mut self, end: usize) -> usize {
        self.random.below(end.max(1) as u64) as usize
    }

    fn byte(&mut self) -> u8 {
        self.random.next() as u8
    }

    /// A range of an input.
    fn range(&mut self, of: &[u8]) -> std::ops::Range<usize> {
        let from = self.below(of.len() + 1);
        let most = (of.len() - from).min(64);
        from..from + self.below(most + 1)
    }

    fn change(&mut self, input: &mut Vec<u8>, other: &[u8]) {
        let at = self.below(input.len() + 1);
        match self.below(10) {
            0 => {
                if let Some(byte) = input.get_mut(at) {
                    *byte ^= 1 << self.random.below(8);
                }
            }
            1 => {
                let new = self.byte();
                if let Some(byte) = input.get_mut(at) {
                    *byte = new;
                }
            }
            2 => drop(input.drain(self.range(input))),
            3 => {
                let byte = self.byte();
                input.insert(at, byte);
            }
            4 => {
                let copied = input[self.range(input)].to_vec();
                drop(input.splice(at..at, copied));
            }
            5 => {
                let copied = other[self.range(other)].to_vec();
                drop(input.splice(at..at, copied));
            }
            6 => {
                let from = self.below(other.len() + 1);
                input.truncate(at);
                input.extend_from_slice(&other[from..]);
            }
            7 => {
                let width = [1, 2, 4, 8][self.below(4)];
                let bytes = EDGES[self.below(EDGES.len())].to_le_bytes();
                if let Some(place) = input.get_mut(at..at + width) {
                    place.copy_from_slice(&bytes[..width]);
                }
            }
            8 => {
                // A number of a text becomes another one.
                let digits = input[at..].iter().take_while(|byte| byte.is_ascii_digit()).count();
                let number = EDGES[self.below(EDGES.len())].wrapping_add(self.random.below(3));
                drop(input.splice(at..at + digits, number.to_string().into_bytes()));
            }
            _ => {
                if !self.words.is_empty() {
                    let word = self.words[self.below(self.words.len())];
                    drop(input.splice(at..at, word.bytes()));
                }
            }
        }
    }
}
