//! The results, as tables and as JSON.

use std::collections::BTreeMap;

use comfy_table::presets::UTF8_HORIZONTAL_ONLY;
use comfy_table::{CellAlignment, Table, TableComponent};
use serde::Serialize;

use crate::case::BenchCase;
use crate::common::{say, size_name};
use crate::contender::{MEMCPY, OURS};
use crate::matrix::MatrixKind;

/// One line of the comparison. Times are in microseconds.
#[derive(Debug, Serialize)]
pub(crate) struct ComparisonRow {
    op: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    matrix: Option<&'static str>,
    ranks: u32,
    bytes: usize,
    ours_us: f64,
    peers: BTreeMap<&'static str, f64>,
    /// Our time divided by the best peer's; less than 1 is faster. `None` without peers.
    ratio_to_best_peer: Option<f64>,
    /// The time in which every rank copies as many bytes within its own memory, all at the same time.
    memcpy_us: Option<f64>,
}

impl ComparisonRow {
    /// The operation, matrix and number of ranks, each of which has a table of its own.
    fn kind(&self) -> (&'static str, Option<&'static str>, u32) {
        (self.op, self.matrix, self.ranks)
    }
}

/// One contender's index, its name, and its time in each round.
pub(crate) type ContenderTimes = (usize, &'static str, Vec<f64>);

/// The times of every contender, by number of ranks and case.
pub(crate) type Rounds = BTreeMap<(u32, BenchCase), Vec<ContenderTimes>>;

/// The medians over rounds; of several ways to run one library, the best.
pub(crate) fn rows(rounds: &Rounds) -> Vec<ComparisonRow> {
    let row = |(&(ranks, case), times): (&(u32, BenchCase), &Vec<ContenderTimes>)| {
        let mut best: BTreeMap<&'static str, f64> = BTreeMap::new();
        for (_, name, times) in times {
            let us = median(times);
            best.entry(name).and_modify(|best| *best = best.min(us)).or_insert(us);
        }
        let ours_us = best.remove(OURS)?;
        let memcpy_us = best.remove(MEMCPY);
        let fastest = best.values().copied().reduce(f64::min);
        Some(ComparisonRow {
            op: case.op.name(),
            matrix: case.matrix.map(MatrixKind::name),
            ranks,
            bytes: case.bytes,
            ours_us,
            peers: best,
            ratio_to_best_peer: fastest.map(|fastest| ours_us / fastest),
            memcpy_us,
        })
    };
    rounds.iter().filter_map(row).collect()
}

fn median(times: &[f64]) -> f64 {
    let mut sorted = times.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => sorted[middle],
        _ => f64::midpoint(sorted[middle - 1], sorted[middle]),
    }
}

/// Prints one table for each operation and number of ranks.
pub(crate) fn print(rows: &[ComparisonRow]) {
    let kinds: std::collections::BTreeSet<_> = rows.iter().map(ComparisonRow::kind).collect();
    for kind in kinds {
        let (op, matrix, ranks) = kind;
        let rows: Vec<_> = rows.iter().filter(|row| row.kind() == kind).collect();
        let peers: std::collections::BTreeSet<_> =
            rows.iter().flat_map(|row| row.peers.keys()).collect();
        let mut table = Table::new();
        table.load_preset(UTF8_HORIZONTAL_ONLY);
        table.remove_style(TableComponent::HorizontalLines);
        table.remove_style(TableComponent::MiddleIntersections);
        let names = peers.iter().map(|name| (**name).to_owned());
        let first = ["bytes".to_owned(), OURS.to_owned()].into_iter();
        table.set_header(first.chain(names).chain(["ours/best".into(), MEMCPY.into()]));
        let time = |us: Option<f64>| us.map_or_else(|| "-".into(), |us| format!("{us:.1}"));
        for row in rows {
            let mut cells = vec![size_name(row.bytes), time(Some(row.ours_us))];
            cells.extend(peers.iter().map(|name| time(row.peers.get(**name).copied())));
            cells.push(row.ratio_to_best_peer.map_or_else(|| "-".into(), |r| format!("{r:.2}")));
            cells.push(time(row.memcpy_us));
            table.add_row(cells);
        }
        for column in table.column_iter_mut() {
            column.set_cell_alignment(CellAlignment::Right);
        }
        let op = matrix.map_or_else(|| op.to_owned(), |matrix| format!("{op}, {matrix}"));
        say!("\n{op}, {ranks} ranks, f32, microseconds a call\n{table}");
    }
}
