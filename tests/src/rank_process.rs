//! A rank's side of a [`Job`](crate::launch::Job).

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

/// How long a rank waits for others where nothing is meant to go wrong.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// The place of this process in a job.
#[derive(Debug)]
pub struct Seat {
    /// What to do.
    pub scenario: String,
    /// Which rank this is.
    pub rank: u32,
    /// Of how many.
    pub world: u32,
    /// What shall go wrong on this rank.
    pub faults: FaultPlan,
    hosted: bool,
}

/// A group with its store's server, where this process serves it.
#[derive(Debug)]
pub struct Membership {
    /// The group of all ranks of the job.
    pub group: Group,
    /// Dropped after the group: other ranks may still need it.
    pub server: Option<TcpServer>,
}

impl Seat {
    /// The seat of this process; `None` in the test that starts the ranks.
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

    /// Meets the other ranks, and returns when all are there.
    pub fn join(&self) -> Membership {
        let server = (self.hosted && self.rank == 0)
            .then(|| TcpServer::bind("127.0.0.1:0", TcpOptions::default()).expect("a free port"));
        if let Some(server) = &server {
            self.say("address", server.local_addr());
        }
        let mut address = String::new();
        std::io::stdin().lock().read_line(&mut address).expect("the store's address");
        let options = TcpOptions { hosted_by: self.hosted.then_some(0), ..TcpOptions::default() };
        let deadline = Deadline::after(PATIENCE);
        let store = TcpStore::connect_as(address.trim(), options, self.rank, deadline);
        let store = Arc::new(store.expect("the store answers"));
        let group = Group::new(self.rank, self.world, store.clone()).expect("a small group");
        group.all_gather("start", b"", deadline).expect("all ranks start");
        // Whoever serves the store goes on, perhaps to its death, when the others know of the start.
        let heard = |rank: u32| format!("heard of the start/{rank}");
        if server.is_some() {
            for rank in 1..self.world {
                store.get(&heard(rank), deadline).expect("all have heard of the start");
            }
        } else if self.hosted {
            // The answer may die with the server, which is no matter any more.
            let _ = store.set(&heard(self.rank), b"", deadline);
        }
        Membership { group, server }
    }

    /// Tells the test something.
    pub fn say(&self, key: &str, value: impl Display) {
        let value = value.to_string().replace('\n', "\\n");
        println!("{MARK}{key} {value}");
    }
}
