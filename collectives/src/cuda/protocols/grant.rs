//! The lock of a device's SMs, which kernels of several communicators share: `symmpool/impl/sm_grant.cuh`. Whether kernels that
//! it grants get through is the affair of `kernel/sm_budget/model.rs`.
//!
//! All threads change the lock's word by atomic operations, each of which is a step.

use std::collections::BTreeSet;

use symmpool_allocator::models::{deeper, mutant, with_fault};

use crate::cuda::layout::params::SM_LOCK_MEMBERS;

/// Bits below the marks of narrow kernels: `NARROW_MARKS`.
pub(super) const NARROW_MARKS: u32 = 24;
const WIDE_BLOCKS: u64 = (1 << NARROW_MARKS) - 1;

/// How far a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum BlockProgress {
    Begins,
    /// It has found the word, and asks again.
    Found(u64),
    /// It has its grant: whether the grid is wide.
    Granted(bool),
    /// The last one of a narrow kernel has still to take the mark away.
    TakesMark,
    Ended,
}

/// A communicator's kernels: how many have ended, and the blocks of the one that runs.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Member {
    ended: usize,
    blocks: Vec<BlockProgress>,
    /// The grant of the kernel's first block that got one.
    granted: Option<bool>,
    ended_blocks: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Device {
    /// Blocks of each kernel.
    grid: u64,
    word: u64,
    members: Vec<Member>,
}

/// A prime that is larger than any number of blocks.
fn tag(member: usize) -> u64 {
    if mutant("mutant_tag_not_prime") { [2, 4, 8][member] } else { [5, 7, 11][member] }
}

fn mark(member: usize) -> u64 {
    1 << (NARROW_MARKS as usize + member)
}

/// Answer of the word to a block: its grant, or the word that it wants in place of that.
fn answer((member, grid): (usize, u64), found: u64) -> Result<bool, u64> {
    let held = found & WIDE_BLOCKS;
    if found & mark(member) != 0 && !mutant("mutant_mark_not_looked_at") {
        Ok(false)
    } else if held != 0 && held.is_multiple_of(tag(member)) {
        Ok(true)
    } else {
        Err(found | if held == 0 { tag(member) * grid } else { mark(member) })
    }
}

impl Device {
    fn new(members: usize, grid: u64) -> Self {
        let blocks = vec![BlockProgress::Begins; grid as usize];
        let member = Member { ended: 0, blocks, granted: None, ended_blocks: 0 };
        Self { grid, word: 0, members: vec![member; members] }
    }

    /// `atomicCAS`: what was found there.
    fn compare_and_swap(&mut self, expected: u64, next: u64) -> u64 {
        let found = self.word;
        if found == expected {
            self.word = next;
        }
        found
    }

    /// The next step of a block; why it must not be so.
    fn step(&mut self, member: usize, block: usize) -> Result<(), String> {
        let grid = self.grid;
        let next = match self.members[member].blocks[block] {
            // `ask_for_blocks`.
            BlockProgress::Begins => {
                let found = self.compare_and_swap(0, tag(member) * grid);
                if found <= WIDE_BLOCKS && found.is_multiple_of(tag(member)) {
                    BlockProgress::Granted(true)
                } else {
                    BlockProgress::Found(found)
                }
            }
            // `ask_again`.
            BlockProgress::Found(found) => match answer((member, grid), found) {
                Ok(is_wide) => BlockProgress::Granted(is_wide),
                Err(next) => match self.compare_and_swap(found, next) {
                    seen if seen == found => BlockProgress::Granted(found & WIDE_BLOCKS == 0),
                    seen => BlockProgress::Found(seen),
                },
            },
            // `end_block`.
            BlockProgress::Granted(true) => {
                let left = self.word.checked_sub(tag(member));
                self.word = left.ok_or("the word becomes negative")?;
                BlockProgress::Ended
            }
            BlockProgress::Granted(false) => {
                let of = if mutant("mutant_mark_taken_early") { 1 } else { grid };
                let ended = &mut self.members[member].ended_blocks;
                *ended = if *ended == of - 1 { 0 } else { *ended + 1 };
                if *ended == 0 { BlockProgress::TakesMark } else { BlockProgress::Ended }
            }
            BlockProgress::TakesMark => {
                if self.word & mark(member) == 0 {
                    return Err("a mark is taken that is not there".to_owned());
                }
                self.word -= mark(member);
                BlockProgress::Ended
            }
            BlockProgress::Ended => unreachable!("it has no step"),
        };
        if let BlockProgress::Granted(is_wide) = next {
            let others = self.members.iter().enumerate().filter(|(other, _)| *other != member);
            if is_wide && others.into_iter().any(|(_, other)| other.granted == Some(true)) {
                return Err("two kernels are wide".to_owned());
            }
            if *self.members[member].granted.get_or_insert(is_wide) != is_wide {
                return Err("blocks of a kernel have different grants".to_owned());
            }
        }
        let of = &mut self.members[member];
        of.blocks[block] = next;
        if of.blocks.iter().all(|block| *block == BlockProgress::Ended) {
            let ended = of.ended + 1;
            let ended_blocks = of.ended_blocks;
            *of = Self::new(1, grid).members.remove(0);
            (of.ended, of.ended_blocks) = (ended, ended_blocks);
        }
        Ok(())
    }

    /// Blocks that have a step: any of a kernel that runs.
    fn blocks(&self, kernels: usize) -> Vec<(usize, usize)> {
        let mut found = Vec::new();
        for (nth, member) in self.members.iter().enumerate().filter(|(_, of)| of.ended < kernels) {
            let has_step = |block: &usize| member.blocks[*block] != BlockProgress::Ended;
            found.extend((0..member.blocks.len()).filter(has_step).map(|block| (nth, block)));
        }
        found
    }
}

/// How many states there are of `members` communicators, each of which runs `kernels` kernels one after the other; or what must not be.
fn search(members: usize, grid: u64, kernels: usize) -> Result<usize, String> {
    let first = Device::new(members, grid);
    let (mut seen, mut left) = (BTreeSet::from([first.clone()]), vec![first]);
    while let Some(device) = left.pop() {
        let blocks = device.blocks(kernels);
        if blocks.is_empty() && device.word != 0 {
            return Err(format!("all have ended, and the word is {:#x}", device.word));
        }
        for (member, block) in blocks {
            let mut next = device.clone();
            next.step(member, block)?;
            // Blocks of a kernel are alike.
            next.members[member].blocks.sort_unstable();
            if seen.insert(next.clone()) {
                left.push(next);
            }
        }
    }
    Ok(seen.len())
}

fn search_all() -> Result<usize, String> {
    let deeper = deeper();
    Ok(search(2, 2, 2 + deeper)? + search(2, 3, 1 + deeper)? + search(3, 2, 1)?)
}

#[test]
fn one_kernel_is_wide_and_all_its_blocks_know() {
    eprintln!("{} states", search_all().unwrap_or_else(|why| panic!("{why}")));
    for name in ["mutant_tag_not_prime", "mutant_mark_not_looked_at", "mutant_mark_taken_early"] {
        let why = with_fault(Some(name), search_all).expect_err(name);
        eprintln!("{name}: {why}");
    }
    assert!(NARROW_MARKS + SM_LOCK_MEMBERS as u32 <= u64::BITS, "each member has a mark");
}
