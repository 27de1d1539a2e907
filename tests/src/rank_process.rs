//! A rank's side of a [`Job`](crate::launch::Job): what it shall do, how it joins the others, how it reports.

use std::env;
use std::fmt::Display;
use std::io::BufRead;
use std::sync::Arc;
use std::time::Duration;

use symmpool_allocator::driver::FaultPlan;
use symmpool_allocator::store::tcp::TcpOptions;
use symmpool_allocator::store::{Store, TcpServer, TcpStore};
use symmpool_allocator::{Deadline, Group};

use crate::launch::MARK;

/// How long a rank waits for others where no fault is expected.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// A process that is a rank of a job.
#[derive(Debug)]
pub struct RankProcess {
    /// Task of the rank.
    pub scenario: String,
    /// The number of this rank.
    pub rank: u32,
    /// The number of ranks.
    pub world: u32,
    /// The faults to inject on this rank.
    pub faults: FaultPlan,
    hosted: bool,
}

/// The group of a job, and the server of its store if this process runs it.
#[derive(Debug)]
pub struct JoinedGroup {
    /// The group of all ranks of the job.
    pub group: Group,
    /// The server of the store. You must drop it after the group, because other ranks may still need it.
    pub server: Option<TcpServer>,
}

impl RankProcess {
    /// This process's rank; `None` in the test that starts the ranks.
    pub fn from_env() -> Option<Self> {
        let scenario = env::var("SYMMPOOL_TEST_SCENARIO").ok()?;
        let number = |name| env::var(name).ok()?.parse().ok();
        let plan = env::var("SYMMPOOL_TEST_FAULT");
        Some(Self {
            scenario,
            rank: number("SYMMPOOL_TEST_RANK").expect("a rank"),
            world: number("SYMMPOOL_TEST_WORLD").expect("a world"),
            faults: plan.map_or_else(
                |_| FaultPlan::new(),
                |plan| FaultPlan::parse(&plan).expect("a plan that can be read"),
            ),
            hosted: env::var("SYMMPOOL_TEST_HOST").is_ok_and(|host| host == "rank 0"),
        })
    }

    /// Joins the other ranks, and returns when all have joined.
    pub fn join(&self) -> JoinedGroup {
        let server = (self.hosted && self.rank == 0)
            .then(|| TcpServer::bind("127.0.0.1:0", TcpOptions::default()).expect("a free port"));
        if let Some(server) = &server {
            self.report("address", server.local_addr());
        }
        let mut address = String::new();
        std::io::stdin().lock().read_line(&mut address).expect("the store's address");
        let options = TcpOptions { hosted_by: self.hosted.then_some(0), ..TcpOptions::default() };
        let deadline = Deadline::after(PATIENCE);
        let store = TcpStore::connect_as(address.trim(), options, self.rank, deadline);
        let store = Arc::new(store.expect("the store answers"));
        let group = Group::new(self.rank, self.world, store.clone()).expect("a small group");
        group.all_gather("start", b"", deadline).expect("all ranks start");
        // The rank that serves the store may be killed next, so it waits until the others have left the gather above.
        let started = |rank: u32| format!("started/{rank}");
        if server.is_some() {
            for rank in 1..self.world {
                store.get(&started(rank), deadline).expect("all ranks have started");
            }
        } else if self.hosted {
            // The server may end before it answers, which does not matter any more.
            let _ = store.set(&started(self.rank), b"", deadline);
        }
        JoinedGroup { group, server }
    }

    /// Reports a value to the test.
    pub fn report(&self, key: &str, value: impl Display) {
        let value = value.to_string().replace('\n', "\\n");
        println!("{MARK}{key} {value}");
    }
}
