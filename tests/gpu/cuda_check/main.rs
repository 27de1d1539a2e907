//! Checks the CUDA driver and the links on the machine it runs on.
//!
//! `cuda_check [--ranks N] [--json FILE]` starts N processes, rank r on device r modulo the number
//! of devices. Each makes segments, sends their handles to all others, maps the others' segments in their
//! slots, writes a distinct pattern through every slot, and reads all back. `cuda_check --self-test` tests
//! one device's life cycle and misuse, and `cuda_check --conformance` runs the suite that every driver must
//! pass. `cuda_check --pool [--ranks N]` does the exchange with pools: many allocations, commits, and
//! errors that must be the same on all ranks. The last two take `--driver host` too.
//!
//! Exits with 0 if all checks passed, 1 if not, 2 without CUDA (0 with `--allow-missing`), and 64 for
//! unknown arguments. Every wait is bounded by `--timeout SECONDS`, 60 by default.

mod conformance;
mod hub;
mod pool;
mod rank;
mod selftest;
mod wire;

use std::process::ExitCode;
use std::time::Duration;

use serde_json::{Value, json};
use symmpool_allocator::driver::CudaDriver;
use symmpool_allocator::{Deadline, Error};

const USAGE: &str =
    "usage: cuda_check [--self-test | --conformance | --pool] [--ranks N] [--driver cuda|host]
       [--json FILE] [--timeout SECONDS] [--segment-mib N] [--stride-gib N] [--prefer-fabric]
       [--allow-missing]";

/// Which checks are run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Exchange,
    SelfTest,
    Conformance,
    Pool,
}

/// Which driver is checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CheckedDriver {
    Cuda,
    Host,
}

impl CheckedDriver {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Cuda => "cuda",
            Self::Host => "host",
        }
    }
}

/// The command line's options.
#[derive(Clone, Debug)]
pub(crate) struct CheckOptions {
    pub(crate) ranks: u32,
    pub(crate) timeout: Duration,
    pub(crate) segment_mib: u64,
    pub(crate) stride_gib: u64,
    pub(crate) prefer_fabric: bool,
    pub(crate) driver: CheckedDriver,
    mode: Mode,
    allow_missing: bool,
    json: Option<String>,
    /// Set in the processes that this one starts: the rank, and the hub's address.
    child: Option<(u32, String)>,
}

fn parse(mut args: impl Iterator<Item = String>) -> Result<CheckOptions, String> {
    let mut options = CheckOptions {
        ranks: 2,
        timeout: Duration::from_secs(60),
        segment_mib: 64,
        stride_gib: 256,
        prefer_fabric: false,
        driver: CheckedDriver::Cuda,
        mode: Mode::Exchange,
        allow_missing: false,
        json: None,
        child: None,
    };
    while let Some(name) = args.next() {
        let mut text = || args.next().ok_or(format!("{name} needs a value"));
        let mut number = |least: u64, most: u64| -> Result<u64, String> {
            let text = text()?;
            text.parse()
                .ok()
                .filter(|n| (least..=most).contains(n))
                .ok_or(format!("{name} {text}: from {least} to {most}"))
        };
        match name.as_str() {
            "--ranks" => options.ranks = number(1, 64)? as u32,
            "--timeout" => options.timeout = Duration::from_secs(number(1, 3600)?),
            "--segment-mib" => options.segment_mib = number(2, 1 << 14)?,
            "--stride-gib" => options.stride_gib = number(1, 4096)?,
            "--prefer-fabric" => options.prefer_fabric = true,
            "--self-test" => options.mode = Mode::SelfTest,
            "--conformance" => options.mode = Mode::Conformance,
            "--pool" => options.mode = Mode::Pool,
            "--driver" => {
                options.driver = match text()?.as_str() {
                    "cuda" => CheckedDriver::Cuda,
                    "host" => CheckedDriver::Host,
                    other => return Err(format!("--driver {other}: cuda or host")),
                }
            }
            "--allow-missing" => options.allow_missing = true,
            "--json" => options.json = Some(text()?),
            "--child" => {
                let rank = number(0, 63)? as u32;
                options.child = Some((rank, args.next().ok_or("--child needs an address")?));
            }
            _ => return Err(format!("unknown argument {name}")),
        }
    }
    if options.driver == CheckedDriver::Host
        && matches!(options.mode, Mode::Exchange | Mode::SelfTest)
    {
        return Err("--driver host goes with --pool and --conformance".to_owned());
    }
    Ok(options)
}

fn main() -> ExitCode {
    let options = match parse(std::env::args().skip(1)) {
        Ok(options) => options,
        Err(error) => {
            eprintln!("cuda_check: {error}\n{USAGE}");
            return ExitCode::from(64);
        }
    };
    let deadline = Deadline::after(options.timeout);
    if let Some((rank, address)) = &options.child {
        watch(options.timeout);
        return match options.mode {
            Mode::Pool => pool::run_rank(*rank, address, &options, deadline),
            _ => rank::run(*rank, address, &options, deadline),
        };
    }
    let devices = match options.driver {
        CheckedDriver::Host => Ok(0),
        CheckedDriver::Cuda => CudaDriver::device_count(),
    };
    let count = match devices {
        Ok(0) if options.driver == CheckedDriver::Cuda => {
            return missing(&options, "the CUDA driver finds no device");
        }
        Ok(count) => count,
        Err(error) if error.is_unsupported() => return missing(&options, &error.to_string()),
        Err(error) => return finish(&options, &json!({ "ok": false, "error": error.to_string() })),
    };
    let report = match options.mode {
        Mode::Exchange => hub::run(&options, count, deadline),
        Mode::Pool => pool::run(&options, deadline),
        Mode::SelfTest => {
            watch(options.timeout);
            selftest::run(&options)
        }
        Mode::Conformance => {
            watch(options.timeout);
            conformance::run(&options)
        }
    };
    finish(&options, &report)
}

/// Ends this process when its time is up. A call into CUDA that never returns cannot be ended otherwise.
fn watch(timeout: Duration) {
    std::thread::spawn(move || {
        std::thread::sleep(timeout + Duration::from_secs(2));
        eprintln!("cuda_check: process {} gave up after {timeout:.0?}", std::process::id());
        std::process::exit(1);
    });
}

fn missing(options: &CheckOptions, why: &str) -> ExitCode {
    println!("skipped: {why}");
    write_json(options, &json!({ "ok": options.allow_missing, "skipped": why }));
    ExitCode::from(if options.allow_missing { 0 } else { 2 })
}

fn finish(options: &CheckOptions, report: &Value) -> ExitCode {
    let written = write_json(options, report);
    if let Some(error) = report["error"].as_str() {
        println!("FAILED: {error}");
    }
    let ok = report["ok"] == true && written;
    println!("{}", if ok { "everything was right" } else { "something was wrong" });
    ExitCode::from(u8::from(!ok))
}

fn write_json(options: &CheckOptions, report: &Value) -> bool {
    let Some(path) = &options.json else { return true };
    match std::fs::write(path, format!("{report:#}\n")) {
        Ok(()) => true,
        Err(error) => {
            eprintln!("cuda_check: writing {path}: {error}");
            false
        }
    }
}

#[allow(clippy::needless_pass_by_value)] // `map_err` passes the error by value.
pub(crate) fn text(error: Error) -> String {
    error.to_string()
}
