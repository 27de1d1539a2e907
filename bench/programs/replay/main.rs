//! Replays an allocation trace on several ranks in this process, and reports whether all of them placed every block
//! alike.
//!
//! ```text
//! cargo run --release -p symmpool-bench --bin replay -- --trace T.csv.gz --ranks 8
//! ```
//!
//! `symmpool_allocator::trace` does the work; this program has arguments, progress and output.

mod args;
mod output;
mod progress;
#[cfg(test)]
mod tests;

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

use clap::Parser;
use symmpool_allocator::trace::{Trace, replay_with};
use symmpool_allocator::{Error, Result};

use args::{Args, Task};
use progress::ReplayProgress;

/// All ranks placed every block alike.
const FINE: u8 = 0;
/// Ranks diverged, or the replay failed otherwise.
const FAILED: u8 = 1;
/// The arguments or the trace are invalid, or the trace cannot be read.
const USAGE: u8 = 2;

fn main() -> ExitCode {
    let args = match Args::try_parse() {
        Ok(args) => args,
        Err(error) => {
            // --help and --version end here too, and are no errors.
            let _ = error.print();
            return ExitCode::from(if error.use_stderr() { USAGE } else { FINE });
        }
    };
    let code = run(&args, &mut io::stdout().lock()).unwrap_or_else(|error| {
        eprintln!("{error}");
        USAGE
    });
    ExitCode::from(code)
}

/// Runs the task of the arguments and writes its output to `out`. An error means that the arguments or the trace are
/// invalid.
fn run(args: &Args, out: &mut dyn Write) -> Result<u8> {
    match args.task()? {
        Task::Generate { events, seed } => {
            let trace = Trace::synthetic(events, seed);
            let written = match &args.out {
                Some(path) => save(&trace, path),
                None => trace.write(out),
            };
            Ok(written.map_or_else(|error| failed(&error), |()| FINE))
        }
        Task::Replay { path, options } => {
            let trace = Trace::open(path)?;
            let progress = ReplayProgress::new(trace.ops().len() as u64);
            let outcome = replay_with(&trace, &options, &|done| progress.set(done));
            progress.finish();
            let outcome = match outcome {
                Ok(outcome) => outcome,
                Err(error) if error.is_invalid_argument() => return Err(error),
                Err(error) => return Ok(failed(&error)),
            };
            let text = if args.json { output::json(&outcome) } else { output::table(&outcome) };
            if let Err(error) = writeln!(out, "{text}") {
                return Ok(failed(&Error::system("writing the result", error)));
            }
            let fine = outcome.digests_equal && outcome.error.is_none();
            Ok(if fine { FINE } else { FAILED })
        }
    }
}

fn save(trace: &Trace, path: &Path) -> Result<()> {
    let file = File::create(path)
        .map_err(|error| Error::system(format!("creating {}", path.display()), error))?;
    trace.write(file)
}

fn failed(error: &Error) -> u8 {
    eprintln!("{error}");
    FAILED
}
