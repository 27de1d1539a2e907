//! The command line.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Parser;
use symmpool_allocator::lane::WindowPolicy;
use symmpool_allocator::trace::{ReplayDriver, ReplayOptions, Unordered};
use symmpool_allocator::{Error, Result};

/// Replays an allocation trace on several ranks, which are threads of this process with a pool each, and compares where
/// they placed every block.
#[derive(Debug, Parser)]
#[command(
    name = "replay",
    after_help = "Exit codes: 0 all ranks placed every block alike; 1 ranks diverged or the replay \
                  failed; 2 the arguments or the trace are invalid (a bad line is named by its number)."
)]
pub(crate) struct Args {
    /// The trace: CSV, plain or gzip, with the header op,id,bytes,stream
    #[arg(long, value_name = "FILE", required_unless_present = "generate")]
    trace: Option<PathBuf>,
    /// Number of ranks
    #[arg(long, value_name = "N", default_value_t = 2)]
    ranks: u32,
    /// Memory: sim (addresses only) or host (memory files, which all ranks map and never access)
    #[arg(long, value_name = "NAME", default_value = "sim")]
    driver: String,
    /// How blocks relate to segments: contiguous or per-segment
    #[arg(long, value_name = "NAME", default_value = "contiguous")]
    policy: String,
    /// Most bytes of physical memory a rank may use
    #[arg(long, value_name = "BYTES")]
    limit: Option<u64>,
    /// Give every rank different addresses
    #[arg(long, value_name = "SEED")]
    permute_addresses: Option<u64>,
    /// Make unordered frees in a different order on every rank
    #[arg(long, value_name = "SEED")]
    shuffle_unordered: Option<u64>,
    /// Make a rank leave out one operation; both are counted from 0
    #[arg(long, value_name = "RANK:EVENT")]
    diverge: Option<String>,
    /// How many events are kept in full, so that a divergence can be reported exactly
    #[arg(long, value_name = "EVENTS", default_value_t = 16384)]
    history: usize,
    /// How long a commit waits for other ranks
    #[arg(long, value_name = "SECONDS", default_value_t = 120)]
    timeout: u64,
    /// Print a JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,
    /// Write a random trace instead of replaying one
    #[arg(long, value_name = "EVENTS:SEED", conflicts_with_all = ["trace", "diverge"])]
    generate: Option<String>,
    /// Where to write the random trace; by default standard output
    #[arg(long, value_name = "FILE", requires = "generate")]
    pub(crate) out: Option<PathBuf>,
}

/// Task that the command line names.
pub(crate) enum Task<'a> {
    Replay { path: &'a Path, options: ReplayOptions },
    Generate { events: usize, seed: u64 },
}

impl Args {
    /// The task that the arguments describe.
    pub(crate) fn task(&self) -> Result<Task<'_>> {
        if let Some(generate) = &self.generate {
            let (events, seed) = pair("--generate", "EVENTS:SEED", generate)?;
            return Ok(Task::Generate { events, seed });
        }
        let path = self.trace.as_deref();
        let path =
            path.ok_or_else(|| Error::invalid_argument("--trace or --generate is needed"))?;
        let diverge = self.diverge.as_deref();
        let options = ReplayOptions {
            driver: ReplayDriver::from_name(&self.driver)?,
            policy: WindowPolicy::from_name(&self.policy)?,
            limit: self.limit,
            address_seed: self.permute_addresses,
            unordered: match self.shuffle_unordered {
                Some(seed) => Unordered::Shuffled { seed },
                None => Unordered::AsTraced,
            },
            diverge: diverge.map(|at| pair("--diverge", "RANK:EVENT", at)).transpose()?,
            history: self.history,
            timeout: Duration::from_secs(self.timeout),
            ..ReplayOptions::new(self.ranks)
        };
        Ok(Task::Replay { path, options })
    }
}

/// Two whole numbers with a colon between them.
fn pair<A: std::str::FromStr, B: std::str::FromStr>(
    name: &str,
    shape: &str,
    text: &str,
) -> Result<(A, B)> {
    let split = text.split_once(':');
    split.and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?))).ok_or_else(|| {
        Error::invalid_argument(format!("{name} {text:?}: expected {shape}, two whole numbers"))
    })
}
