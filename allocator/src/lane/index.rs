//! From an offset to the block that begins there: a sparse two-level page table.
//!
//! Reached when a caller frees or asks by address. Deterministic and without hashing (rule D1);
//! a page of 512 entries exists only while a block begins in its 256 KiB.

const PAGE: usize = 512;

/// No block begins here.
const NONE: u32 = u32::MAX;

#[derive(Clone, Debug, Default)]
pub(super) struct Index {
    pages: Vec<Option<Box<Page>>>,
}

#[derive(Clone, Debug)]
struct Page {
    used: u32,
    ids: [u32; PAGE],
}

impl Index {
    pub(super) fn insert(&mut self, offset: u32, id: u32) {
        let (page, slot) = split(offset);
        if page >= self.pages.len() {
            self.pages.resize(page + 1, None);
        }
        let page =
            self.pages[page].get_or_insert_with(|| Box::new(Page { used: 0, ids: [NONE; PAGE] }));
        page.used += u32::from(page.ids[slot] == NONE);
        page.ids[slot] = id;
    }

    /// Forgets the block that begins at `offset`. An emptied page is kept: the same places are
    /// used again and again.
    pub(super) fn remove(&mut self, offset: u32) {
        let (page, slot) = split(offset);
        if let Some(Some(page)) = self.pages.get_mut(page) {
            page.used -= u32::from(page.ids[slot] != NONE);
            page.ids[slot] = NONE;
        }
    }

    pub(super) fn get(&self, offset: u32) -> Option<u32> {
        let (page, slot) = split(offset);
        let id = self.pages.get(page)?.as_ref()?.ids[slot];
        (id != NONE).then_some(id)
    }

    /// Gives back the pages that hold nothing.
    pub(super) fn shrink(&mut self) {
        for page in &mut self.pages {
            page.take_if(|page| page.used == 0);
        }
    }
}

fn split(offset: u32) -> (usize, usize) {
    (offset as usize / PAGE, offset as usize % PAGE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_what_was_put_in_and_nothing_else() {
        let mut index = Index::default();
        for offset in [0, 1, 511, 512, 1 << 20, (1 << 22) - 1] {
            assert_eq!(index.get(offset), None);
            index.insert(offset, offset + 7);
        }
        assert_eq!(index.get(512), Some(519));
        assert_eq!(index.get(513), None);
        index.remove(512);
        assert_eq!(index.get(512), None);
        index.shrink();
        assert_eq!(index.get(511), Some(518));
        assert!(index.pages[1].is_none());
    }
}
