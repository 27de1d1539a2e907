//! Memory that is divided into parts.

/// Parts begin at multiples of this.
pub(crate) const ALIGN: u64 = 512;

/// Divides memory into parts, one after the other; the number is where the next one begins.
pub(crate) struct BumpLayout(pub(crate) u64);

impl BumpLayout {
    /// Where a part of so many elements of so many bytes begins.
    pub(crate) fn take(&mut self, count: u64, size: u64) -> u64 {
        let here = self.0;
        self.0 = (here + count * size).next_multiple_of(ALIGN);
        here
    }
}
