//! Random numbers that follow from a seed alone, on every machine and in every version.

/// Number that SplitMix64 adds to its state for each number it makes.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// The generator SplitMix64 (Steele, Lea and Flood, 2014): small, fast, and nearby seeds give unrelated
/// sequences.
#[derive(Clone, Debug)]
pub struct SplitMix64(u64);

impl SplitMix64 {
    /// The sequence of `seed`.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The sequence of `seed` for participant `which`.
    pub fn for_participant(seed: u64, which: u64) -> Self {
        // Rotated, so that seed and participant are not interchangeable.
        Self(Self(seed).next().rotate_left(23) ^ Self(which).next())
    }

    /// The `index`th number of the sequence of `seed`; 0 is before the first.
    #[inline]
    pub fn at(seed: u64, index: u64) -> u64 {
        let z = seed.wrapping_add(index.wrapping_mul(STEP));
        let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// The next number.
    #[allow(clippy::should_implement_trait)] // it never ends, so it is no iterator
    pub fn next(&mut self) -> u64 {
        let number = Self::at(self.0, 1);
        self.0 = self.0.wrapping_add(STEP);
        number
    }

    /// A number below `end`, which is not 0. As even as 64 bits make it.
    pub fn below(&mut self, end: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(end)) >> 64) as u64
    }

    /// Swaps every element with a random earlier one: a random order.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
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
            let mut random = SplitMix64::for_participant(seed, which);
            std::array::from_fn::<u64, 64, _>(|_| random.below(10))
        };
        assert_eq!(draw(1, 2), draw(1, 2));
        assert_ne!(draw(1, 2), draw(2, 1));
        for digit in 0..10 {
            assert!(draw(3, 0).contains(&digit), "{digit}");
        }
        let mut order: Vec<u32> = (0..100).collect();
        SplitMix64::for_participant(5, 5).shuffle(&mut order);
        assert!(!order.is_sorted());
        order.sort_unstable();
        assert!(order.into_iter().eq(0..100));
    }

    #[test]
    fn numbers_can_be_had_in_any_order() {
        let mut random = SplitMix64::new(7);
        let sequence: [u64; 4] = std::array::from_fn(|_| random.next());
        assert_eq!(sequence, [1, 2, 3, 4].map(|index| SplitMix64::at(7, index)));
    }
}
