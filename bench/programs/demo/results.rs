//! The reports of all ranks, and whether the demo shows what it should show.

use crate::common::sizes;
use crate::program::{ROUNDS, TENSORS};
use crate::report::{Map, Order, Report};

/// Reports of all ranks.
pub(crate) struct DemoResults {
    pub(crate) world: u32,
    reports: Vec<(usize, Report)>,
}

impl DemoResults {
    pub(crate) fn new(world: u32) -> Self {
        Self { world, reports: Vec::new() }
    }

    /// The number of reports of a complete run.
    pub(crate) fn expected(world: u32) -> u64 {
        u64::from(world) * (u64::from(2 * ROUNDS + 2) + 2 * sizes().len() as u64)
    }

    pub(crate) fn add(&mut self, rank: usize, report: Report) {
        self.reports.push((rank, report));
    }

    /// The number of wrong tensors in a round, on all ranks.
    pub(crate) fn wrong_in(&self, order: Order, round: u32) -> u32 {
        let wrong = self.reports.iter().map(|(_, report)| match report {
            Report::Round { order: o, round: r, wrong, .. } if (*o, *r) == (order, round) => *wrong,
            _ => 0,
        });
        wrong.sum()
    }

    fn wrong(&self, order: Order) -> u32 {
        (0..ROUNDS).map(|round| self.wrong_in(order, round)).sum()
    }

    /// The time of the slowest rank, and the number of wrong elements of all ranks.
    pub(crate) fn timed(&self, op: &str, bytes: usize) -> (f64, usize) {
        self.reports.iter().fold((0.0, 0), |(slowest, all), (_, report)| match report {
            Report::Timed { op: o, bytes: b, us, wrong } if o == op && *b == bytes => {
                (us.max(slowest), all + wrong)
            }
            _ => (slowest, all),
        })
    }

    /// The memory of every rank, by rank.
    pub(crate) fn maps(&self, order: Order) -> Vec<&Map> {
        let mut maps: Vec<_> = self
            .reports
            .iter()
            .filter_map(|(rank, report)| match report {
                Report::Map { order: o, map } if *o == order => Some((*rank, map)),
                _ => None,
            })
            .collect();
        maps.sort_by_key(|(rank, _)| *rank);
        maps.into_iter().map(|(_, map)| map).collect()
    }

    /// A summary of the run, or the reason why it does not show what it should.
    pub(crate) fn verdict(&self) -> Result<String, String> {
        if self.reports.len() as u64 != Self::expected(self.world) {
            return Err(format!("{} reports are missing", {
                Self::expected(self.world).saturating_sub(self.reports.len() as u64)
            }));
        }
        let (address, counter) = (self.wrong(Order::Address), self.wrong(Order::Counter));
        let all = ROUNDS * TENSORS * self.world;
        let elements: usize = ["all_reduce", "all_to_all_v"]
            .iter()
            .flat_map(|op| sizes().into_iter().map(|bytes| self.timed(op, bytes).1))
            .sum();
        let maps = self.maps(Order::Counter);
        if counter > 0 || elements > 0 {
            return Err(format!(
                "symmpool got {counter} of {all} tensors and {elements} timed elements wrong"
            ));
        }
        if maps.windows(2).any(|pair| pair[0] != pair[1]) {
            return Err("symmpool's blocks lie differently on different ranks".into());
        }
        if address == 0 {
            return Err("the counter-example got nothing wrong, so the demo shows nothing".into());
        }
        Ok(format!(
            "symmpool: 0 of {all} tensors wrong, and every timed element right. The same program \
             over\nblocks ordered by address: {address} of {all} wrong, without any error."
        ))
    }
}
