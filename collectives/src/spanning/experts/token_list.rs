//! Which tokens of a rank go to another host, and what travels with each.

use crate::call::experts::MAX_TOP_K;
use crate::host::experts::{RankSide, RoutedToken};

/// Layout of an entry, which travels with a token: the same for all of a rank's tokens in a call.
///
/// | bytes | what |
/// | --- | --- |
/// | 4 | the token's number on its rank |
/// | one for 8 ranks | bits: which ranks of the host get the row |
/// | 2 for each expert | its number, `u16::MAX` for none: where the routing is new |
/// | 4 for each expert | its weight, an `f32`: where weights are given |
#[derive(Clone, Copy, Debug)]
pub(super) struct EntryLayout {
    mask: usize,
    ids: usize,
    weights: usize,
}

/// An entry as its bytes, which have the length of [`EntryLayout::bytes`].
pub(super) struct TokenEntry<'a> {
    layout: EntryLayout,
    bytes: &'a [u8],
}

impl EntryLayout {
    /// Entries for a host of so many ranks, with so many ids and weights.
    pub(super) fn new(ranks: usize, ids: usize, weights: usize) -> Self {
        Self { mask: ranks.div_ceil(8), ids, weights }
    }

    /// Bytes of an entry.
    pub(super) fn bytes(self) -> usize {
        4 + self.mask + 2 * self.ids + 4 * self.weights
    }

    /// Writes an entry, whose row goes to the ranks of the host for which `goes` is true.
    pub(super) fn write(
        self,
        to: &mut [u8],
        token: u32,
        goes: impl Fn(usize) -> bool,
        (ids, weights): (&[i32], &[f32]),
    ) {
        to[..4].copy_from_slice(&token.to_le_bytes());
        let (mask, rest) = to[4..].split_at_mut(self.mask);
        for (nth, bits) in mask.iter_mut().enumerate() {
            *bits = (0..8).map(|bit| u8::from(goes(8 * nth + bit)) << bit).sum();
        }
        let (to_ids, to_weights) = rest.split_at_mut(2 * self.ids);
        for (to, id) in to_ids.chunks_exact_mut(2).zip(ids) {
            to.copy_from_slice(&u16::try_from(*id).unwrap_or(u16::MAX).to_le_bytes());
        }
        for (to, weight) in to_weights.chunks_exact_mut(4).zip(weights) {
            to.copy_from_slice(&weight.to_le_bytes());
        }
    }

    /// The entry with that number.
    pub(super) fn entry(self, all: &[u8], nth: usize) -> TokenEntry<'_> {
        TokenEntry { layout: self, bytes: &all[nth * self.bytes()..][..self.bytes()] }
    }
}

impl TokenEntry<'_> {
    pub(super) fn token(&self) -> u32 {
        let mut bytes = [0; 4];
        bytes.copy_from_slice(&self.bytes[..4]);
        u32::from_le_bytes(bytes)
    }

    /// Whether the row goes to a rank of the host.
    pub(super) fn goes_to(&self, slot: usize) -> bool {
        self.bytes[4 + slot / 8] >> (slot % 8) & 1 != 0
    }

    /// Ids and weights of the row. Ids that are no expert are -1.
    pub(super) fn routed(&self, experts: u32) -> RoutedToken {
        let mut found = RoutedToken {
            token: self.token(),
            ids: [-1; MAX_TOP_K as usize],
            weights: [1.0; MAX_TOP_K as usize],
        };
        let (ids, weights) = self.bytes[4 + self.layout.mask..].split_at(2 * self.layout.ids);
        for (to, from) in found.ids.iter_mut().zip(ids.chunks_exact(2)) {
            let id = u16::from_le_bytes([from[0], from[1]]);
            *to = if u32::from(id) < experts { i32::from(id) } else { -1 };
        }
        for (to, from) in found.weights.iter_mut().zip(weights.chunks_exact(4)) {
            *to = f32::from_le_bytes([from[0], from[1], from[2], from[3]]);
        }
        found
    }
}

/// Numbers of the tokens that have a row on each host, where `position` says which row of those for a rank a token is, or -1. There
/// are none for this rank's own host.
pub(super) fn lists(
    side: &RankSide<'_>,
    (hosts, here): (usize, usize),
    home: impl Fn(usize) -> usize,
    position: impl Fn(usize) -> i32,
) -> Vec<Vec<u32>> {
    let world = side.world as usize;
    let homes: Vec<usize> = (0..world).map(home).collect();
    let mut found = vec![Vec::new(); hosts];
    for token in 0..side.call.work.tokens {
        for (rank, host) in homes.iter().enumerate() {
            let goes = *host != here && position(token as usize * world + rank) >= 0;
            if goes && found[*host].last() != Some(&token) {
                found[*host].push(token);
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_read_as_it_was_written() {
        let layout = EntryLayout::new(9, 3, 3);
        assert_eq!(layout.bytes(), 4 + 2 + 6 + 12);
        let mut all = vec![0; 2 * layout.bytes()];
        let second = &mut all[layout.bytes()..];
        layout.write(second, 70_000, |slot| slot % 4 == 0, (&[5, -1, 1023], &[0.5, -2.0, 3.0]));
        let entry = layout.entry(&all, 1);
        assert_eq!(entry.token(), 70_000);
        let slots: Vec<usize> = (0..9).filter(|slot| entry.goes_to(*slot)).collect();
        assert_eq!(slots, [0, 4, 8]);
        // Numbers beyond the last expert are none.
        assert_eq!(entry.routed(1024).ids[..4], [5, -1, 1023, -1]);
        assert_eq!(entry.routed(1000).ids[..3], [5, -1, -1]);
        assert_eq!(entry.routed(1024).weights[..4], [0.5, -2.0, 3.0, 1.0]);
    }
}
