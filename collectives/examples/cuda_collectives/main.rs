//! Checks and times collectives on the devices of this machine.
//!
//! `cuda_collectives check` goes through element types, operations, sizes, alignments, kinds of
//! memory and algorithms, and copies and signals between two ranks, and compares every bit with what
//! the CPU computes. `faults` has ranks differ and stay away, and expects the same typed error in
//! bounded time; in `killed` a rank's process is killed in the middle of an exchange. `soak` makes many calls of random sizes and algorithms back to back, all-to-alls with
//! new splits and replays of graphs among them. `bench` times graphs of calls, and `tune` writes which algorithm was the fastest up to which size, as a table of
//! `collectives/tables`. One process a rank, rank r on device r modulo the number of devices.
//!
//! Exits with 0 if everything was right, 1 if not, 2 without CUDA.

mod all_gather_broadcast;
mod all_to_all;
mod all_to_all_faults;
mod bench;
mod check;
mod cuda;
mod equal_parts;
mod faults;
mod first_calls;
mod huge;
mod killed;
mod late;
mod matrix;
mod one_sided;
mod one_sided_streams;
mod oracle;
mod outside;
mod p2p;
mod p2p_faults;
mod repeats;
mod row_exchange;
mod row_model;
mod slow;
mod soak;
mod streams;
mod tools;
mod tune;

use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode};
use std::time::{Duration, Instant};

use clap::{Parser, ValueEnum};
use symmpool_allocator::driver::CudaDriver;
use symmpool_allocator::lane::LaneConfig;
use symmpool_allocator::topology::Topology;
use symmpool_allocator::{Deadline, Driver, Error, Group, Pool, Result};
use symmpool_collectives::CommunicatorOptions;

/// Longest wait for a rank that something slows down.
const PATIENCE: Duration = Duration::from_secs(300);
/// The lane of blocks that are no windows.
const ORDINARY: &str = "ordinary";

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Mode {
    Check,
    Faults,
    Killed,
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
    /// first_calls (of two communicators, in another order on every other rank), all_to_all, spread (all-gathers and broadcasts), rows, one_sided, p2p (messages between two ranks), repeats (the same bits in 1,000
    /// calls), streams (several communicators at once), mixed (all-to-alls of long and short parts) and slow
    /// (consumers) as well, and, only if named, huge (more than 2^31 elements); `bench` all_to_all and all_to_all_ll, for one, p2p and
    /// p2p_round_trip; `soak` all_reduce
    /// (all of them), all_to_all and graphs; `faults` all_to_all, p2p, late (ranks that come when the others
    /// have given up) and outside (ranks that disagree on what is moved); `killed` all_reduce, two_shot_copy, all_to_all, all_to_all_splits and all_to_all_copy.
    #[arg(long, value_delimiter = ',')]
    algorithms: Vec<String>,
    /// Sizes to time, in bytes (bench, tune); without them from --min to --max, doubling.
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u64).range(1..))]
    sizes: Vec<u64>,
    /// Reduces in place (bench).
    #[arg(long)]
    in_place: bool,
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
    /// One call of so many is checked, every byte of it, on the device (soak).
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u64).range(1..))]
    every: u64,
    /// Few calls, but of every kernel and of every way through it, and long waits: for tools that look
    /// at every access (check).
    #[arg(long)]
    quick: bool,
    /// How many communicators are said to be at work at once, of ranks in turn: what a rank's kernels take
    /// of its device follows from it (check, soak, bench).
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..))]
    concurrent: Vec<u32>,
    /// How long calls wait for a peer that does not come, in seconds (faults).
    #[arg(long, default_value_t = 1.5)]
    timeout: f64,
    /// Ranks that share a device are there at once, as under MPS, which must run, each with its part of the
    /// processors (CUDA_MPS_ACTIVE_THREAD_PERCENTAGE): nothing is done less often for taking turns.
    #[arg(long)]
    at_once: bool,
    /// Whether ranks share a device.
    #[arg(skip)]
    shared: bool,
    /// Whether devices are emulated: what joins them tears nothing.
    #[arg(skip)]
    emulated: bool,
    #[arg(skip)]
    rank: u32,
    /// What is under way when a rank is killed (set by killed, for its ranks).
    #[arg(long, hide = true)]
    kind: Option<String>,
    /// The seed of whatever is random.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

