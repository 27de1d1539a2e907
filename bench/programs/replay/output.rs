//! Formats an outcome as a table or as JSON.

use comfy_table::{CellAlignment, Table, presets};
use serde_json::{Value, json};
use symmpool_allocator::trace::{RankGroup, ReplayFailure, ReplayOutcome};

/// An object on one line. The digest has 16 hexadecimal digits; sizes are in bytes.
pub(crate) fn json(outcome: &ReplayOutcome) -> String {
    json!({
        "ranks": outcome.ranks,
        "events": outcome.events,
        "digests_equal": outcome.digests_equal,
        "digest": format!("{:016x}", outcome.digest),
        "ns_per_event": outcome.ns_per_event,
        "peak_live_bytes": outcome.peak_live_bytes,
        "peak_reserved_bytes": outcome.peak_reserved_bytes,
        "segments": outcome.segments,
        "windows": outcome.windows,
        "error": outcome.error.as_ref().map(failure),
    })
    .to_string()
}

/// `event` is the operation that returned the error, `counter` the lane's event that differs.
fn failure(failure: &ReplayFailure) -> Value {
    let sides = failure.sides.iter().map(|side| json!({ "ranks": side.ranks, "did": side.did }));
    let group = |group: &RankGroup| json!({ "ranks": group.ranks, "message": group.message });
    json!({
        "message": failure.message,
        "lane": failure.lane,
        "counter": failure.counter,
        "until": failure.until,
        "sides": sides.collect::<Vec<_>>(),
        "event": failure.event,
        "same_on_every_rank": failure.is_same_everywhere(),
        "groups": failure.groups.iter().map(group).collect::<Vec<_>>(),
    })
}

/// A table of several lines, without a newline at the end.
pub(crate) fn table(outcome: &ReplayOutcome) -> String {
    let reserved = outcome.peak_reserved_bytes as f64 / outcome.peak_live_bytes.max(1) as f64;
    let mut table = Table::new();
    table.load_preset(presets::UTF8_BORDERS_ONLY);
    let mut row = |name: &str, value: String| {
        table.add_row([name.to_owned(), value]);
    };
    row("ranks", outcome.ranks.to_string());
    row("events", outcome.events.to_string());
    row("digests", if outcome.digests_equal { "equal" } else { "DIFFERENT" }.into());
    row("digest of rank 0", format!("{:016x}", outcome.digest));
    row("time per event", format!("{:.0} ns", outcome.ns_per_event));
    row("peak live", mebibytes(outcome.peak_live_bytes));
    row(
        "peak reserved",
        format!("{}, {reserved:.3} x live", mebibytes(outcome.peak_reserved_bytes)),
    );
    row("segments (peak)", outcome.segments.to_string());
    row("windows (end)", outcome.windows.to_string());
    if let Some(column) = table.column_mut(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    let mut text = table.to_string();
    let Some(failure) = &outcome.error else { return text };
    text.push_str(&format!("\nat operation {}: {}", failure.event, failure.message));
    if !failure.is_same_everywhere() {
        text.push_str("\nRanks have different errors:");
        for group in &failure.groups {
            let message = group.message.as_deref().unwrap_or("none");
            text.push_str(&format!("\n  ranks {:?}: {message}", group.ranks));
        }
    }
    text
}

fn mebibytes(bytes: u64) -> String {
    format!("{:.2} MiB", bytes as f64 / f64::from(1 << 20))
}
