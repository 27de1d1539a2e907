//! Measures collectives in host memory, and those of MPI and gloo in the same run.
//!
//! Ours works on blocks of a pool, which all ranks have mapped, so no intermediate copies are made: that is what the
//! library is for. Peers work on ordinary memory that was written before, which is what they are made for. Every
//! contender runs all sizes in processes of its own, `--rounds` times, in turns. A time is the median over rounds of
//! the slowest rank's mean. Ranks are not bound to cores; OpenMPI runs both with its launcher's default binding and
//! without, and the better time counts. `--bind` binds the ranks of all contenders to cores, if there are enough.
//! Every element of the results is checked.
//!
//! `cargo run --release -p symmpool-bench --bin bench_host -- --quick`

mod case;
#[path = "../common/mod.rs"]
mod common;
mod contender;
mod matrix;
mod ours;
mod table;

use std::fs;
use std::path::Path;
use std::process::{Child, Command, ExitCode};
use std::time::Duration;

use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};

use case::{BenchCase, BenchedOp};
use common::say;
use contender::{Contender, Effort, Workshop};
use matrix::MatrixKind;
use table::Rounds;

/// All-reduce and all-to-all in host memory, compared with the peers that this machine has.
#[derive(Parser)]
struct Options {
    /// Numbers of ranks.
    #[arg(long, value_delimiter = ',', default_values_t = [2, 4], value_parser = clap::value_parser!(u32).range(1..=64))]
    ranks: Vec<u32>,
    /// Bytes, multiples of 1024. 1 KiB to 64 MiB unless given.
    #[arg(long, value_delimiter = ',')]
    sizes: Vec<usize>,
    /// Operations.
    #[arg(long, value_delimiter = ',', default_values = ["all_reduce", "all_to_all"])]
    op: Vec<BenchedOp>,
    /// Matrices of all_to_all_v.
    #[arg(long, value_delimiter = ',', default_values = ["even", "zipf", "one-hot", "half-empty", "moe"])]
    matrix: Vec<MatrixKind>,
    /// How often each contender is measured.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Measure two rounds, each in a fifth of the time.
    #[arg(long)]
    quick: bool,
    /// Write the results to this file as JSON; `-` is standard output, instead of tables.
    #[arg(long)]
    json: Option<String>,
    /// For how many milliseconds the calls of one size are repeated.
    #[arg(long, default_value_t = 100)]
    target_ms: u64,
    /// Bind every rank of every contender to a core of its own, if there are enough.
    #[arg(long)]
    bind: bool,
    /// How many processes that do nothing but use a core run beside.
    #[arg(long, default_value_t = 0)]
    busy: usize,
    /// This process is a rank, which the environment describes.
    #[arg(long, hide = true)]
    role: Option<ours::Role>,
    /// The cases that the rank measures.
    #[arg(long, hide = true, value_delimiter = ',')]
    cases: Vec<BenchCase>,
}

fn main() -> ExitCode {
    let mut options = Options::parse();
    if let Some(role) = options.role {
        common::end_with_parent();
        let target = Duration::from_millis(options.target_ms);
        if matches!(role, ours::Role::Busy) {
            loop {
                std::hint::spin_loop();
            }
        }
        if options.bind {
            ours::bind();
        }
        return finish(ours::run(role, &options.cases, target).map_err(|error| error.to_string()));
    }
    if options.quick {
        options.rounds = options.rounds.min(2);
        options.target_ms = (options.target_ms / 5).max(1);
    }
    if options.sizes.is_empty() {
        options.sizes = common::sizes();
    }
    finish(compare(&options))
}

fn finish(outcome: Result<(), String>) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("bench_host: {why}");
            ExitCode::FAILURE
        }
    }
}

fn compare(options: &Options) -> Result<(), String> {
    if options.rounds == 0 || options.sizes.iter().any(|bytes| *bytes == 0 || bytes % 1024 != 0) {
        return Err("sizes are multiples of 1024, and rounds at least 1".into());
    }
    if let Some(file) = options.json.as_deref().filter(|file| *file != "-") {
        check_place(Path::new(file))?;
    }
    let workshop = Workshop::new()?;
    let (contenders, missing) = contender::find(&workshop);
    let facts = facts(options, &contenders, &missing);
    let tables = options.json.as_deref() != Some("-");
    for fact in &facts {
        if tables { say!("{fact}") } else { eprintln!("{fact}") }
    }
    let busy = BusyProcesses::start(options.busy)?;
    let rounds = measure(options, &contenders)?;
    drop(busy);
    let rows = table::rows(&rounds);
    if tables {
        table::print(&rows);
    }
    let json = serde_json::to_string_pretty(&rows).map_err(|error| error.to_string())?;
    match options.json.as_deref() {
        None => Ok(()),
        Some("-") => {
            say!("{json}");
            Ok(())
        }
        Some(file) => {
            let facts = serde_json::to_string_pretty(&facts).map_err(|error| error.to_string())?;
            let write = |file: &str, text: &str| {
                fs::write(file, format!("{text}\n")).map_err(|error| format!("{file}: {error}"))
            };
            write(file, &json)?;
            write(&format!("{}.facts.json", file.trim_end_matches(".json")), &facts)
        }
    }
}

/// Processes that use a core each until this is dropped.
struct BusyProcesses(Vec<Child>);

