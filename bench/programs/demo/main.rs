//! Shows what symmpool is for, with four processes on this machine.
//!
//! A tensor program runs over memory whose free blocks are ordered by address, as in most caching allocators,
//! and over a symmpool pool. The former silently adds up the wrong tensors. Then all-reduce and all-to-all are timed
//! and checked, and memory is drawn.
//!
//! `cargo run --release -p symmpool-bench --bin demo`

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

use common::{EndOfLines, Processes, say};
use report::Report;
use results::DemoResults;

/// Silent corruption by address order, and its absence with symmpool.
#[derive(Parser)]
struct Options {
    /// Rank processes to run.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(2..=16))]
    ranks: u32,
    /// Seconds after which the demo is stopped.
    #[arg(long, default_value_t = 120)]
    limit: u64,
    /// Use the same regions in every rank's address space. The order by address is then the same on all ranks, and no
    /// tensor is wrong, which shows that the order is the only cause.
    #[arg(long)]
    same_holes: bool,
    /// This process is a rank, which the environment describes.
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
            "There are {devices} CUDA devices, but this demo runs in host memory; see \
             bench/programs/wrong_sums.py for GPUs."
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

/// Runs the ranks and collects what they report. All of them are stopped however this ends.
fn collect(options: &Options) -> Result<DemoResults, String> {
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
    // The bar is drawn on stderr, if that is a terminal.
    let bar = ProgressBar::new(DemoResults::expected(options.ranks));
    if let Ok(style) = ProgressStyle::with_template("{msg:32} {bar:40} {pos}/{len}") {
        bar.set_style(style);
    }
    let mut results = DemoResults::new(options.ranks);
    loop {
        let (rank, line) = match processes.next_line() {
            Ok(next) => next,
            Err(EndOfLines::Done) => break,
            Err(EndOfLines::Failed(rank, status)) => return Err(format!("rank {rank}: {status}")),
            Err(EndOfLines::Late) => return Err(format!("not done after {} s", options.limit)),
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
