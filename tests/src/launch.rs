//! Ranks that are processes: the test's program starts itself again once for each.
//!
//! A test binary has one entry, a test function that returns at once unless [`Seat::from_env`]
//! finds a seat for it. [`Job::run`] runs that function in one process a rank, hears what they
//! say, and returns when all but the silent ones have ended; these, and whatever is late, are
//! killed by process id. No process outlives the call, also when it panics.
//!
//! [`Seat::from_env`]: crate::rank_process::Seat::from_env

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use symmpool_allocator::store::TcpServer;
use symmpool_allocator::store::tcp::TcpOptions;

/// Begins each line that a rank says to the test; everything else on its output is ignored.
pub(crate) const MARK: &str = "@rank ";

/// Who serves the store that the ranks meet in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Host {
    /// The test itself, which no rank's death touches.
    Test,
    /// Rank 0, as under a launcher: its death takes the store along.
    RankZero,
}

/// Ranks to be run.
#[derive(Clone, Debug)]
pub struct Job {
    /// The test function to run in each process, as the test harness names it.
    pub entry: &'static str,
    /// What the ranks shall do; [`Seat::scenario`](crate::rank_process::Seat::scenario) there.
    pub scenario: String,
    /// How many ranks.
    pub world: u32,
    /// Who serves the store.
    pub host: Host,
    /// A fault plan (see `FaultPlan::parse`) for this rank.
    pub fault: Option<(u32, String)>,
    /// Ranks that do not end by themselves.
    pub silent: Vec<u32>,
    /// When ranks that are not silent must have ended.
    pub limit: Duration,
}

/// What became of one rank.
#[derive(Clone, Debug)]
pub struct Report {
    /// Its number.
    pub rank: u32,
    /// How it ended.
    pub status: ExitStatus,
    /// What it said, by key; the last value where a key was said twice.
    pub said: BTreeMap<String, String>,
}

impl Report {
    /// What the rank said under `key`.
    pub fn get(&self, key: &str) -> Option<&str> {
        self.said.get(key).map(String::as_str)
    }

    /// What the rank said under `key`, which it must have.
    pub fn said(&self, key: &str) -> &str {
        self.get(key).unwrap_or_else(|| panic!("rank {} did not say {key:?}: {self:?}", self.rank))
    }

    /// Whether the process was ended by `SIGKILL`.
    pub fn was_killed(&self) -> bool {
        self.status.signal() == Some(9)
    }
}

/// A process that is killed and reaped when its owner goes, whatever the reason.
struct Rank {
    child: Child,
    stdin: Option<ChildStdin>,
    reader: Option<JoinHandle<()>>,
}

impl Drop for Rank {
    fn drop(&mut self) {
        // An error means that it has ended, or was reaped before.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }
}

enum Heard {
    Said(String, String),
    Ended,
}

impl Job {
    /// A job of healthy ranks with the store served by the test and a minute to do it in.
    pub fn new(entry: &'static str, scenario: impl Into<String>, world: u32) -> Self {
        Self {
            entry,
            scenario: scenario.into(),
            world,
            host: Host::Test,
            fault: None,
            silent: Vec::new(),
            limit: Duration::from_secs(60),
        }
    }

    /// Runs the ranks and returns what became of each, in rank order. Panics, after ending all of
    /// them, when one that is not silent has not ended within the limit.
    pub fn run(&self) -> Vec<Report> {
        let server = (self.host == Host::Test)
            .then(|| TcpServer::bind("127.0.0.1:0", TcpOptions::default()).expect("a free port"));
        let (sender, heard) = channel();
        let mut ranks: Vec<Rank> =
            (0..self.world).map(|rank| self.start(rank, sender.clone())).collect();
        drop(sender);
        if let Some(server) = &server {
            announce(&mut ranks, &server.local_addr().to_string());
        }
        let mut said = vec![BTreeMap::new(); self.world as usize];
        let late = self.hear(&heard, &mut ranks, &mut said);
        for &rank in &self.silent {
            // A process id cannot be reused before the process is reaped, which is done here.
            let _ = ranks[rank as usize].child.kill();
        }
        if !late.is_empty() {
            drop(ranks);
            panic!("ranks {late:?} did not end within {:?}: {self:?}; said {said:?}", self.limit);
        }
        let mut reports = Vec::new();
        for ((rank, process), said) in (0..).zip(&mut ranks).zip(said) {
            let status = process.child.wait().expect("a child of this process");
            reports.push(Report { rank, status, said });
        }
        reports
    }

    fn start(&self, rank: u32, sender: Sender<(u32, Heard)>) -> Rank {
        let mut command = Command::new(std::env::current_exe().expect("the test's program"));
        command
            .args([self.entry, "--exact", "--nocapture", "--test-threads=1"])
            .env("SYMMPOOL_TEST_SCENARIO", &self.scenario)
            .env("SYMMPOOL_TEST_RANK", rank.to_string())
            .env("SYMMPOOL_TEST_WORLD", self.world.to_string())
            .env("SYMMPOOL_TEST_HOST", if self.host == Host::Test { "test" } else { "rank 0" })
            .env_remove("SYMMPOOL_TEST_FAULT")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        if let Some((_, plan)) = self.fault.as_ref().filter(|(faulty, _)| *faulty == rank) {
            command.env("SYMMPOOL_TEST_FAULT", plan);
        }
        let mut child = command.spawn().expect("a process for a rank");
        let stdin = child.stdin.take();
        let stdout = child.stdout.take().expect("its output is a pipe");
        let reader = std::thread::spawn(move || {
            // The harness may have begun the line.
            let lines = BufReader::new(stdout).lines().map_while(Result::ok);
            let said = lines.filter_map(|line| {
                let (key, value) = line.split_once(MARK)?.1.split_once(' ')?;
                Some(Heard::Said(key.to_owned(), value.replace("\\n", "\n")))
            });
            for heard in said.chain([Heard::Ended]) {
                // The test may have given up.
                let _ = sender.send((rank, heard));
            }
        });
        Rank { child, stdin, reader: Some(reader) }
    }

    /// Listens until all ranks that are to end have; returns those that did not in time.
    fn hear(
        &self,
        heard: &Receiver<(u32, Heard)>,
        ranks: &mut [Rank],
        said: &mut [BTreeMap<String, String>],
    ) -> Vec<u32> {
        let until = Instant::now() + self.limit;
        let mut running: Vec<u32> =
            (0..self.world).filter(|rank| !self.silent.contains(rank)).collect();
        while !running.is_empty() {
            match heard.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok((rank, Heard::Said(key, value))) => {
                    if key == "address" {
                        announce(ranks, &value);
                    }
                    said[rank as usize].insert(key, value);
                }
                Ok((rank, Heard::Ended)) => running.retain(|&other| other != rank),
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => break,
            }
        }
        running
    }
}

/// Tells every rank where the store is. One that is dead already does not hear it.
fn announce(ranks: &mut [Rank], address: &str) {
    for rank in ranks {
        if let Some(mut stdin) = rank.stdin.take() {
            let _ = writeln!(stdin, "{address}");
        }
    }
}
