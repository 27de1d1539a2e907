//! Finds the first event at which the ranks' sequences of a lane differ.
//!
//! All ranks search together: in each round everyone publishes digests of the same 64 prefixes,
//! and everyone narrows the same interval by what all published. Within the histories' full part
//! that ends at one event; before it, between two checkpoints.

use serde::{Deserialize, Serialize};

use super::message::{Message, decode_all, encode};
use crate::lane::{Checkpoints, Digest, Divergence, LaneState, Side};
use crate::store::Gathered;
use crate::{Error, Result};

/// Prefixes compared in one round.
const WIDTH: u64 = 64;

/// One collective exchange through the store.
pub(crate) type GatherFn<'a> = dyn FnMut(&str, &[u8]) -> Result<Gathered> + 'a;

/// How far back a rank's history reaches.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Reach {
    base: u64,
    oldest: u64,
    counter: u64,
    spacing: u64,
}

impl Message for Reach {
    const KIND: u16 = 4;
    const NAME: &'static str = "history";
}

/// Digests of the compared prefixes.
#[derive(Debug, Serialize, Deserialize)]
struct Digests(Vec<Option<Digest>>);

impl Message for Digests {
    const KIND: u16 = 5;
    const NAME: &'static str = "digests";
}

/// Description of a rank's event at the counter in question.
#[derive(Debug, Serialize, Deserialize)]
struct Did {
    what: String,
    site: Option<String>,
}

impl Message for Did {
    const KIND: u16 = 6;
    const NAME: &'static str = "event";
}

/// Finds and describes the first difference. Collective: all ranks call it after the verdict that `lane`
/// differs.
pub(crate) fn first_difference(
    name: &str,
    lane: &LaneState,
    gather: &mut GatherFn<'_>,
) -> Result<Divergence> {
    let known = lane.checkpoints();
    let reach = Reach {
        base: known.base(),
        oldest: known.oldest(),
        counter: lane.counter(),
        spacing: known.spacing(),
    };
    let all: Vec<Reach> = exchange("history", &reach, gather)?;
    let low = all.iter().map(|reach| reach.oldest).max().unwrap_or(0);
    let high = all.iter().map(|reach| reach.counter).min().unwrap_or(0);
    let base = all.iter().map(|reach| reach.base).max().unwrap_or(0);

    let recent = low <= high && first_unequal(&known, &[low], gather)?.is_none();
    let (counter, until) = if recent {
        (narrow(&known, low, high, 1, gather)?, None)
    } else {
        let spacing = all.iter().map(|reach| reach.spacing).max().unwrap_or(1);
        let first = base / spacing;
        let last = (low.min(high)) / spacing;
        let at = narrow(&known, first, last, spacing, gather)? * spacing;
        (at.max(base), Some((at + spacing - 1).max(base)))
    };
    let sides = describe(lane, counter, until, gather)?;
    Ok(Divergence { lane: name.to_owned(), counter, until, sides })
}

/// The largest number `n` in `[low, high]` such that the prefixes of `low * unit` to `n * unit` events are
/// equal on all ranks. The prefix at `low` is known to be equal.
fn narrow(
    known: &Checkpoints<'_>,
    mut low: u64,
    mut high: u64,
    unit: u64,
    gather: &mut GatherFn<'_>,
) -> Result<u64> {
    while low < high {
        let points = probes(low, high);
        let counters: Vec<u64> = points.iter().map(|point| point * unit).collect();
        match first_unequal(known, &counters, gather)? {
            Some(0) => high = points[0] - 1,
            Some(at) => (low, high) = (points[at - 1], points[at] - 1),
            None => low = high,
        }
    }
    Ok(low)
}

/// At most [`WIDTH`] numbers in `(low, high]` at equal distances; the last is `high`.
fn probes(low: u64, high: u64) -> Vec<u64> {
    let span = high - low;
    let count = span.min(WIDTH);
    (1..=count)
        .map(|step| low + (u128::from(span) * u128::from(step) / u128::from(count)) as u64)
        .collect()
}

/// Index of the first of these prefixes that is not known to be equal on all ranks.
fn first_unequal(
    known: &Checkpoints<'_>,
    counters: &[u64],
    gather: &mut GatherFn<'_>,
) -> Result<Option<usize>> {
    let own = Digests(counters.iter().map(|&counter| known.digest(counter)).collect());
    let all: Vec<Digests> = exchange("digests", &own, gather)?;
    if let Some(rank) = all.iter().position(|digests| digests.0.len() != counters.len()) {
        let why = format!("rank {rank} compared other events than this rank");
        return Err(Error::mismatch(why).naming(u32::try_from(rank)));
    }
    Ok((0..counters.len())
        .find(|&at| own.0[at].is_none() || all.iter().any(|digests| digests.0[at] != own.0[at])))
}

fn describe(
    lane: &LaneState,
    counter: u64,
    until: Option<u64>,
    gather: &mut GatherFn<'_>,
) -> Result<Vec<Side>> {
    let did = match lane.event(counter) {
        _ if until.is_some() => Did {
            what: format!("is at event {} with digest {:016x}", lane.counter(), lane.digest()),
            site: None,
        },
        Some(event) => {
            Did { what: event.kind.to_string(), site: event.site.map(|site| site.to_string()) }
        }
        None => Did { what: "nothing: its sequence ends before".into(), site: None },
    };
    let all: Vec<Did> = exchange("event", &did, gather)?;
    let mut sides: Vec<Side> = Vec::new();
    for (rank, Did { what, site }) in (0..).zip(all) {
        match sides.iter_mut().find(|side| side.did == what) {
            Some(side) => side.ranks.push(rank),
            None => sides.push(Side { ranks: vec![rank], did: what, site }),
        }
    }
    // Stable: of equally large groups the one with the lowest rank stays in front.
    sides.sort_by_key(|side| std::cmp::Reverse(side.ranks.len()));
    Ok(sides)
}

/// Publishes `own` and returns every rank's, in rank order. The messages are short, so encoding does not
/// fail, and every rank decodes the same bytes.
fn exchange<M: Message>(what: &str, own: &M, gather: &mut GatherFn<'_>) -> Result<Vec<M>> {
    decode_all(&gather(what, &encode(own)?)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probes_are_few_ascending_and_end_at_the_end() {
        assert_eq!(probes(3, 5), [4, 5]);
        let wide = probes(10, 1_000_000);
        assert_eq!((wide.len() as u64, *wide.last().unwrap()), (WIDTH, 1_000_000));
        assert!(wide.is_sorted() && wide[0] > 10);
        assert_eq!(probes(u64::MAX - 1, u64::MAX), [u64::MAX]);
    }
}
