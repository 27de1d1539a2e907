//! Which tokens of a rank go to another host, and what travels with each.

use symmpool_allocator::{Error, Result};

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

/// Numbers of the tokens that have a row on each host, in their order. There are none for this rank's own host.
pub(super) struct TokenLists(Vec<Vec<u32>>);

impl TokenLists {
    /// Room for lists of all of the call's tokens, for so many hosts.
    ///
    /// # Errors
    ///
    /// `is_out_of_memory` where there is none.
    pub(super) fn reserve(side: &RankSide<'_>, (hosts, here): (usize, usize)) -> Result<Self> {
        let tokens = side.call.work.tokens as usize;
        let of = |host: usize| if host == here { 0 } else { tokens };
        let lists = (0..hosts).map(|host| with_room(of(host), side.rank, "lists of tokens"));
        lists.collect::<Result<_>>().map(Self)
    }

    /// Fills the lists. `position` says which row a token is of those for a rank, or -1, by token and rank; it is called once for
    /// each. `home` is the host of a rank.
    pub(super) fn fill(
        &mut self,
        side: &RankSide<'_>,
        home: impl Fn(usize) -> usize,
        mut position: impl FnMut(usize) -> i32,
    ) {
        let world = side.world as usize;
        let here = home(side.rank as usize);
        for token in 0..side.call.work.tokens {
            for rank in 0..world {
                let host = home(rank);
                let goes = host != here && position(token as usize * world + rank) >= 0;
                if goes && self.0[host].last() != Some(&token) {
                    self.0[host].push(token);
                }
            }
        }
    }

    /// Tokens for each host.
    pub(super) fn all(&self) -> &[Vec<u32>] {
        &self.0
    }
}

/// An empty vector with room for so many elements.
///
/// # Errors
///
/// `is_out_of_memory` where there is none.
pub(super) fn with_room<T>(count: usize, rank: u32, what: &str) -> Result<Vec<T>> {
    let mut made = Vec::new();
    made.try_reserve_exact(count).map_err(|_| {
        let bytes = count.saturating_mul(size_of::<T>());
        Error::out_of_memory(format!(
            "experts on rank {rank}: no memory for {bytes} bytes of {what}"
        ))
    })?;
    Ok(made)
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
