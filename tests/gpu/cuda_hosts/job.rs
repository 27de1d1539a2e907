//! Ranks as processes on pretended hosts: the program starts itself once for each.

use std::env;
use std::io::Write;
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use symmpool_allocator::driver::CudaDriver;
use symmpool_allocator::store::tcp::TcpOptions;
use symmpool_allocator::store::{TcpServer, TcpStore};
use symmpool_allocator::{Deadline, Driver, Error, Group, Pool, Result};

use crate::HostsOptions;

const VARIABLE: &str = "CUDA_HOSTS_RANK";

/// A process that is a rank.
pub(crate) struct RankOfJob {
    pub(crate) scenario: String,
    pub(crate) rank: u32,
    pub(crate) hosts: Vec<String>,
    pub(crate) timeout: Duration,
    address: String,
}

impl RankOfJob {
    pub(crate) fn from_env() -> Option<Self> {
        let text = env::var(VARIABLE).ok()?;
        let [scenario, rank, hosts, seconds, address] =
            <[&str; 5]>::try_from(text.split(' ').collect::<Vec<_>>()).ok()?;
        Some(Self {
            scenario: scenario.to_owned(),
            rank: rank.parse().ok()?,
            hosts: hosts.split(',').map(str::to_owned).collect(),
            timeout: Duration::from_secs(seconds.parse().ok()?),
            address: address.to_owned(),
        })
    }

    /// Runs the rank's part. A rank that does not end in time is ended.
    pub(crate) fn run(self, body: impl FnOnce(&Self) -> Result<()>) -> ExitCode {
        let (rank, limit) = (self.rank, self.timeout);
        thread::spawn(move || {
            thread::sleep(limit);
            eprintln!("rank {rank} did not end within {limit:?}");
            std::process::exit(3);
        });
        match body(&self) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("rank {rank} ({}): {error}", self.scenario);
                ExitCode::FAILURE
            }
        }
    }

    pub(crate) fn world(&self) -> usize {
        self.hosts.len()
    }

    /// The group of all ranks, which store and wait for each other.
    pub(crate) fn group(&self) -> Result<Group> {
        let deadline = Deadline::after(self.timeout);
        let options = TcpOptions::default();
        let store = TcpStore::connect_as(&self.address, options, self.rank, deadline)?;
        let group = Group::new(self.rank, self.hosts.len() as u32, Arc::new(store))?;
        Ok(group.with_timeout(self.timeout).with_host_id(&*self.hosts[self.rank as usize]))
    }

    /// A pool on this rank's device.
    pub(crate) fn pool(&self) -> Result<Pool> {
        let device = self.rank % CudaDriver::device_count()?;
        Pool::builder(self.group()?).driver(Driver::cuda(device)?).build()
    }
}

struct EndsWithThis(Child);

impl Drop for EndsWithThis {
    fn drop(&mut self) {
        // An error means that the process has ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs a scenario on every rank, with environment variables for each. Whether all ranks passed.
pub(crate) fn run(
    options: &HostsOptions,
    scenario: &str,
    variables: impl Fn(usize) -> Vec<(&'static str, String)>,
) -> bool {
    let began = Instant::now();
    let server = TcpServer::bind("127.0.0.1:0", TcpOptions::default()).expect("a free port");
    let program = env::current_exe().expect("this program");
    let start = |rank: usize| {
        let hosts = options.hosts.join(",");
        let (seconds, address) = (options.timeout.as_secs(), server.local_addr());
        let mut command = Command::new(&program);
        command
            .env(VARIABLE, format!("{scenario} {rank} {hosts} {seconds} {address}"))
            .stdin(Stdio::null());
        command.envs(variables(rank));
        EndsWithThis(command.spawn().expect("a process for a rank"))
    };
    let mut ranks: Vec<EndsWithThis> = (0..options.hosts.len()).map(start).collect();
    let ended: Vec<_> = ranks.iter_mut().map(|rank| rank.0.wait().expect("a child")).collect();
    let passed = ended.iter().all(ExitStatus::success);
    let verdict = if passed { "passed" } else { "FAILED" };
    println!("{scenario} on hosts {:?}: {verdict}, {:?}", options.hosts, began.elapsed());
    let _ = std::io::stdout().flush();
    passed
}

/// Refuses a result that is not as it should be.
pub(crate) fn ensure(holds: bool, what: impl FnOnce() -> String) -> Result<()> {
    if holds { Ok(()) } else { Err(Error::invalid_state(what())) }
}
