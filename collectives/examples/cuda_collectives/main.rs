//! Checks and times collectives on the devices of this machine.
//!
//! `cuda_collectives check` goes through element types, operations, sizes, alignments, kinds of
//! memory and algorithms, and copies and signals between two ranks, and compares every bit with what
//! the CPU computes. `faults` has ranks differ and stay away, and expects the same typed error in
//! bounded time. `soak` makes many calls of random sizes and algorithms back to back. `bench` times
//! graphs of calls, and `tune` writes which algorithm was the fastest up to which size, as a table of
//! `collectives/tables`. One process a rank, rank r on device r modulo the number of devices.
//!
//! Exits with 0 if everything was right, 1 if not, 2 without CUDA.

mod bench;
mod check;
mod cuda;
mod equal_parts;
mod exchange;
mod exchange_faults;
mod faults;
mod matrix;
mod oracle;
mod row_model;
mod rows;
mod sided;
mod soak;
mod tune;

use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode};
use std::time::{Duration, Instant};

use clap::{Parser, ValueEnum};
use symmpool_allocator::driver::CudaDriver;
use symmpool_allocator::lane::LaneConfig;
use symmpool_allocator::{Deadline, Driver, Error, Group, Pool, Result};

/// The lane of blocks that are no windows.
const ORDINARY: &str = "ordinary";

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Mode {
    Check,
    Faults,
    Soak,
    Bench,
    Tune,
}

#[derive(Clone, Debug, Parser)]
#[command(about = "Checks and times collectives on the devices of this machine")]
struct Options {
    mode: Mode,
    #[arg(long, default_value_t = 2)]
    ranks: u32,
    /// Longest time for all of it, in seconds.
    #[arg(long, default_value_t = 500)]
    limit: u64,
    /// Where to write results as JSON (bench).
    #[arg(long)]
    json: Option<String>,
    /// The table to write into (tune). Rows of other numbers of ranks stay.
    #[arg(long)]
    out: Option<PathBuf>,
    /// Algorithms to time or to check, by name; all that serve a size without it. `check` knows
    /// all_to_all, rows and one_sided as well, `bench` all_to_all and all_to_all_packet, for one.
    #[arg(long, value_delimiter = ',')]
    algorithms: Vec<String>,
    /// Sizes to time, in bytes, from and to; doubling.
    #[arg(long, default_value_t = 1 << 10)]
    min: u64,
    #[arg(long, default_value_t = 256 << 20)]
    max: u64,
    /// Bytes of scratch for two_shot_copy (bench, tune); the default of the library without it.
    #[arg(long)]
    copy_scratch: Option<u64>,
    /// Calls (soak).
    #[arg(long, default_value_t = 100_000)]
    calls: u64,
    /// The seed of whatever is random.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

fn main() -> ExitCode {
    let options = Options::parse();
    if std::env::var_os("RANK").is_some() {
        return match run(&options) {
            Ok(true) => ExitCode::SUCCESS,
            Ok(false) => ExitCode::FAILURE,
            Err(error) => {
                eprintln!("rank {}: {error}", std::env::var("RANK").unwrap_or_default());
                ExitCode::FAILURE
            }
        };
    }
    match CudaDriver::device_count() {
        Ok(devices) => launch(&options, devices),
        Err(error) => {
            eprintln!("no CUDA: {error}");
            ExitCode::from(2)
        }
    }
}

/// Starts a process a rank and waits for them, for a bounded time.
fn launch(options: &Options, devices: u32) -> ExitCode {
    let port = TcpListener::bind("127.0.0.1:0").and_then(|socket| socket.local_addr());
    let port = port.expect("a free port").port();
    let program = std::env::current_exe().expect("this program");
    let start = |rank: u32| {
        Command::new(&program)
            .args(std::env::args().skip(1))
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", options.ranks.to_string())
            .env("LOCAL_RANK", (rank % devices).to_string())
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", port.to_string())
            .spawn()
            .expect("a process")
    };
    let mut ranks: Vec<Child> = (0..options.ranks).map(start).collect();
    let deadline = Instant::now() + Duration::from_secs(options.limit);
    let mut right = true;
    for child in &mut ranks {
        loop {
            match child.try_wait().expect("its state") {
                Some(status) => {
                    right &= status.success();
                    break;
                }
                None if Instant::now() > deadline => {
                    eprintln!("a rank did not end in time");
                    let _ = child.kill();
                    let _ = child.wait();
                    right = false;
                    break;
                }
                None => std::thread::sleep(Duration::from_millis(5)),
            }
        }
    }
    println!("{}", if right { "everything was right" } else { "NOT everything was right" });
    if right { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn run(options: &Options) -> Result<bool> {
    let group = Group::from_env(Deadline::seconds(60))?;
    let shared = CudaDriver::device_count()? < options.ranks;
    let builder = Pool::builder(group)
        .driver(Driver::new(CudaDriver::from_env()?))
        .lane(LaneConfig::symmetric("windows"))
        .lane(LaneConfig::local(ORDINARY));
    let pool = if shared { builder.allow_shared_device() } else { builder }.build()?;
    match options.mode {
        Mode::Check => check::run(&pool, options),
        Mode::Faults => faults::run(&pool),
        Mode::Soak => soak::run(&pool, options),
        Mode::Bench => bench::run(&pool, options),
        Mode::Tune => tune::run(&pool, options),
    }
}

/// The error that there must be.
pub(crate) fn expect_error<T>(result: Result<T>, what: &str) -> Result<Error> {
    match result {
        Ok(_) => Err(Error::invalid_state(format!("{what} succeeded"))),
        Err(error) => Ok(error),
    }
}
