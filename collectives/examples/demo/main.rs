//! Shows what symmpool is for, on four processes of this machine.
//!
//! The same tensor program runs over memory whose free blocks are ordered by address, as most
//! caching allocators do it, and over a symmpool pool. The first silently adds up the wrong
//! tensors. Then all-reduce and alltoallv are timed and checked, and memory is drawn.
//!
//! `cargo run --release -p symmpool-collectives --example demo`

mod address_ordered;
mod clutter;
#[path = "../common/mod.rs"]
mod common;
mod program;
mod rank;
mod report;
mod results;
mod show;
mod symmetric;
mod timing;

use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};
use symmpool_allocator::driver::CudaDriver;

use common::{End, Processes, say};
use report::Report;
use results::Results;

/// Silent corruption by address order, and its absence with symmpool.
#[derive(Parser)]
struct Options {
    /// Rank processes to run.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(2..=16))]
    ranks: u32,
    /// Seconds after which everything is stopped.
    #[arg(long, default_value_t = 120)]
    limit: u64,
    /// Let the same things happen in every rank's address space. Order by address is then the
    /// same everywhere, and nothing goes wrong: proof that nothing else is at fault.
    #[arg(long)]
    same_holes: bool,
    /// This process is a rank; the environment says which.
    #[arg(long, hide = true)]
    rank: bool,
}

fn main() -> ExitCode {
    let options = Options::parse();
    if options.rank {
        common::end_with_parent();
        return if rank::run(options.same_holes) { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    }
    let began = Instant::now();
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    say!("symmpool demo: {} ranks in processes of their own, {cores} cores", options.ranks);
    if let Ok(devices @ 2..) = CudaDriver::device_count() {
        say!(
            "{devices} CUDA devices are here; collectives on them are not in this version, so \
             this runs in host memory."
        );
    }
    let results = match collect(&options) {
        Ok(results) => results,
        Err(why) => {
            eprintln!("demo: {why}");
            return ExitCode::FAILURE;
        }
    };
    show::rounds(&results);
    show::timings(&results);
    show::maps(&results);
    match results.verdict() {
        Ok(verdict) => {
            say!("\n{verdict}\n{:.1} s in total.", began.elapsed().as_secs_f64());
            ExitCode::SUCCESS
        }
        Err(why) => {
            eprintln!("\ndemo: {why}");
            ExitCode::FAILURE
        }
    }
}

/// Runs the ranks and gathers what they report. They are stopped however this ends.
fn collect(options: &Options) -> Result<Results, String> {
    let program = std::env::current_exe().map_err(|error| format!("finding myself: {error}"))?;
    let mut processes = Processes::new(Duration::from_secs(options.limit));
    let command = || {
        let mut command = Command::new(&program);
        command.arg("--rank");
        if options.same_holes {
            command.arg("--same-holes");
        }
        command
    };
    let started = processes.start_ranks(options.ranks, command);
    started.map_err(|error| format!("starting ranks: {error}"))?;
    // Drawn on stderr, and not at all where that is no terminal.
    let bar = ProgressBar::new(Results::expected(options.ranks));
    if let Ok(style) = ProgressStyle::with_template("{msg:32} {bar:40} {pos}/{len}") {
        bar.set_style(style);
    }
    let mut results = Results::new(options.ranks);
    loop {
        let (rank, line) = match processes.next_line() {
            Ok(next) => next,
            Err(End::Done) => break,
            Err(End::Failed(rank, status)) => return Err(format!("rank {rank}: {status}")),
            Err(End::Late) => return Err(format!("not done after {} s", options.limit)),
        };
        let report = serde_json::from_str(&line).map_err(|error| format!("{line:?}: {error}"))?;
        match &report {
            Report::Failed(why) => return Err(why.clone()),
            Report::Round { order, .. } => bar.set_message(format!("tensors, {order:?} order")),
            Report::Timed { op, bytes, .. } => {
                bar.set_message(format!("{op} {}", common::size_name(*bytes)));
            }
            Report::Map { .. } => {}
        }
        bar.inc(1);
        results.add(rank, report);
    }
    bar.finish_and_clear();
    Ok(results)
}
