//! Windows: segments that every rank has mapped.

use crate::heap::HeapLayout;
use crate::{Error, Result};

/// A segment that every rank has mapped at the same offset of its slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Window {
    /// The lane it belongs to.
    pub lane: String,
    /// Serial number of the segment in its lane; equal on all ranks.
    pub counter: u64,
    /// Offset from the start of a slot; equal on all ranks.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
}

/// The windows of a pool at one moment, by offset.
#[derive(Clone, Debug)]
pub struct Windows {
    layout: HeapLayout,
    list: Vec<Window>,
}

impl Windows {
    pub(crate) fn new(layout: HeapLayout, mut list: Vec<Window>) -> Self {
        list.sort_by_key(|window| window.offset);
        Self { layout, list }
    }

    /// All windows, by offset.
    pub fn list(&self) -> &[Window] {
        &self.list
    }

    /// The window that `address` lies in, in any rank's slot. O(log windows).
    pub fn find(&self, address: u64) -> Option<&Window> {
        let (_, offset) = self.layout.locate(address)?;
        self.at(offset)
    }

    /// Whether all `bytes` from `address` lie in one rank's slot and in windows, which may be several that
    /// follow each other.
    pub fn covers(&self, address: u64, bytes: u64) -> bool {
        let Some((_, offset)) = self.layout.locate(address) else { return false };
        let Some(end) = offset.checked_add(bytes.max(1)) else { return false };
        let mut from = offset;
        while from < end {
            match self.at(from) {
                Some(window) => from = window.offset + window.bytes,
                None => return false,
            }
        }
        end <= self.layout.stride
    }

    /// The address of `rank`'s copy of an address inside a window. Any other address is refused with
    /// [`Error::is_invalid_argument`], because the peer's copy of it is not mapped.
    pub fn peer(&self, rank: u32, address: u64) -> Result<u64> {
        if self.find(address).is_none() {
            return Err(Error::invalid_argument(format!(
                "address {address:#x} is in no window of rank {}; if it is memory of the pool, commit \
                 the pool first",
                self.layout.rank
            )));
        }
        self.layout.peer(rank, address)
    }

    /// The window that holds an offset.
    fn at(&self, offset: u64) -> Option<&Window> {
        let after = self.list.partition_point(|window| window.offset <= offset);
        let window = self.list[..after].last()?;
        (offset < window.offset + window.bytes).then_some(window)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn windows() -> Windows {
        let layout = HeapLayout { base: 0x10_0000, stride: 0x1_0000, rank: 1, world: 3 };
        let window =
            |counter, offset, bytes| Window { lane: "default".into(), counter, offset, bytes };
        Windows::new(
            layout,
            vec![window(1, 0x3000, 0x1000), window(0, 0x1000, 0x1000), window(2, 0x2000, 0x1000)],
        )
    }

    #[test]
    fn lookup_works_in_every_slot() {
        let windows = windows();
        assert_eq!(windows.find(0x10_1000).map(|window| window.counter), Some(0));
        assert_eq!(windows.find(0x12_3fff).map(|window| window.counter), Some(1));
        assert_eq!(windows.find(0x10_0fff), None);
        assert_eq!(windows.find(0x10_4000), None);
        assert_eq!(windows.find(0x13_1000), None, "beyond the last slot");
        assert_eq!(windows.find(0xf_ffff), None, "below the heap");
    }

    #[test]
    fn coverage_may_cross_windows_but_not_gaps() {
        let windows = windows();
        assert!(windows.covers(0x11_1800, 0x2000));
        assert!(windows.covers(0x11_1000, 0x3000));
        assert!(!windows.covers(0x11_1000, 0x3001));
        assert!(!windows.covers(0x11_0fff, 2));
        assert!(!windows.covers(0x11_1000, u64::MAX));
        assert!(windows.covers(0x11_3fff, 0));
        assert!(!windows.covers(0x11_4000, 0));
    }

    #[test]
    fn peers_are_one_stride_apart() {
        let windows = windows();
        assert_eq!(windows.peer(2, 0x11_1234).unwrap(), 0x12_1234);
        assert!(windows.peer(3, 0x11_1234).unwrap_err().is_invalid_argument());
        assert!(windows.peer(0, 0x11_4000).unwrap_err().is_invalid_argument());
    }
}
