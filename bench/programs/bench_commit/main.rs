//! Measures the time of commits and of their phases: with rank processes on host memory or devices, which
//! connect over TCP on loopback, or with thousands of simulated ranks in one process.
//!
//! ```text
//! cargo run --release -p symmpool-bench --bin bench_commit -- --json commit.json
//! cargo run --release -p symmpool-bench --bin bench_commit -- --driver cuda
//! cargo run --release -p symmpool-bench --bin bench_commit -- --ranks 8 --hosts 2
//! cargo run --release -p symmpool-bench --bin bench_commit -- --sim-ranks 4096
//! ```
//!
//! Exit codes: 0 if everything was measured; 1 if something failed, or the number of round trips is not
//! constant; 2 for invalid arguments.

mod facts;
mod figures;
mod hosts;
mod launch;
mod phases;
mod rank;
mod sim;
mod summary;

use std::process::ExitCode;
use std::time::Duration;

use serde_json::{Value, json};
use symmpool_allocator::Deadline;

const HELP: &str = "\
bench_commit [--ranks N] [--driver host|cuda] [--repeats N] [--hosts N]
              [--sim-ranks N] [--timeout SECONDS] [--json FILE]

  --ranks N          rank processes (4)
  --driver NAME      host memory, or that of CUDA devices: rank r has device r modulo their number (host)
  --repeats N        commits of each kind; their median is reported (21, at least 15)
  --hosts N          also with the ranks on so many pretended hosts, compared with one (1)
  --sim-ranks N      instead: the protocol alone, on N simulated ranks in this process
  --timeout SECONDS  limit for the whole run (300)
  --json FILE        write the results and facts about the machine as JSON
";

/// The command line's options.
#[derive(Clone)]
pub(crate) struct CommitBenchOptions {
    ranks: u32,
    cuda: bool,
    repeats: usize,
    /// Pretended hosts, each of which has as many ranks.
    hosts: u32,
    sim_ranks: Option<u32>,
    timeout: Duration,
    json: Option<String>,
    /// Rank and the store's address, in a process that this program started.
    child: Option<(u32, String)>,
}

impl CommitBenchOptions {
    fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Option<Self>, String> {
        let mut options = Self {
            ranks: 4,
            cuda: false,
            repeats: 21,
            hosts: 1,
            sim_ranks: None,
            timeout: Duration::from_secs(300),
            json: None,
            child: None,
        };
        while let Some(argument) = arguments.next() {
            let mut value = || arguments.next().ok_or(format!("{argument} needs a value"));
            match argument.as_str() {
                "--help" | "-h" => return Ok(None),
                "--ranks" => options.ranks = number(&argument, &value()?)?,
                "--driver" => {
                    options.cuda = match value()?.as_str() {
                        "host" => false,
                        "cuda" => true,
                        other => return Err(format!("--driver {other:?}: host or cuda")),
                    };
                }
                "--repeats" => options.repeats = number(&argument, &value()?)?,
                "--hosts" => options.hosts = number(&argument, &value()?)?,
                "--sim-ranks" => options.sim_ranks = Some(number(&argument, &value()?)?),
                "--timeout" => {
                    options.timeout = Duration::from_secs(number(&argument, &value()?)?);
                }
                "--json" => options.json = Some(value()?),
                "--child" => options.child = Some((number(&argument, &value()?)?, value()?)),
                other => return Err(format!("unknown argument {other:?}")),
            }
        }
        if options.ranks == 0 || options.sim_ranks == Some(0) || options.repeats < 15 {
            return Err("at least 1 rank and 15 repeats".into());
        }
        if options.hosts == 0 || !options.ranks.is_multiple_of(options.hosts) {
            return Err(format!(
                "--hosts {}: {} ranks do not divide among as many",
                options.hosts, options.ranks
            ));
        }
        if options.hosts > 1 && options.sim_ranks.is_some() {
            return Err("--hosts and --sim-ranks: simulated ranks are on one host".into());
        }
        Ok(Some(options))
    }
}

fn number<T: std::str::FromStr>(name: &str, text: &str) -> Result<T, String> {
    text.parse().map_err(|_| format!("{name} {text:?}: expected a whole number"))
}

fn main() -> ExitCode {
    let options = match CommitBenchOptions::parse(std::env::args().skip(1)) {
        Ok(Some(options)) => options,
        Ok(None) => {
            print!("{HELP}");
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            eprint!("{error}\n\n{HELP}");
            return ExitCode::from(2);
        }
    };
    match run(&options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &CommitBenchOptions) -> Result<(), String> {
    let deadline = Deadline::after(options.timeout);
    if let Some((rank, address)) = &options.child {
        let report = rank::run(*rank, address, options, deadline);
        println!("{}", report.map_err(|error| format!("rank {rank}: {error}"))?);
        return Ok(());
    }
    if let Some(path) = &options.json {
        // Fail now, not after the measurement, if the file cannot be written.
        let file = std::fs::OpenOptions::new().append(true).create(true).open(path);
        file.map_err(|error| format!("--json {path}: {error}"))?;
    }
    let results = match options.sim_ranks {
        Some(ranks) => sim::run(ranks, deadline)?,
        None if options.hosts > 1 => hosts::compare(options, deadline)?,
        None => launch::run(options, deadline)?,
    };
    if let Some(path) = &options.json {
        let report: Value = json!({ "measured_on": facts::facts(), "results": results });
        let text = format!("{report:#}\n");
        std::fs::write(path, text).map_err(|error| format!("writing {path}: {error}"))?;
    }
    Ok(())
}
