//! Tables and maps, at most 90 columns wide.

use comfy_table::presets::UTF8_HORIZONTAL_ONLY;
use comfy_table::{CellAlignment, Table, TableComponent};

use crate::common::{say, size_name};
use crate::program::{ROUNDS, TENSORS};
use crate::report::{Map, Order};
use crate::results::DemoResults;

/// The number of columns in which a rank's memory is drawn.
const COLUMNS: u64 = 64;

fn table<const N: usize>(header: [String; N]) -> Table {
    let mut table = Table::new();
    table.load_preset(UTF8_HORIZONTAL_ONLY).set_header(header);
    table.remove_style(TableComponent::HorizontalLines);
    table.remove_style(TableComponent::MiddleIntersections);
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

/// Prints the number of wrong tensors by round, of all ranks together.
pub(crate) fn rounds(results: &DemoResults) {
    let all = TENSORS * results.world;
    say!("\nTensors that are wrong after their all-reduce, of {all} a round:\n");
    let mut table = table(["".into(), "1".into(), "2".into(), "3".into(), "4".into(), "5".into()]);
    for (order, name) in [
        (Order::Address, "free blocks by size, address"),
        (Order::Counter, "symmpool: by place in the lane    "),
    ] {
        let mut row = vec![name.to_owned()];
        row.extend((0..ROUNDS).map(|round| results.wrong_in(order, round).to_string()));
        table.add_row(row);
    }
    say!("{table}");
}

/// Prints times and wrong elements by size.
pub(crate) fn timings(results: &DemoResults) {
    say!(
        "\n{} ranks over blocks of the pool, f32, microseconds a call (slowest rank), every \
         element\nchecked on every rank. alltoallv sends 1 to {} parts, uneven.\n",
        results.world,
        results.world
    );
    let mut table = table([
        "bytes a rank".into(),
        "all_reduce".into(),
        "GB/s".into(),
        "wrong".into(),
        "all_to_all_v".into(),
        "GB/s".into(),
        "wrong".into(),
    ]);
    for bytes in crate::common::sizes() {
        let mut row = vec![size_name(bytes)];
        for op in ["all_reduce", "all_to_all_v"] {
            let (us, wrong) = results.timed(op, bytes);
            row.extend([format!("{us:.1}"), format!("{:.2}", bytes as f64 / us / 1e3)]);
            row.push(wrong.to_string());
        }
        table.add_row(row);
    }
    say!("{table}");
}

/// Draws the memory of all ranks, one below the other.
pub(crate) fn maps(results: &DemoResults) {
    say!(
        "\nWhere the last round's tensors lie (a letter begins one, the same letter the same \
         tensor\non every rank; ░ is free, │ ends a window):"
    );
    for (order, name) in [(Order::Address, "by address"), (Order::Counter, "symmpool")] {
        let maps = results.maps(order);
        let same = maps.windows(2).all(|pair| pair[0] == pair[1]);
        say!("\n{name}: {}", if same { "identical on every rank" } else { "ranks differ" });
        for (rank, map) in maps.iter().enumerate() {
            say!("  rank {rank} │{}", draw(map));
        }
    }
}

/// The drawing of one rank's memory, a line. A cell shows a tensor that begins in it, else what most of it holds.
fn draw(map: &Map) -> String {
    let total: u64 = map.windows.iter().sum();
    let cell = total.div_ceil(COLUMNS).max(1);
    let mut ends: Vec<u64> = Vec::new();
    for bytes in &map.windows {
        ends.push(ends.last().copied().unwrap_or(0) + bytes);
    }
    let mut line = String::new();
    for from in (0..total).step_by(cell as usize) {
        let to = (from + cell).min(total);
        let first = map.live.iter().find(|block| (from..to).contains(&block.offset));
        let covered: u64 = map
            .live
            .iter()
            .map(|block| to.min(block.offset + block.bytes).saturating_sub(from.max(block.offset)))
            .sum();
        line.push(match first {
            Some(block) => letter(block.tensor),
            None if covered * 2 >= to - from => '█',
            None => '░',
        });
        if ends.iter().any(|end| (from + 1..=to).contains(end)) {
            line.push('│');
        }
    }
    line
}

/// The letter of a tensor in drawings.
fn letter(tensor: u32) -> char {
    const LETTERS: &[u8] = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
    char::from(LETTERS[tensor as usize % LETTERS.len()])
}
