//! The process that starts the ranks, serves their store, and summarises what they measured.

use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;

use serde_json::{Value, json};
use symmpool_allocator::Deadline;
use symmpool_allocator::store::TcpServer;
use symmpool_allocator::store::tcp::TcpOptions;

use crate::CommitBenchOptions;
use crate::figures::median;
use crate::rank::Scenario;
use crate::summary::{by_rank, slowest};

/// Rank processes. Dropping this ends them.
struct Ranks(Vec<Child>);

impl Drop for Ranks {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // Fails for processes that have ended, which is the normal case.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

pub(crate) fn run(options: &CommitBenchOptions, deadline: Deadline) -> Result<Value, String> {
    let server = TcpServer::bind("127.0.0.1:0", TcpOptions::default());
    let server = server.map_err(|error| error.to_string())?;
    let reports = collect(options, &server.local_addr().to_string(), deadline)?;
    let places = match options.hosts {
        1 => String::new(),
        hosts => format!(" on {hosts} pretended hosts"),
    };
    println!("{} rank processes{places}, medians of {} commits", options.ranks, options.repeats);
    let mut scenarios = Vec::new();
    for (at, (scenario, bar)) in Scenario::all(options.cuda).enumerate() {
        let all: Vec<&Value> = reports.iter().map(|report| &report["scenarios"][at]).collect();
        let times = |what: &str| slowest(all.iter().map(|report| &report[what]));
        let (alloc, commit) = (times("alloc_us"), times("commit_us"));
        let release = times("release_us");
        let store = &all[0]["traffic"];
        let met = median(&commit) / 1e3 <= bar;
        println!(
            "{:<28} {:>9.3} ms to commit (least {:.3}), {:.3} ms to allocate before, {:.3} ms to \
             release after; {} store round trips{}",
            scenario.name,
            median(&commit) / 1e3,
            commit.iter().copied().fold(f64::MAX, f64::min) / 1e3,
            median(&alloc) / 1e3,
            median(&release) / 1e3,
            store["round_trips"],
            if met { format!("; within {bar} ms") } else { format!("; MORE THAN {bar} ms") }
        );
        let by_rank = by_rank(&all);
        scenarios.push(json!({
            "name": scenario.name,
            "segments": scenario.segments,
            "lanes": scenario.lanes,
            "policy": format!("{:?}", scenario.policy),
            "populated": scenario.populate,
            "commit_ms": median(&commit) / 1e3,
            "beside_a_window": scenario.keep_window,
            "us_of_each_rank": by_rank,
            "bar_ms": bar,
            "met": met,
            "alloc_ms": median(&alloc) / 1e3,
            "release_ms": median(&release) / 1e3,
            "store_of_rank_0": store,
            "commit_us_of_slowest_rank": commit,
        }));
    }
    let empty = slowest(reports.iter().map(|report| &report["empty_commit_us"]));
    let check = reports.iter().filter_map(|report| report["check_ns"].as_f64()).fold(0.0, f64::max);
    println!("{:<28} {:>9.3} ms", "commit without new memory", median(&empty) / 1e3);
    println!("{:<28} {check:>9.1} ns", "check that none is due");
    let gather = slowest(reports.iter().map(|report| &report["store_gather_us"]));
    println!("{:<28} {:>9.3} ms", "round trip of the store", median(&gather) / 1e3);
    Ok(json!({
        "ranks": options.ranks,
        "repeats": options.repeats,
        "store": "tcp on loopback",
        "driver": if options.cuda { "cuda" } else { "host" },
        "scenarios": scenarios,
        "empty_commit_ms": median(&empty) / 1e3,
        "due_check_ns": check,
        "hosts": options.hosts,
        "store_round_trip_ms": median(&gather) / 1e3,
    }))
}

/// Starts the ranks and waits for their reports; returns them in rank order.
fn collect(
    options: &CommitBenchOptions,
    address: &str,
    deadline: Deadline,
) -> Result<Vec<Value>, String> {
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let (sender, receiver) = mpsc::channel();
    let mut ranks = Ranks(Vec::new());
    for rank in 0..options.ranks {
        let mut child = Command::new(&program)
            .args(["--child", &rank.to_string(), address])
            .args(["--ranks", &options.ranks.to_string()])
            .args(["--driver", if options.cuda { "cuda" } else { "host" }])
            .args(["--repeats", &options.repeats.to_string()])
            .args(["--hosts", &options.hosts.to_string()])
            .args(["--timeout", &options.timeout.as_secs().to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| format!("starting rank {rank}: {error}"))?;
        let output = child.stdout.take();
        ranks.0.push(child);
        let sender = sender.clone();
        // The thread ends with the process, which dropping `ranks` ends.
        std::thread::spawn(move || {
            let mut text = String::new();
            let read = output.map_or(Ok(0), |mut output| output.read_to_string(&mut text));
            // Nobody receives any more if another rank has failed.
            let _ = sender.send((rank, read.map(|_| text)));
        });
    }
    let mut reports = vec![Value::Null; options.ranks as usize];
    for _ in 0..options.ranks {
        let (rank, text) = receiver
            .recv_timeout(deadline.remaining())
            .map_err(|_| "the ranks took too long; they are stopped".to_owned())?;
        let text = text.map_err(|error| format!("reading from rank {rank}: {error}"))?;
        reports[rank as usize] = serde_json::from_str(&text)
            .map_err(|_| format!("rank {rank} ended without a report (see above)"))?;
    }
    Ok(reports)
}
