//! The libraries that are measured: this one, and the peers that the machine has.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::case::{BenchCase, Figure};
use crate::common::{EndOfLines, Processes};

const MPI_SOURCE: &str = include_str!("peers/mpi.c");
const GLOO_SOURCE: &str = include_str!("peers/gloo.py");

/// A library, or one way to run it. Of several ways with the same name, the best time counts.
pub(crate) struct Contender {
    pub(crate) name: &'static str,
    how: How,
}

enum How {
    /// This program itself, in this role.
    Own(&'static str),
    /// A program that a launcher starts with these arguments.
    Mpi { launcher: PathBuf, arguments: Vec<&'static str>, program: PathBuf },
    /// A script, with one process for each rank.
    Script { python: PathBuf, script: PathBuf },
}

/// A folder of files that peers need, which is removed when this is dropped.
pub(crate) struct Workshop(PathBuf);

impl Workshop {
    pub(crate) fn new() -> Result<Self, String> {
        let path = std::env::temp_dir().join(format!("bench_host-{}", std::process::id()));
        fs::create_dir(&path).map_err(|error| format!("making {}: {error}", path.display()))?;
        Ok(Self(path))
    }

    fn file(&self, name: &str, text: &str) -> Result<PathBuf, String> {
        let path = self.0.join(name);
        fs::write(&path, text).map_err(|error| format!("writing {}: {error}", path.display()))?;
        Ok(path)
    }
}

impl Drop for Workshop {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

pub(crate) const OURS: &str = "symmpool";
pub(crate) const MEMCPY: &str = "memcpy";

/// The contenders that can be measured here, ours first, and why others cannot.
pub(crate) fn find(workshop: &Workshop) -> (Vec<Contender>, Vec<String>) {
    let mut found = vec![
        Contender { name: OURS, how: How::Own("collectives") },
        Contender { name: MEMCPY, how: How::Own("memcpy") },
    ];
    let mut missing = Vec::new();
    // OpenMPI's launcher binds two ranks to cores and more ranks to sockets, which does not suit every machine.
    let openmpi: &[&[&str]] = &[
        &["--allow-run-as-root", "--oversubscribe"],
        &["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"],
        &["--allow-run-as-root", "--oversubscribe", "--mca", "mpi_yield_when_idle", "1"],
    ];
    for (name, suffix, ways) in [("OpenMPI", "openmpi", openmpi), ("MPICH", "mpich", &[&[]])] {
        match mpi(workshop, suffix) {
            Ok((launcher, program)) => found.extend(ways.iter().map(|arguments| {
                let (launcher, program) = (launcher.clone(), program.clone());
                Contender {
                    name,
                    how: How::Mpi { launcher, arguments: arguments.to_vec(), program },
                }
            })),
            Err(why) => missing.push(format!("{name}: {why}")),
        }
    }
    match gloo(workshop) {
        Ok(how) => found.push(Contender { name: "gloo", how }),
        Err(why) => missing.push(format!("gloo: {why}")),
    }
    (found, missing)
}

fn mpi(workshop: &Workshop, suffix: &str) -> Result<(PathBuf, PathBuf), String> {
    let compiler = on_path(&format!("mpicc.{suffix}"))?;
    let launcher = on_path(&format!("mpirun.{suffix}"))?;
    let source = workshop.file("mpi.c", MPI_SOURCE)?;
    let program = workshop.0.join(format!("mpi-{suffix}"));
    let compiled =
        Command::new(&compiler).arg("-O3").arg("-o").arg(&program).arg(&source).arg("-lm").output();
    match compiled {
        Ok(output) if output.status.success() => Ok((launcher, program)),
        Ok(output) => Err(format!(
            "{} failed: {}",
            compiler.display(),
            String::from_utf8_lossy(&output.stderr).lines().next().unwrap_or("")
        )),
        Err(error) => Err(format!("{}: {error}", compiler.display())),
    }
}

fn gloo(workshop: &Workshop) -> Result<How, String> {
    let python = std::env::var_os("SYMMPOOL_PYTHON").unwrap_or_else(|| "python3".into());
    let check = "import numpy, torch.distributed as d; assert d.is_gloo_available()";
    let usable = Command::new(&python).args(["-c", check]).stderr(Stdio::null()).status();
    if !usable.is_ok_and(|status| status.success()) {
        let python = Path::new(&python).display();
        return Err(format!("{python} has no torch with gloo; $SYMMPOOL_PYTHON names another"));
    }
    Ok(How::Script { python: python.into(), script: workshop.file("gloo.py", GLOO_SOURCE)? })
}

fn on_path(name: &str) -> Result<PathBuf, String> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).map(|at| at.join(name)).find(|at| at.is_file());
    found.ok_or_else(|| format!("{name} is not installed"))
}

/// How a round is measured.
#[derive(Clone, Copy)]
pub(crate) struct Effort {
    /// About how long the calls of one case are repeated.
    pub(crate) target: Duration,
    /// Whether every rank gets a core of its own.
    pub(crate) bind: bool,
}

impl Contender {
    /// Whether this way of running makes sense for this number of ranks: yielding the core is for ranks that share
    /// cores, and running without binding is for runs in which ranks are not bound.
    pub(crate) fn suits(&self, ranks: u32, bind: bool) -> bool {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        match &self.how {
            How::Mpi { arguments, .. } if arguments.contains(&"mpi_yield_when_idle") => {
                ranks as usize > cores
            }
            How::Mpi { arguments, .. } if arguments.contains(&"--bind-to") => !bind,
            _ => true,
        }
    }

