//! Runs ranks as processes: the test's program starts itself again once for each rank.
//!
//! A test binary has one test function that ranks run, which returns at once unless [`RankProcess::from_env`] says that
//! the process is a rank. [`Job::run`] runs that function in one process for each rank, collects what they report, and
//! returns when all but the silent ones have ended; silent ranks, and those that are late, are killed by process id. No
//! process outlives the call, even if it panics.
//!
//! [`RankProcess::from_env`]: crate::rank_process::RankProcess::from_env

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use symmpool_allocator::store::TcpServer;
use symmpool_allocator::store::tcp::TcpOptions;

/// Begins each line of output that a rank reports to the test; other lines are ignored.
pub(crate) const MARK: &str = "@rank ";

/// Which process serves the store of the ranks' group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Host {
    /// The test itself, which does not depend on any rank.
    Test,
    /// Rank 0, as under a launcher: when it dies, the store is gone.
    RankZero,
}

/// The ranks to run.
#[derive(Clone, Debug)]
pub struct Job {
    /// The test function to run in each process, as the test harness names it.
    pub entry: &'static str,
    /// Task of the ranks: their [`RankProcess::scenario`](crate::rank_process::RankProcess::scenario).
    pub scenario: String,
    /// How many ranks.
    pub world: u32,
    /// Which process serves the store.
    pub host: Host,
    /// A fault plan (see `FaultPlan::parse`) for this rank.
    pub fault: Option<(u32, String)>,
    /// Ranks that do not end by themselves.
    pub silent: Vec<u32>,
    /// How long ranks that are not silent may take to end.
    pub limit: Duration,
}

/// How one rank ended, and what it reported.
#[derive(Clone, Debug)]
pub struct RankReport {
    /// Its number.
    pub rank: u32,
    /// Its exit status.
    pub status: ExitStatus,
    /// The values that it reported, by key; the last one if a key was reported twice.
    pub values: BTreeMap<String, String>,
}

impl RankReport {
    /// The value that the rank reported for `key`, if it did.
    pub fn get(&self, key: &str) -> Option<&str> {
        self.values.get(key).map(String::as_str)
    }

    /// The value that the rank reported for `key`. Panics if it did not.
    pub fn value(&self, key: &str) -> &str {
        self.get(key)
            .unwrap_or_else(|| panic!("rank {} did not report {key:?}: {self:?}", self.rank))
    }

    /// Whether the process was ended by `SIGKILL`.
    pub fn was_killed(&self) -> bool {
        self.status.signal() == Some(9)
    }
}

/// A process that is killed and reaped when this is dropped.
struct Rank {
    child: Child,
    stdin: Option<ChildStdin>,
    reader: Option<JoinHandle<()>>,
}

impl Drop for Rank {
    fn drop(&mut self) {
        // An error means that the process has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }
}

enum LaunchMessage {
    Value(String, String),
    Ended,
}

impl Job {
    /// A job of ranks without faults, whose store the test serves, with a limit of a minute.
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

    /// Runs the ranks and returns a report of each, in rank order. If a rank that is not silent has not ended within
    /// the limit, ends all of them and panics.
    pub fn run(&self) -> Vec<RankReport> {
        let server = (self.host == Host::Test)
            .then(|| TcpServer::bind("127.0.0.1:0", TcpOptions::default()).expect("a free port"));
        let (sender, messages) = channel();
        let mut ranks: Vec<Rank> =
            (0..self.world).map(|rank| self.start(rank, sender.clone())).collect();
        drop(sender);
        if let Some(server) = &server {
            announce(&mut ranks, &server.local_addr().to_string());
        }
        let mut values = vec![BTreeMap::new(); self.world as usize];
        let late = self.collect(&messages, &mut ranks, &mut values);
        for &rank in &self.silent {
            // A process id cannot be reused before the process is reaped, which is done here.
            let _ = ranks[rank as usize].child.kill();
        }
        if !late.is_empty() {
            drop(ranks);
            panic!("ranks {late:?} did not end within {:?}: {self:?}; {values:?}", self.limit);
        }
        let mut reports = Vec::new();
        for ((rank, process), values) in (0..).zip(&mut ranks).zip(values) {
            let status = process.child.wait().expect("a child of this process");
            reports.push(RankReport { rank, status, values });
        }
        reports
    }

    fn start(&self, rank: u32, sender: Sender<(u32, LaunchMessage)>) -> Rank {
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
            // The test harness may have written the beginning of the line.
            let lines = BufReader::new(stdout).lines().map_while(Result::ok);
            let values = lines.filter_map(|line| {
                let (key, value) = line.split_once(MARK)?.1.split_once(' ')?;
                Some(LaunchMessage::Value(key.to_owned(), value.replace("\\n", "\n")))
            });
            for message in values.chain([LaunchMessage::Ended]) {
                // The test may have stopped listening.
                let _ = sender.send((rank, message));
            }
        });
        Rank { child, stdin, reader: Some(reader) }
    }

    /// Collects values until all ranks but the silent ones have ended. Returns those that did not end in time.
    fn collect(
        &self,
        messages: &Receiver<(u32, LaunchMessage)>,
        ranks: &mut [Rank],
        values: &mut [BTreeMap<String, String>],
    ) -> Vec<u32> {
        let until = Instant::now() + self.limit;
        let mut running: Vec<u32> =
            (0..self.world).filter(|rank| !self.silent.contains(rank)).collect();
        while !running.is_empty() {
            match messages.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok((rank, LaunchMessage::Value(key, value))) => {
                    if key == "address" {
                        announce(ranks, &value);
                    }
                    values[rank as usize].insert(key, value);
                }
                Ok((rank, LaunchMessage::Ended)) => running.retain(|&other| other != rank),
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => break,
            }
        }
        running
    }
}

/// Sends every rank the address of the store. Writing to a rank that has died fails, which is ignored.
fn announce(ranks: &mut [Rank], address: &str) {
    for rank in ranks {
        if let Some(mut stdin) = rank.stdin.take() {
            let _ = writeln!(stdin, "{address}");
        }
    }
}
