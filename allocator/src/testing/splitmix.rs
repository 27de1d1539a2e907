//! Random numbers that follow from a seed alone, on every machine and in every version.

/// SplitMix64: small, fast, and nearby seeds give unrelated sequences.
#[derive(Clone, Debug)]
pub(crate) struct Random(u64);

impl Random {
    /// The sequence of `seed` for participant `which`.
    pub(crate) fn new(seed: u64, which: u64) -> Self {
        // Turned, so that seed and participant are not interchangeable.
        Self(Self(seed).next().rotate_left(23) ^ Self(which).next())
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `end`, which is not 0. As even as 64 bits make it.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(end)) >> 64) as u64
    }

    /// Swaps every element with a random earlier one: a random order.
    pub(crate) fn shuffle<T>(&mut self, items: &mut [T]) {
        for at in (1..items.len()).rev() {
            items.swap(at, self.below(at as u64 + 1) as usize);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_follow_from_the_seed_and_cover_the_range() {
        let draw = |seed, which| {
            let mut random = Random::new(seed, which);
            std::array::from_fn::<u64, 64, _>(|_| random.below(10))
        };
        assert_eq!(draw(1, 2), draw(1, 2));
        assert_ne!(draw(1, 2), draw(2, 1));
        for digit in 0..10 {
            assert!(draw(3, 0).contains(&digit), "{digit}");
        }
        let mut order: Vec<u32> = (0..100).collect();
        Random::new(5, 5).shuffle(&mut order);
        assert!(!order.is_sorted());
        order.sort_unstable();
        assert!(order.into_iter().eq(0..100));
    }
}
