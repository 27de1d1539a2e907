//! Checks of the whole allocator: processes make pools, commit, write through each other's windows, and get the same
//! errors when one of them diverges.
//!
//! The parent serves the store on a loopback address, starts the ranks, and reads their reports
//! from it.

mod access;
mod blocks;
mod rank;

use std::process::{Child, Command};
use std::time::Duration;

use serde_json::{Value, json};
use symmpool_allocator::Deadline;
use symmpool_allocator::store::tcp::TcpOptions;
use symmpool_allocator::store::{Store, TcpServer, TcpStore};

pub(crate) use rank::run as run_rank;

use super::{CheckOptions, hub};

/// The store's key for a rank's report.
fn report_key(rank: u32) -> String {
    format!("cuda_check/report/{rank}")
}

/// Runs all ranks and returns the combined report.
pub(crate) fn run(options: &CheckOptions, deadline: Deadline) -> Value {
    println!("pools of {} rank(s), {} memory", options.ranks, options.driver.name());
    let mut report = json!({
        "mode": "pool",
        "driver": options.driver.name(),
        "ranks": options.ranks,
    });
    match collect(options, deadline).and_then(|ranks| judge(&ranks, &mut report)) {
        Ok(()) => report["ok"] = json!(true),
        Err(error) => {
            report["ok"] = json!(false);
            report["error"] = json!(error);
        }
    }
    report
}

/// Every rank's report. No process is left running, also after an error.
fn collect(options: &CheckOptions, deadline: Deadline) -> Result<Vec<Value>, String> {
    let server =
        TcpServer::bind("127.0.0.1:0", TcpOptions::default()).map_err(|error| error.to_string())?;
    let address = server.local_addr().to_string();
    let mut children = Vec::new();
    let started = start(options, &address, &mut children);
    // Ranks that time out need a little longer to report it.
    let late = Deadline::after(deadline.remaining() + Duration::from_secs(4));
    let exits = hub::reap(children, if started.is_ok() { late } else { Deadline::seconds(0) });
    started?;
    let store = TcpStore::connect(address.as_str(), TcpOptions::default(), Deadline::seconds(5))
        .map_err(|error| error.to_string())?;
    let mut reports = Vec::new();
    let mut wrong = Vec::new();
    for rank in 0..options.ranks {
        // A rank reports before it ends, and all have ended.
        match store.get(&report_key(rank), Deadline::seconds(1)) {
            Ok(text) => {
                let report: Value = serde_json::from_slice(&text)
                    .map_err(|error| format!("the report of rank {rank}: {error}"))?;
                if let Some(error) = report["error"].as_str() {
                    wrong.push(format!("rank {rank}: {error}"));
                }
                reports.push(report);
            }
            Err(_) => wrong.push(format!("rank {rank} left no report")),
        }
    }
    if let Err(error) = exits {
        wrong.push(error);
    }
    if wrong.is_empty() { Ok(reports) } else { Err(wrong.join("; ")) }
}

fn start(options: &CheckOptions, address: &str, children: &mut Vec<Child>) -> Result<(), String> {
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    for rank in 0..options.ranks {
        let child = Command::new(&program)
            .args(["--child", &rank.to_string(), address, "--pool"])
            .args(["--driver", options.driver.name()])
            .args(["--ranks", &options.ranks.to_string()])
            .args(["--timeout", &options.timeout.as_secs().to_string()])
            .spawn()
            .map_err(|error| format!("starting rank {rank}: {error}"))?;
        children.push(child);
    }
    Ok(())
}

/// Checks that the ranks' errors agree, and adds the times of the slowest rank to the report.
fn judge(ranks: &[Value], report: &mut Value) -> Result<(), String> {
    for what in ["diverged", "out_of_memory"] {
        let first = &ranks[0][what];
        if let Some(at) = ranks.iter().position(|rank| rank[what] != *first) {
            return Err(format!("{what}: rank 0 says {first}, rank {at} {}", ranks[at][what]));
        }
        println!("{what}, on every rank: {}", first.as_str().unwrap_or("(not with one rank)"));
        report[what] = first.clone();
    }
    for what in ["commit_64_mib", "commit_64_blocks", "empty_commit"] {
        let slowest = slowest(ranks, what).ok_or(format!("{what}: no times"))?;
        let median = slowest[slowest.len() / 2];
        let (least, most) = (slowest[0], slowest[slowest.len() - 1]);
        println!(
            "{what}: median {median:.0} us, {least:.0} to {most:.0} ({} times, slowest rank)",
            slowest.len()
        );
        report[what] = json!({ "median_us": median, "all_us": slowest });
    }
    report["per_rank"] = json!(ranks);
    Ok(())
}

/// The slowest rank's time of each repetition, sorted.
fn slowest(ranks: &[Value], what: &str) -> Option<Vec<f64>> {
    let mut slowest: Vec<f64> = Vec::new();
    for rank in ranks {
        let times: Vec<f64> = serde_json::from_value(rank["times_us"][what].clone()).ok()?;
        slowest.resize(times.len().max(slowest.len()), 0.0);
        for (most, time) in slowest.iter_mut().zip(times) {
            *most = most.max(time);
        }
    }
    slowest.sort_by(f64::total_cmp);
    (!slowest.is_empty()).then_some(slowest)
}
