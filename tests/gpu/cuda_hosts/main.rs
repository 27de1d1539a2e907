//! Checks what carries data of GPUs between hosts, on hosts that are pretended.
//!
//! `cuda_hosts transfers [--hosts a,a,b,b]` moves bytes by the outer engines over NCCL. `cuda_hosts collectives` makes calls of
//! communicators that span the hosts, and compares their results, and `cuda_hosts call_faults` has one rank go wrong in them. `cuda_hosts faults` has NCCL fail in each
//! way that the fake one of `tests/emulator` knows, and needs that. Each rank is a process; rank r is on device r modulo the
//! number of devices.
//!
//! Exits with 0 if all checks passed, 1 if not, 2 without CUDA (0 with `--allow-missing`), and 64 for unknown arguments.
//! Every wait is bounded by `--timeout SECONDS`, 60 by default.

mod call_faults;
mod collectives;
mod faults;
mod job;
mod memory;
#[path = "../cuda_collectives/oracle.rs"]
mod oracle;
mod transfers;

use std::process::ExitCode;
use std::time::Duration;

use symmpool_allocator::driver::CudaDriver;

const USAGE: &str = "usage: cuda_hosts transfers|collectives|call_faults|faults [--hosts a,a,b,b] [--timeout SECONDS] [--allow-missing]";

/// The command line's options.
#[derive(Clone, Debug)]
pub(crate) struct HostsOptions {
    what: String,
    /// The host of each rank.
    pub(crate) hosts: Vec<String>,
    pub(crate) timeout: Duration,
    allow_missing: bool,
}

fn parse(mut args: impl Iterator<Item = String>) -> Result<HostsOptions, String> {
    let mut options = HostsOptions {
        what: args.next().ok_or("what is to be checked?")?,
        hosts: ["a", "a", "b", "b"].map(str::to_owned).to_vec(),
        timeout: Duration::from_secs(60),
        allow_missing: false,
    };
    while let Some(name) = args.next() {
        let mut text = || args.next().ok_or(format!("{name} needs a value"));
        match name.as_str() {
            "--hosts" => options.hosts = text()?.split(',').map(str::to_owned).collect(),
            "--timeout" => {
                let seconds = text()?.parse().ok().filter(|seconds| (1..=3600).contains(seconds));
                options.timeout = Duration::from_secs(seconds.ok_or("--timeout: 1 to 3600")?);
            }
            "--allow-missing" => options.allow_missing = true,
            _ => return Err(format!("unknown argument {name}")),
        }
    }
    Ok(options)
}

fn main() -> ExitCode {
    if let Some(rank) = job::RankOfJob::from_env() {
        return rank.run(|rank| match rank.scenario.split_once(':') {
            None if rank.scenario == "collectives" => collectives::run(rank),
            None => transfers::run(rank),
            Some(("call", fault)) => call_faults::run(rank, fault),
            Some((_, fault)) => faults::run(rank, fault),
        });
    }
    let options = match parse(std::env::args().skip(1)) {
        Ok(options) => options,
        Err(error) => {
            eprintln!("cuda_hosts: {error}\n{USAGE}");
            return ExitCode::from(64);
        }
    };
    if !CudaDriver::device_count().is_ok_and(|count| count > 0) {
        eprintln!("skipped: there is no CUDA device");
        return ExitCode::from(if options.allow_missing { 0 } else { 2 });
    }
    let passed = match options.what.as_str() {
        what @ ("transfers" | "collectives") => job::run(&options, what, |_| Vec::new()),
        "faults" => faults::check(&options),
        "call_faults" => call_faults::check(&options),
        other => {
            eprintln!("cuda_hosts: {other}?\n{USAGE}");
            return ExitCode::from(64);
        }
    };
    println!("cuda_hosts {}: {}", options.what, if passed { "passed" } else { "FAILED" });
    ExitCode::from(u8::from(!passed))
}
