//! Checks and times collectives on the devices of this machine.
//!
//! - `check` compares every bit of every collective, and of operations between two ranks, with what the CPU
//!   computes, for many element types, operations, sizes, alignments, kinds of memory and algorithms.
//! - `faults` makes ranks call differently, or not at all, and expects the same typed error in bounded time.
//! - `killed` kills the process of a rank in the middle of a call.
//! - `soak` makes many calls of random sizes and algorithms back to back, and replays graphs of calls.
//! - `bench` times graphs of calls.
//! - `families` prints what `check` has, with the tools of compute-sanitizer for each, and needs no device.
//! - `tune` writes which all-reduce was the fastest up to which size, as a table of `collectives/tables`.
//!
//! Each rank is a process, rank r on device r modulo the number of devices.
//!
//! Exits with 0 if everything was right, 1 if not, 2 without CUDA.

mod all_gather_broadcast;
mod all_to_all;
mod all_to_all_faults;
mod bench;
mod call_order;
mod captures;
mod check;
mod cuda;
mod epochs;
mod equal_parts;
mod every_kind;
mod experts;
mod explain;
mod families;
mod faults;
mod first_calls;
mod fused;
mod growth;
mod huge;
mod killed;
mod late;
mod launches;
mod matmul;
mod matmul_gather;
mod matmul_small_m;
mod matrix;
mod measured_barrier;
mod memory_operations;
mod native;
mod one_sided;
mod one_sided_streams;
mod oracle;
mod outside;
mod p2p;
mod p2p_between;
mod p2p_faults;
mod plans;
mod random_calls;
#[path = "../../../collectives/tests/random_plans/mod.rs"]
mod random_plans;
mod reduce_scatter;
mod repeats;
mod slow;
mod soak;
mod streams;
mod tally;
mod tools;
mod tune;
mod two_threads;
mod watched;

use std::collections::BTreeSet;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use clap::{Parser, ValueEnum};
use symmpool_allocator::driver::CudaDriver;
use symmpool_allocator::lane::LaneConfig;
use symmpool_allocator::topology::Topology;
use symmpool_allocator::{Deadline, Driver, Error, Group, Pool, Result};
use symmpool_collectives::CommunicatorOptions;