impl BusyProcesses {
    fn start(number: usize) -> Result<Self, String> {
        let failed = |error: std::io::Error| format!("starting a busy process: {error}");
        let own = std::env::current_exe().map_err(failed)?;
        let mut all = Self(Vec::with_capacity(number));
        for _ in 0..number {
            all.0.push(Command::new(&own).args(["--role", "busy"]).spawn().map_err(failed)?);
        }
        Ok(all)
    }
}

impl Drop for BusyProcesses {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Refuses a file that cannot be written, before an hour is spent on its content.
fn check_place(file: &Path) -> Result<(), String> {
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty());
    if folder.is_some_and(|folder| !folder.is_dir()) {
        return Err(format!("{}: there is no such folder", file.display()));
    }
    if file.is_dir() {
        return Err(format!("{} is a folder", file.display()));
    }
    Ok(())
}

/// Measures all rounds of all contenders, in turns. A peer that fails is left out from then on, with a message; if ours
/// fails, that is an error.
fn measure(options: &Options, contenders: &[Contender]) -> Result<Rounds, String> {
    let cases: Vec<BenchCase> = options
        .op
        .iter()
        .flat_map(|op| match op {
            BenchedOp::AllToAllV => options.matrix.iter().map(|kind| (*op, Some(*kind))).collect(),
            BenchedOp::AllReduce | BenchedOp::AllToAll => vec![(*op, None)],
        })
        .flat_map(|(op, matrix)| {
            options.sizes.iter().map(move |bytes| BenchCase { op, matrix, bytes: *bytes })
        })
        .collect();
    let turns = options.rounds * options.ranks.len() * contenders.len();
    let bar = ProgressBar::new((turns * cases.len()) as u64);
    if let Ok(style) = ProgressStyle::with_template("{msg:24} {bar:40} {pos}/{len} {eta}") {
        bar.set_style(style);
    }
    let mut rounds = Rounds::new();
    let mut out = vec![false; contenders.len()];
    for round in 0..options.rounds {
        for &ranks in &options.ranks {
            for turn in 0..contenders.len() {
                // Each round begins with another contender.
                let who = (turn + round) % contenders.len();
                let contender = &contenders[who];
                if out[who] || !contender.suits(ranks, options.bind) {
                    bar.inc(cases.len() as u64);
                    continue;
                }
                bar.set_message(format!("{}, {ranks} ranks", contender.name));
                let mut wrong = None;
                let target = Duration::from_millis(options.target_ms);
                let effort = Effort { target, bind: options.bind && ranks as usize <= cores() };
                let ended = contender.measure(ranks, &cases, effort, |figure| {
                    bar.inc(1);
                    if figure.wrong > 0 {
                        wrong = Some(format!("{} was wrong at {}", contender.name, figure.case));
                    }
                    let all = rounds.entry((ranks, figure.case)).or_default();
                    match all.iter_mut().find(|(index, _, _)| *index == who) {
                        Some((_, _, times)) => times.push(figure.us),
                        None => all.push((who, contender.name, vec![figure.us])),
                    }
                });
                match (ended, wrong) {
                    (Ok(()), None) => {}
                    (Err(why), _) | (_, Some(why)) if contender.name == contender::OURS => {
                        return Err(why);
                    }
                    (Err(why), _) | (_, Some(why)) => {
                        bar.suspend(|| eprintln!("bench_host: {why}; left out from here on"));
                        out[who] = true;
                    }
                }
            }
        }
    }
    bar.finish_and_clear();
    Ok(rounds)
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// Facts about the measurement that a reader of the results has to know.
fn facts(options: &Options, contenders: &[Contender], missing: &[String]) -> Vec<String> {
    let cores = cores();
    let cpu = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpu.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let mut names: Vec<_> = contenders.iter().map(|contender| contender.name).collect();
    names.dedup();
    let mut facts = vec![
        format!("{cores} cores, {}", model.map_or("unknown", |(_, model)| model)),
        format!("load before: {}", load.split(' ').take(3).collect::<Vec<_>>().join(" ")),
        format!("measured: {}", names.join(", ")),
        format!("symmpool's commit: {}", symmpool_collectives::built_from().unwrap_or("not recorded")),
        "symmpool works on blocks of a pool, without copies on the way; its all_to_all is the \
         call\nwith split sizes. Peers work on ordinary memory. gloo is called from Python, which is \
         the way to it."
            .into(),
        format!(
            "{} rounds of about {} ms a size, in turns; medians; every element checked",
            options.rounds, options.target_ms
        ),
    ];
    facts.push(match options.bind {
        true => "every rank bound to a core of its own, where there are enough".into(),
        false => {
            "ranks not bound to cores; OpenMPI also as its launcher binds, the better counts".into()
        }
    });
    facts.extend((options.busy > 0).then(|| format!("beside {} busy processes", options.busy)));
    facts.extend(missing.iter().map(|why| format!("skipped {why}")));
    facts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_that_cannot_be_written_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        for wrong in [folder.path().to_owned(), folder.path().join("absent/x.json")] {
            assert!(check_place(&wrong).unwrap_err().contains("folder"));
        }
        for right in [folder.path().join("x.json"), "x.json".into()] {
            check_place(&right).unwrap();
        }
    }
}