    /// Measures one round: all cases, in processes of their own.
    pub(crate) fn measure(
        &self,
        ranks: u32,
        cases: &[BenchCase],
        Effort { target, bind }: Effort,
        mut on_figure: impl FnMut(Figure),
    ) -> Result<(), String> {
        let texts: Vec<String> = cases.iter().map(ToString::to_string).collect();
        let with_counts: Vec<String> = cases.iter().map(|case| case.with_counts(ranks)).collect();
        let target_ms = target.as_millis().to_string();
        let mut processes =
            Processes::new(Duration::from_secs(60) + target * 40 * texts.len() as u32);
        let started = match &self.how {
            How::Own(role) => {
                let own = std::env::current_exe().map_err(|error| error.to_string())?;
                processes.start_ranks(ranks, || {
                    let mut command = Command::new(&own);
                    command.args(["--role", role, "--target-ms", &target_ms, "--cases"]);
                    command.arg(texts.join(","));
                    command.args(bind.then_some("--bind"));
                    command
                })
            }
            How::Script { python, script } => processes.start_ranks(ranks, || {
                let mut command = Command::new(python);
                command.arg(script).arg(&target_ms).args(&with_counts).stderr(Stdio::null());
                if bind {
                    command.env("BENCH_BIND", "1");
                }
                command
            }),
            How::Mpi { launcher, arguments, program } => {
                let mut command = Command::new(launcher);
                command.args(arguments);
                if bind {
                    // Both launchers have this option.
                    command.args(["-bind-to", "core"]);
                }
                command.args(["-n", &ranks.to_string()]).arg(program);
                command.arg(&target_ms).args(&with_counts).stderr(Stdio::null());
                processes.start(&mut command)
            }
        };
        started.map_err(|error| format!("starting {}: {error}", self.name))?;
        loop {
            match processes.next_line() {
                Ok((_, line)) => {
                    if let Some(figure) = Figure::parse(&line) {
                        on_figure(figure);
                    }
                }
                Err(EndOfLines::Done) => return Ok(()),
                Err(EndOfLines::Failed(process, status)) => {
                    return Err(format!("{}, process {process}: {status}", self.name));
                }
                Err(EndOfLines::Late) => return Err(format!("{}: not done in time", self.name)),
            }
        }
    }
}
