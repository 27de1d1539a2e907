//! Values of chunks, as far as averages need to know them: which inputs were reduced, and in which steps.

use std::collections::{BTreeMap, BTreeSet};

#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
enum ValueOrigin {
    Input(u32, u32),
    Reduced(Vec<usize>),
}

/// Values that the chunks of a plan have held, which of them were results, and what other results were made of.
#[derive(Default)]
pub struct Values {
    numbers: BTreeMap<ValueOrigin, usize>,
    /// How many inputs are in each value.
    inputs: Vec<u64>,
    results: BTreeSet<usize>,
    operands: BTreeSet<usize>,
}

/// Value of a chunk that nobody has written.
pub(super) const UNDEFINED: usize = usize::MAX;

impl Values {
    fn number(&mut self, made: ValueOrigin, inputs: u64) -> usize {
        let next = self.inputs.len();
        let number = *self.numbers.entry(made).or_insert(next);
        if number == next {
            self.inputs.push(inputs);
        }
        number
    }

    pub(super) fn input(&mut self, rank: u32, chunk: u32) -> usize {
        self.number(ValueOrigin::Input(rank, chunk), 1)
    }

    /// The value of a reduction. That of one value is the value itself.
    pub(super) fn reduced(&mut self, values: Vec<usize>) -> usize {
        if let [one] = values[..] {
            return one;
        }
        self.operands.extend(&values);
        let inputs = values.iter().map(|value| self.inputs.get(*value).copied().unwrap_or(0));
        let inputs = inputs.fold(0, u64::saturating_add);
        self.number(ValueOrigin::Reduced(values), inputs)
    }

    /// Notes what an output holds when its rank leaves.
    pub(super) fn result(&mut self, value: usize) {
        self.results.insert(value);
    }

    fn inputs(&self, value: usize) -> usize {
        self.inputs.get(value).map_or(1, |inputs| usize::try_from(*inputs).unwrap_or(usize::MAX))
    }

    /// Divisor of an average in the reduction that makes a value.
    pub(super) fn divisor(&self, value: usize) -> usize {
        let divides = self.results.contains(&value) && !self.operands.contains(&value);
        if divides { self.inputs(value) } else { 1 }
    }

    /// Divisor of an average's result when its rank leaves.
    pub(super) fn last_divisor(&self, value: usize) -> usize {
        if self.operands.contains(&value) { self.inputs(value) } else { 1 }
    }

    /// Whether some result is divided when its rank leaves.
    pub fn divides_last(&self) -> bool {
        self.results.iter().any(|value| self.last_divisor(*value) > 1)
    }
}
