//! Values of chunks, as expressions over the inputs. Equal expressions have equal numbers, so that comparing is
//! cheap.

use std::collections::BTreeMap;

use super::super::model::Contribution;

/// The number of an expression.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Value(u32);

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Expression {
    /// Nothing was written there.
    Undefined,
    /// A chunk of an input.
    Input(Contribution),
    /// Values that were reduced in this order and then rounded.
    Reduced(Vec<Value>),
}

/// Facts about an expression that follow from those that it is made of, so that none is looked through twice.
#[derive(Clone, Copy, Debug)]
struct Facts {
    is_defined: bool,
    /// How many inputs take part, each as often as it does.
    contributions: u64,
}

/// All expressions of a plan.
#[derive(Clone)]
pub(super) struct PlanValues {
    numbers: BTreeMap<Expression, Value>,
    expressions: Vec<(Expression, Facts)>,
}

/// More inputs than take part in any sensible chunk.
const MAX_CONTRIBUTIONS: u64 = 1 << 16;

impl PlanValues {
    pub(super) const UNDEFINED: Value = Value(0);

    pub(super) fn new() -> Self {
        let mut values = Self { numbers: BTreeMap::new(), expressions: Vec::new() };
        let facts = Facts { is_defined: false, contributions: 0 };
        values.number(Expression::Undefined, facts);
        values
    }

    fn number(&mut self, expression: Expression, facts: Facts) -> Value {
        if let Some(value) = self.numbers.get(&expression) {
            return *value;
        }
        let value = Value(self.expressions.len() as u32);
        self.expressions.push((expression.clone(), facts));
        self.numbers.insert(expression, value);
        value
    }

    fn facts(&self, value: Value) -> Facts {
        self.expressions[value.0 as usize].1
    }

    pub(super) fn input(&mut self, rank: u32, chunk: u32) -> Value {
        let facts = Facts { is_defined: true, contributions: 1 };
        self.number(Expression::Input(Contribution { rank, chunk }), facts)
    }

    /// The reduction of one value is the value itself.
    pub(super) fn reduced(&mut self, values: Vec<Value>) -> Value {
        if let [one] = values.as_slice() {
            return *one;
        }
        let all = || values.iter().map(|each| self.facts(*each));
        let facts = Facts {
            is_defined: all().all(|each| each.is_defined),
            contributions: all().fold(0, |sum, each| sum.saturating_add(each.contributions)),
        };
        self.number(Expression::Reduced(values), facts)
    }

    /// Whether all that a value is made of was written.
    pub(super) fn is_defined(&self, value: Value) -> bool {
        self.facts(value).is_defined
    }

    /// The inputs that a value is made of, sorted, each as often as it takes part; `None` beyond a limit.
    pub(super) fn contributions(&self, value: Value) -> Option<Vec<Contribution>> {
        if self.facts(value).contributions > MAX_CONTRIBUTIONS {
            return None;
        }
        let mut found = Vec::new();
        let mut left = vec![value];
        while let Some(value) = left.pop() {
            match &self.expressions[value.0 as usize].0 {
                Expression::Undefined => {}
                Expression::Input(contribution) => found.push(*contribution),
                Expression::Reduced(values) => left.extend(values),
            }
        }
        found.sort_unstable();
        Some(found)
    }

    /// How many inputs take part in a value, each as often as it does.
    pub(super) fn count(&self, value: Value) -> u32 {
        u32::try_from(self.facts(value).contributions).unwrap_or(u32::MAX)
    }

    /// Returns the values that a value was reduced of.
    pub(super) fn operands(&self, value: Value) -> &[Value] {
        match &self.expressions[value.0 as usize].0 {
            Expression::Reduced(values) => values,
            _ => &[],
        }
    }

    /// Whether a value is the reduction of inputs as they are, of which none was reduced before.
    pub(super) fn is_flat(&self, value: Value) -> bool {
        match &self.expressions[value.0 as usize].0 {
            Expression::Reduced(values) => values
                .iter()
                .all(|each| !matches!(self.expressions[each.0 as usize].0, Expression::Reduced(_))),
            _ => true,
        }
    }
}