/// The longest timeout of calls with `--quick`, where tools make kernels slow.
const PATIENCE: Duration = Duration::from_secs(300);
/// Whether this rank's waits for others are to stop, as by Ctrl-C.
static INTERRUPTED: AtomicBool = AtomicBool::new(false);
/// How late an error may be: kernels look at the clock now and then.
const MAX_LATE: Duration = Duration::from_secs(1);
/// The lane whose blocks are no windows.
const ORDINARY: &str = "ordinary";

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Mode {
    Check,
    Faults,
    Killed,
    Soak,
    Bench,
    Tune,
    Families,
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
    /// The table to write into (tune). Its rows for other numbers of ranks are kept.
    #[arg(long)]
    out: Option<PathBuf>,
    /// Algorithms to time, or checks to run, by name; all of them without it.
    ///
    /// Besides all-reduce algorithms, `check` has: all_reduce (by each algorithm of devices), first_calls (of two communicators, in another order on every other
    /// rank), all_to_all, all_gather_broadcast, reduce_scatter, experts, handles (of experts, with
    /// random numbers in them), one_sided, call_order (of calls
    /// on several streams), p2p, plans, odd_plans, random_plans (programs of a seed; only if named) and native
    /// (collectives that programs bring along), fused (all-reduces with a residual and a norm), matmul (products whose parts are added
    /// up, or gathered), matmul_small_m (of few rows), repeats (the same bits in 1,000 calls), streams (several communicators at once), mixed (all-to-alls of long and short parts), slow (consumers
    /// that read late), explain (what communicators say of calls, and what these launch), growth (communicators whose memory grows), epochs (all kinds of calls as their numbers begin anew), threads (two of a rank with one
    /// communicator), and, only if named, huge (more than 2^31 elements). `bench` has all_to_all, one name for each
    /// of its algorithms, such as all_to_all_ll, p2p and p2p_round_trip, all_gather and reduce_scatter, and each of
    /// their algorithms, such as reduce_scatter_copy, fused (a table of its own), and one name for each plan and each
    /// kernel of docs/kernels.md, such as plan_two_shot and native_my_all_gather. `soak` has all_reduce (all
    /// algorithms), all_to_all and graphs. `faults` has all_to_all, p2p, plans, native, late (ranks that come when the
    /// others have given up), outside (ranks that disagree on what is moved) launches (devices without resources) and captures (calls that
    /// are refused while a graph is captured). `killed` has all_reduce,
    /// two_shot_copy, reduce_scatter_copy, all_gather_copy, all_to_all, all_to_all_splits, all_to_all_copy, growth and
    /// captured_growth.
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
    /// How many calls to make (soak).
    #[arg(long, default_value_t = 100_000)]
    calls: u64,
    /// In one of so many calls, every byte is checked on the device (soak).
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u64).range(1..))]
    every: u64,
    /// Fewer calls, but of every kernel with all its branches, and long timeouts: for tools that check
    /// every memory access (check).
    #[arg(long)]
    quick: bool,
    /// The option `concurrent` of communicators, for each rank in turn: it sets the SM budget of the rank's kernels
    /// (check, soak, bench).
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..))]
    concurrent: Vec<u32>,
    /// Communicators take their calls to run beside compute: with few SMs, and large ones in other ways (check, soak,
    /// bench).
    #[arg(long)]
    beside_compute: bool,
    /// Communicators begin with little memory, and take more before their first large call (check, soak, bench).
    #[arg(long)]
    grows: bool,
    /// Another communicator has most SMs all the time, so kernels work with their narrow grids, on all ranks but the first one
    /// (check). Communicators are of two that run at once, or of as many as `--concurrent` says.
    #[arg(long)]
    narrow: bool,
    /// How long calls wait for a peer that does not come, in seconds (faults).
    #[arg(long, default_value_t = 1.5)]
    timeout: f64,
    /// Ranks that share a device run there at the same time, each with a part of the processors
    /// (CUDA_MPS_ACTIVE_THREAD_PERCENTAGE). MPS must run. No check is shortened as it is where ranks take turns.
    #[arg(long)]
    at_once: bool,
    /// Whether ranks share a device.
    #[arg(skip)]
    shared: bool,
    /// Whether devices are emulated. Their links do not tear lines of 128 bytes.
    #[arg(skip)]
    emulated: bool,
    #[arg(skip)]
    rank: u32,
    /// Names among `algorithms` that something has answered to.
    #[arg(skip)]
    known: Arc<Mutex<BTreeSet<String>>>,
    /// The calls that are under way when a rank is killed (set by killed, for its ranks).
    #[arg(long, hide = true)]
    kind: Option<String>,
    /// How many programs to try (random_plans); each rank compiles a kernel for each.
    #[arg(long, default_value_t = 20)]
    programs: u64,
    /// How many kernels each rank compiles at a time (random_plans).
    #[arg(long, default_value_t = 4)]
    compilers: usize,
    /// The seed of all random numbers.
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

    /// The largest size to time.
    fn largest(&self) -> usize {
        self.sizes().into_iter().max().unwrap_or(self.max) as usize
    }

    /// How often something is done: usually, or with --quick.
    fn few(&self, usual: u64, few: u64) -> u64 {
        if self.quick { few } else { usual }
    }

    /// How often something is done: usually, or where it takes long as ranks take turns on a device.
    fn seldom(&self, usual: u64, seldom: u64) -> u64 {
        if self.shared && !self.at_once { seldom } else { self.few(usual, seldom) }
    }

    /// The options of communicators, in checks without failures.
    fn communicator(&self) -> CommunicatorOptions {
        let configured = self.concurrent.iter().cycle().nth(self.rank as usize);
        // There may be several communicators, but their calls run one after the other.
        let concurrent = Some(configured.copied().unwrap_or(if self.narrow { 2 } else { 1 }));
        let usual = CommunicatorOptions {
            concurrent,
            beside_compute: self.beside_compute,
            device_memory_grows: self.grows,
            links: self.links(),
            ..Default::default()
        };
        // Whoever waits in vain says so before the time for all of it is over.
        let timeout = PATIENCE.min(Duration::from_secs(self.limit) / 2);
        if self.quick { CommunicatorOptions { timeout, ..usual } } else { usual }
    }

    /// The links of emulated devices, which keep lines of 128 bytes whole. Those of others are looked up.
    fn links(&self) -> Option<Topology> {
        self.emulated.then(|| Topology::host(self.ranks))
    }

    /// Whether a part of the work was requested by name. Without names, everything is.
    fn wants(&self, name: &str) -> bool {
        self.algorithms.is_empty() || self.names(name)
    }

    /// Whether a part of the work was requested by its own name.
    fn names(&self, name: &str) -> bool {
        let named = self.algorithms.iter().any(|other| other == name);
        if named {
            self.known.lock().unwrap_or_else(PoisonError::into_inner).insert(name.to_owned());
        }
        named
    }

    /// Whether nothing answered to one of the requested names, which is said then: without that, a name with a typing error
    /// would be a check in which everything is right.
    fn has_unknown_names(&self) -> bool {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let unknown: Vec<_> =
            self.algorithms.iter().filter(|name| !known.contains(*name)).collect();
        if !unknown.is_empty() && self.rank == 0 {
            eprintln!(
                "--algorithms: {:?} has nothing of these names: {unknown:?}; see --help",
                self.mode
            );
        }
        !unknown.is_empty()
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
    if options.mode == Mode::Families {
        families::print();
        return ExitCode::SUCCESS;
    }
    if let Some(path) = &options.json {
        // An error is better reported before the measurements than after them.
        if let Err(error) = std::fs::OpenOptions::new().append(true).create(true).open(path) {
            eprintln!("--json {path}: {error}");
            return ExitCode::from(2);
        }
    }
    match CudaDriver::device_count() {
        Ok(devices) => {
            let right = match options.mode {
                Mode::Killed => {
                    let kinds = killed::KINDS.into_iter().filter(|kind| options.wants(kind));
                    // Runs all of them, even if the first one fails.
                    let wrong = kinds.filter(|kind| !launch(&options, devices, &["--kind", kind]));
                    wrong.count() == 0 && !options.has_unknown_names()
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

/// Starts a process for each rank, with more arguments, and waits for them for a bounded time. Says whether each
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
    let running = |ranks: &mut [Child]| -> Vec<usize> {
        let is_running = |child: &mut Child| child.try_wait().expect("its state").is_none();
        let all = ranks.iter_mut().enumerate();
        all.filter_map(|(rank, child)| is_running(child).then_some(rank)).collect()
    };
    while !running(&mut ranks).is_empty() && Instant::now() <= deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    // All of them are named before the first one is killed: others that share its device report that as a fault of their own
    // kernels.
    let late = running(&mut ranks);
    if !late.is_empty() {
        eprintln!("ranks {late:?} did not end in {} s", options.limit);
    }
    for (rank, child) in ranks.iter_mut().enumerate() {
        if late.contains(&rank) {
            let _ = child.kill();
        }
        let status = child.wait().expect("its state");
        let is_right =
            if killed == Some(rank) { killed::was_killed(status) } else { status.success() };
        if status.code().is_none() && killed != Some(rank) && !late.contains(&rank) {
            eprintln!("rank {rank}: its process ended by {status}");
        }
        right &= is_right && !late.contains(&rank);
    }
    right
}

fn run(options: &mut Options) -> Result<bool> {
    let stops = || INTERRUPTED.load(Ordering::Relaxed);
    let group = Group::from_env(Deadline::seconds(60))?.with_interrupt(stops);
    options.rank = group.rank();
    options.shared = CudaDriver::device_count()? < options.ranks;
    let builder = Pool::builder(group)
        .driver(Driver::new(CudaDriver::from_env()?))
        .lane(LaneConfig::symmetric("windows"))
        .lane(LaneConfig::local(ORDINARY));
    let pool = if options.shared { builder.allow_shared_device() } else { builder }.build()?;
    options.emulated = pool.device(0)?.name == "emulated device";
    match options.mode {
        Mode::Check => Ok(check::run(&pool, options)? && !options.has_unknown_names()),
        Mode::Faults => Ok(faults::run(&pool, options)? && !options.has_unknown_names()),
        Mode::Killed => killed::run(&pool, options),
        Mode::Soak => Ok(soak::run(&pool, options)? && !options.has_unknown_names()),
        Mode::Bench => bench::run(&pool, options),
        Mode::Tune => tune::run(&pool, options),
        // `main` has printed them.
        Mode::Families => Ok(true),
    }
}

/// The error of a call that must fail.
pub(crate) fn expect_error<T>(result: Result<T>, what: &str) -> Result<Error> {
    match result {
        Ok(_) => Err(Error::invalid_state(format!("{what} succeeded"))),
        Err(error) => Ok(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_nothing_answers_to_are_found() {
        let parse =
            |names| Options::parse_from(["cuda_collectives", "check", "--algorithms", names]);
        let options = parse("one_shot_ll,one_shot_l1");
        assert!(options.wants("one_shot_ll") && !options.wants("two_shot_ll"));
        assert!(options.has_unknown_names());
        let options = parse("one_shot_ll,p2p");
        assert!(options.has_unknown_names(), "nobody has asked for them");
        assert!(options.wants("p2p") && options.names("one_shot_ll"));
        assert!(!options.has_unknown_names());
        let everything = Options::parse_from(["cuda_collectives", "check"]);
        assert!(everything.wants("p2p") && !everything.names("p2p"));
        assert!(!everything.has_unknown_names());
    }
}