impl Options {
    /// The sizes to time, in bytes.
    fn sizes(&self) -> Vec<u64> {
        if !self.sizes.is_empty() {
            return self.sizes.clone();
        }
        let doubling = std::iter::successors(Some(self.min), |bytes| bytes.checked_mul(2));
        doubling.take_while(|bytes| *bytes <= self.max).collect()
    }

    /// The largest of them.
    fn largest(&self) -> usize {
        self.sizes().into_iter().max().unwrap_or(self.max) as usize
    }

    /// How often something is done: as a rule, or with --quick.
    fn few(&self, usual: u64, few: u64) -> u64 {
        if self.quick { few } else { usual }
    }

    /// How often something is done that takes long where ranks take turns on a device.
    fn seldom(&self, usual: u64, seldom: u64) -> u64 {
        if self.shared && !self.at_once { seldom } else { self.few(usual, seldom) }
    }

    /// How communicators are made where nothing is meant to go wrong.
    fn communicator(&self) -> CommunicatorOptions {
        let told = self.concurrent.iter().cycle().nth(self.rank as usize);
        // There may be several here, but their calls come one after the other.
        let concurrent = Some(told.copied().unwrap_or(1));
        let links = self.emulated.then(|| Topology::host(self.ranks));
        let usual = CommunicatorOptions { concurrent, links, ..Default::default() };
        if self.quick { CommunicatorOptions { timeout: PATIENCE, ..usual } } else { usual }
    }

    /// Whether a part of the work is asked for: everything is, without names.
    fn asks(&self, name: &str) -> bool {
        self.algorithms.is_empty() || self.algorithms.iter().any(|other| other == name)
    }
}

fn main() -> ExitCode {
    let mut options = Options::parse();
    if std::env::var_os("RANK").is_some() {
        return match run(&mut options) {
            Ok(true) => ExitCode::SUCCESS,
            Ok(false) => ExitCode::FAILURE,
            Err(error) => {
                eprintln!("rank {}: {error}", std::env::var("RANK").unwrap_or_default());
                ExitCode::FAILURE
            }
        };
    }
    if let Some(path) = &options.json {
        // After the measurements would be late to hear that it cannot be.
        if let Err(error) = std::fs::OpenOptions::new().append(true).create(true).open(path) {
            eprintln!("--json {path}: {error}");
            return ExitCode::from(2);
        }
    }
    match CudaDriver::device_count() {
        Ok(devices) => {
            let right = match options.mode {
                Mode::Killed => {
                    let kinds = killed::KINDS.into_iter().filter(|kind| options.asks(kind));
                    // All of them, whatever comes of the first.
                    let wrong = kinds.filter(|kind| !launch(&options, devices, &["--kind", kind]));
                    wrong.count() == 0
                }
                _ => launch(&options, devices, &[]),
            };
            println!("{}", if right { "everything was right" } else { "NOT everything was right" });
            if right { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Err(error) => {
            eprintln!("no CUDA: {error}");
            ExitCode::from(2)
        }
    }
}

/// Starts a process a rank, with more arguments, and waits for them, for a bounded time. Whether each
/// ended as it should.
fn launch(options: &Options, devices: u32, more: &[&str]) -> bool {
    let port = TcpListener::bind("127.0.0.1:0").and_then(|socket| socket.local_addr());
    let port = port.expect("a free port").port();
    let program = std::env::current_exe().expect("this program");
    let start = |rank: u32| {
        Command::new(&program)
            .args(std::env::args().skip(1))
            .args(more)
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
    let killed = (options.mode == Mode::Killed).then_some(ranks.len() - 1);
    for (rank, child) in ranks.iter_mut().enumerate() {
        loop {
            match child.try_wait().expect("its state") {
                Some(status) => {
                    let was_killed = killed::was_killed(status);
                    right &= if killed == Some(rank) { was_killed } else { status.success() };
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
    right
}

fn run(options: &mut Options) -> Result<bool> {
    let group = Group::from_env(Deadline::seconds(60))?;
    options.rank = group.rank();
    options.shared = CudaDriver::device_count()? < options.ranks;
    let builder = Pool::builder(group)
        .driver(Driver::new(CudaDriver::from_env()?))
        .lane(LaneConfig::symmetric("windows"))
        .lane(LaneConfig::local(ORDINARY));
    let pool = if options.shared { builder.allow_shared_device() } else { builder }.build()?;
    options.emulated = pool.device(0)?.name == "emulated device";
    match options.mode {
        Mode::Check => check::run(&pool, options),
        Mode::Faults => faults::run(&pool, options),
        Mode::Killed => killed::run(&pool, options),
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
