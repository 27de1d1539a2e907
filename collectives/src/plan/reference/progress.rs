//! How far a rank has come, and what it may run next.

use super::super::model::{Instruction, Operation};

/// How far a rank has come in its calls and in its program.
pub(super) struct RankProgress<'a> {
    program: &'a [Instruction],
    /// Calls that it has entered.
    pub(super) calls: usize,
    pub(super) is_inside: bool,
    /// Barriers that it has come to in all calls, and whether it has not passed the last one yet.
    pub(super) barriers: usize,
    pub(super) is_at_barrier: bool,
    done: Vec<bool>,
    /// The operations that are next.
    pub(super) next: Vec<usize>,
}

impl<'a> RankProgress<'a> {
    pub(super) fn new(program: &'a [Instruction]) -> Self {
        Self {
            program,
            calls: 0,
            is_inside: false,
            barriers: 0,
            is_at_barrier: false,
            done: vec![false; program.len()],
            next: Vec::new(),
        }
    }

    /// Enters the next call, and returns its number.
    pub(super) fn enter(&mut self) -> usize {
        self.is_inside = true;
        self.done.fill(false);
        self.find_next();
        self.calls += 1;
        self.calls - 1
    }

    pub(super) fn leave(&mut self) -> usize {
        self.is_inside = false;
        self.calls - 1
    }

    /// The half of scratch that the rank's call uses, also a peer's.
    pub(super) fn half(&self) -> usize {
        self.calls % 2
    }

    pub(super) fn done(&mut self, index: usize) {
        self.done[index] = true;
        self.find_next();
    }

    pub(super) fn has_ended(&self) -> bool {
        self.next.is_empty()
    }

    /// Finds the operations that are next: the first one that is not done, and behind it the first one of each other block
    /// group, as far as only block groups follow.
    fn find_next(&mut self) {
        self.next.clear();
        let first = self.done.iter().position(|done| !done).unwrap_or(self.program.len());
        let mut groups = Vec::new();
        for (index, each) in self.program.iter().enumerate().skip(first) {
            let group = each.group.filter(|_| each.operation != Operation::Join);
            match group {
                None if self.next.is_empty() => return self.next.push(index),
                None => return,
                Some(group) if self.done[index] || groups.contains(&group) => {}
                Some(group) => {
                    groups.push(group);
                    self.next.push(index);
                }
            }
        }
    }
}
