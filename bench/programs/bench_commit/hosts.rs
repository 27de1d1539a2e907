//! Commits of ranks on several pretended hosts, compared with those of as many ranks on one.

use serde_json::{Value, json};
use symmpool_allocator::Deadline;

use crate::CommitBenchOptions;
use crate::launch;

/// Round trips of the store that a commit over hosts may take beyond one of a single host.
const TRIPS: f64 = 2.0;

/// Measures both, and prints for each kind of commit whether the bar is met.
pub(crate) fn compare(options: &CommitBenchOptions, deadline: Deadline) -> Result<Value, String> {
    let one = launch::run(&CommitBenchOptions { hosts: 1, ..options.clone() }, deadline)?;
    println!();
    let several = launch::run(options, deadline)?;
    println!("\n{} hosts, beside one and {TRIPS} round trips of the store", options.hosts);
    let number = |value: &Value| value.as_f64().unwrap_or(f64::NAN);
    let trips = TRIPS * number(&several["store_round_trip_ms"]);
    let mut bars = Vec::new();
    let mut compare = |name: &str, one: f64, several: f64| {
        let met = several <= one + trips;
        let verdict = if met { "met" } else { "MISSED" };
        println!("{name:<28} {several:>9.3} ms <= {one:.3} + {trips:.3} ms: {verdict}");
        bars.push(json!({ "name": name, "one_ms": one, "several_ms": several, "met": met }));
    };
    let scenarios = |report: &Value| report["scenarios"].as_array().cloned().unwrap_or_default();
    for (before, over) in scenarios(&one).iter().zip(&scenarios(&several)) {
        let name = over["name"].as_str().unwrap_or_default();
        compare(name, number(&before["commit_ms"]), number(&over["commit_ms"]));
    }
    let empty = |report: &Value| number(&report["empty_commit_ms"]);
    compare("commit without new memory", empty(&one), empty(&several));
    Ok(json!({ "one_host": one, "several_hosts": several, "trips_ms": trips, "bars": bars }))
}
