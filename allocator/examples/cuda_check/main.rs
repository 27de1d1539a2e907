//! Checks the CUDA driver and the links on the machine it runs on.
//!
//! `cuda_check [--ranks N] [--json FILE]` starts N processes, rank r on device r modulo the number
//! of devices. Each makes segments, hands them to all others, maps theirs in their slots, writes a
//! distinct pattern through every slot, and reads all back. `cuda_check --self-test` goes through
//! one device's life cycle and misuse.
//!
//! Exits with 0 if everything was right, 1 if not, 2 without CUDA (0 with `--allow-missing`), and
//! 64 for arguments it does not know. Every wait ends: `--timeout SECONDS`, 60 by default.

mod hub;
mod rank;
mod selftest;
mod wire;

use std::process::ExitCode;
use std::time::Duration;

use serde_json::{Value, json};
use symmpool_allocator::Deadline;
use symmpool_allocator::driver::CudaDriver;

const USAGE: &str = "usage: cuda_check [--ranks N] [--self-test] [--json FILE] [--timeout SECONDS]
       [--segment-mib N] [--stride-gib N] [--prefer-fabric] [--allow-missing]";

/// What was asked for on the command line.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    pub(crate) ranks: u32,
    pub(crate) timeout: Duration,
    pub(crate) segment_mib: u64,
    pub(crate) stride_gib: u64,
    pub(crate) prefer_fabric: bool,
    self_test: bool,
    allow_missing: bool,
    json: Option<String>,
    /// Set in the processes that this one starts: the rank, and the hub's address.
    child: Option<(u32, String)>,
}

fn parse(mut args: impl Iterator<Item = String>) -> Result<Options, String> {
    let mut options = Options {
        ranks: 2,
        timeout: Duration::from_secs(60),
        segment_mib: 64,
        stride_gib: 256,
        prefer_fabric: false,
        self_test: false,
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
            "--self-test" => options.self_test = true,
            "--allow-missing" => options.allow_missing = true,
            "--json" => options.json = Some(text()?),
            "--child" => {
                let rank = number(0, 63)? as u32;
                options.child = Some((rank, args.next().ok_or("--child needs an address")?));
            }
            _ => return Err(format!("unknown argument {name}")),
        }
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
        return rank::run(*rank, address, &options, deadline);
    }
    let count = match CudaDriver::device_count() {
        Ok(count) if count > 0 => count,
        Ok(_) => return missing(&options, "the CUDA driver finds no device"),
        Err(error) if error.is_unsupported() => return missing(&options, &error.to_string()),
        Err(error) => return finish(&options, &json!({ "ok": false, "error": error.to_string() })),
    };
    let report = if options.self_test {
        watch(options.timeout);
        selftest::run(&options)
    } else {
        hub::run(&options, count, deadline)
    };
    finish(&options, &report)
}

/// Ends this process when time is up: a call into CUDA that never returns cannot be ended
/// otherwise.
fn watch(timeout: Duration) {
    std::thread::spawn(move || {
        std::thread::sleep(timeout + Duration::from_secs(2));
        eprintln!("cuda_check: process {} gave up after {timeout:.0?}", std::process::id());
        std::process::exit(1);
    });
}

fn missing(options: &Options, why: &str) -> ExitCode {
    println!("skipped: {why}");
    write_json(options, &json!({ "ok": options.allow_missing, "skipped": why }));
    ExitCode::from(if options.allow_missing { 0 } else { 2 })
}

fn finish(options: &Options, report: &Value) -> ExitCode {
    let written = write_json(options, report);
    if let Some(error) = report["error"].as_str() {
        println!("FAILED: {error}");
    }
    let ok = report["ok"] == true && written;
    println!("{}", if ok { "everything was right" } else { "something was wrong" });
    ExitCode::from(u8::from(!ok))
}

fn write_json(options: &Options, report: &Value) -> bool {
    let Some(path) = &options.json else { return true };
    match std::fs::write(path, format!("{report:#}\n")) {
        Ok(()) => true,
        Err(error) => {
            eprintln!("cuda_check: writing {path}: {error}");
            false
        }
    }
}
