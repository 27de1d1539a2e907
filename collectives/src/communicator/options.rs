//! How a communicator behaves.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use symmpool_allocator::topology::Topology;
use symmpool_allocator::{Error, Result};

use super::Communicator;
use crate::cuda::{BudgetOptions, check_total};
use crate::{AllReduceAlgorithm, AllToAllAlgorithm, HostEngineOptions, StandardCollective};

/// How a [`Communicator`] behaves. The same on every rank, except where an option says otherwise.
#[derive(Clone, Debug)]
pub struct CommunicatorOptions {
    /// Longest wait for a late rank (rule S5). Default 30 s. A rank of this machine whose process
    /// is gone is found sooner.
    pub timeout: Duration,
    /// The algorithm of all-reduces. Results have the same bits with each. Default: what the environment variable
    /// `SYMMPOOL_ALL_REDUCE` names, the same on every rank; or, where it is not set or empty, `Auto`, which
    /// selects by links, size and kind of memory, and on known devices by what was measured.
    pub algorithm: AllReduceAlgorithm,
    /// The algorithm of all-to-alls, and on devices of all-gathers and broadcasts. Results are the same
    /// with each. Default: what the environment variable `SYMMPOOL_ALL_TO_ALL` names, the same on every rank; or
    /// `Auto`, where it is not set or empty.
    pub all_to_all: AllToAllAlgorithm,
    /// The algorithms of collectives by name, where they are not what `algorithm` and `all_to_all` say: any name that is
    /// registered when the first call of that collective is made, or that a built-in algorithm has. Default: for each
    /// collective what its environment variable names ([`StandardCollective::variable`]), the same on every rank.
    pub algorithms: BTreeMap<StandardCollective, String>,
    /// Files with tables of algorithms, which are loaded as [`Communicator::load_tables`] does. Default: those that the
    /// environment variable `SYMMPOOL_TABLES` has, separated by colons, the same on every rank.
    pub tables: Vec<PathBuf>,
    /// Bytes of scratch per parity, of which there are two; see [`HostEngineOptions::scratch_bytes`].
    /// Default 2 MiB. In host memory.
    pub scratch_bytes: u64,
    /// On a device: bytes of its memory that the communicator takes in all, 8 MiB to 4 GiB. Large calls go in pieces
    /// or stages through what there is, so more memory makes some sizes faster and no call possible that was not.
    /// Default: what the environment variable `SYMMPOOL_DEVICE_MEMORY` says, the same on every rank; or, where it is
    /// not set or empty, 397 MiB, with which every size is as fast as memory can make it. The variable may have two
    /// numbers, as in `96M,16M`: for the first communicator of a process there, and for each further one. A
    /// communicator is a further one if any rank's process had another pool on its device when this one's pool was
    /// made, or if the pool has another communicator.
    pub device_memory_bytes: Option<u64>,
    /// On a device: whether the communicator begins with 16 MiB of memory, and takes 389 MiB more before its first large call.
    /// Large is a call of more than 768 KiB of all ranks together (256 KiB where integers or `f64` are reduced, or the call
    /// names an algorithm), and every all-to-all, call of experts, and call by an algorithm that a program brings along. The
    /// first one waits on the host until every rank has come to it, and commits. So no rank may wait there for what another
    /// rank does after its own first large call: you must see to that. A captured first large call takes the memory as well:
    /// it waits on the host, up to the timeout, until every rank captures that call. So all ranks must capture it, or none.
    /// Where one of their devices has no room, no rank takes memory, and it is tried again after 2, 4, 8, ... such calls. No
    /// effect where anything else says how much memory there is (`device_memory_bytes`, an inbox, scratch, the environment).
    /// Default false. The same on every rank.
    pub device_memory_grows: bool,
    /// On a device: bytes of each of the three parts of an inbox, which holds what ranks send each
    /// other in one call of up to some MiB: usually twice the bytes of an all-reduce. A multiple
    /// of 4096, at least 1 MiB. Larger calls take several launches. Default: a twelfth of the memory.
    pub device_inbox_bytes: Option<u64>,
    /// On a device: bytes of scratch, where the data of large calls waits to be reduced. A multiple of 4096, at least
    /// 1 MiB. Larger calls take stages or rounds. Default: what the other parts of the memory leave, about a third;
    /// room for send and recv comes on top, at most a quarter as many bytes where this is given.
    pub device_scratch_bytes: Option<u64>,
    /// On a device: how many communicators may have calls under way there at once, on several streams; 1 to 16.
    /// A kernel stays resident on the device while it waits for a peer. If it occupies the whole device, another
    /// communicator's kernel cannot start, and ranks that began with different communicators wait for each other
    /// until the timeout. So kernels have the SMs by turns: one of them has most, and those that begin meanwhile divide two
    /// elevenths, which makes large calls a little slower. 1 says that no other communicator has calls.
    ///
    /// `None`, the default, counts: the streams that communicators of this process have their calls on there, and one for
    /// each communicator that has made no call yet, has changed its stream, or has calls in graphs, as its next call may be
    /// on any stream. If that is one, the communicator uses the whole device, unless [`share_sms`](crate::share_sms) was
    /// called. A graph keeps the budget that its calls were captured with: make all communicators before you capture, or set
    /// this. Ranks may differ.
    pub concurrent: Option<u32>,
    /// On a device: the most SMs that a kernel of a call takes, 2 or more. What communicators on one device leave each
    /// other (`concurrent`) still holds. `None`, the default: all of them, or, in calls that `beside_compute` is about,
    /// as many as keep the links busy. Ranks may differ.
    pub sm_budget: Option<u32>,
    /// On a device: whether calls on other streams than a default one, unless they are captured, run beside kernels of
    /// the program, such as matrix products, which are to lose as little as possible. Such calls take few SMs and a
    /// little longer than calls that have the device for themselves. Large all-reduces of the communicator then go by an
    /// algorithm that needs few SMs, on whatever streams; between two ranks so do large reduce-scatters and all-gathers.
    /// Default false. The same on every rank.
    pub beside_compute: bool,
    /// The number of the first call, 1 or more. Default 1; larger ones serve to test what happens when
    /// numbers overflow.
    pub first_epoch: u32,
    /// In host memory: takes memory, of which a page is used at first, so that ranks of this communicator make communicators
    /// of some of them without a rendezvous ([`Communicator::offer`]). Default false. The same on every rank.
    pub serves_subgroups: bool,
    /// How the ranks are linked, to try out another topology than the pool's. In host memory all-reduces on a
    /// hybrid cube mesh move data over direct links only ([`AllReduceAlgorithm::CubeMesh`]); on devices LL128
    /// ([`AllReduceAlgorithm::OneShotLl128`]) is for ranks that are all linked directly. Other collectives
    /// do not depend on links. Default: [`Pool::topology`](symmpool_allocator::Pool::topology).
    pub links: Option<Topology>,
}

impl Default for CommunicatorOptions {
    fn default() -> Self {
        let HostEngineOptions { timeout, scratch_bytes, .. } = HostEngineOptions::default();
        Self {
            timeout,
            algorithm: AllReduceAlgorithm::Auto,
            all_to_all: AllToAllAlgorithm::Auto,
            algorithms: BTreeMap::new(),
            tables: Vec::new(),
            scratch_bytes,
            device_memory_bytes: None,
            device_memory_grows: false,
            device_inbox_bytes: None,
            device_scratch_bytes: None,
            concurrent: None,
            sm_budget: None,
            beside_compute: false,
            first_epoch: 1,
            serves_subgroups: false,
            links: None,
        }
    }
}

/// The most communicators whose calls may be under way at once.
const MAX_CONCURRENT: u32 = 16;
/// The least SM budget: a block that does the handshake, and one that moves data.
const MIN_SM_BUDGET: u32 = 2;

impl CommunicatorOptions {
    /// The name that is requested for a collective, if any is.
    pub(super) fn requested(&self, collective: StandardCollective) -> Option<&str> {
        let of_field = match collective {
            StandardCollective::AllReduce => Some(self.algorithm.name()),
            StandardCollective::AllToAll => Some(self.all_to_all.name()),
            _ => None,
        };
        self.algorithms.get(&collective).map(String::as_str).or(of_field)
    }

    /// Options that concern the SM budget of calls.
    pub(super) fn budget(&self) -> BudgetOptions {
        let Self { concurrent, sm_budget: most, beside_compute, .. } = *self;
        BudgetOptions { concurrent, most, beside_compute }
    }

    /// Refuses invalid options, also those for another kind of memory, so that they are found on any machine.
    pub(super) fn check(&self, world: u32) -> Result<()> {
        let refuse = |why: String| Err(Error::invalid_argument(why));
        check_timeout(self.timeout)?;
        if self.first_epoch == 0 {
            return refuse("first epoch 0: calls count from 1".to_owned());
        }
        if let Some(wrong) = self.concurrent.filter(|count| !(1..=MAX_CONCURRENT).contains(count)) {
            return refuse(format!(
                "concurrent {wrong}: how many communicators may have calls under way at once, 1 to \
                 {MAX_CONCURRENT}"
            ));
        }
        check_sm_budget(self.sm_budget)?;
        check_total(self.device_memory_bytes)?;
        match &self.links {
            Some(links) if links.world() != world => refuse(format!(
                "the links of {} ranks for a communicator of {world}; give those of all its ranks",
                links.world()
            )),
            _ => Ok(()),
        }
    }
}

impl Communicator {
    /// Changes the option [`sm_budget`](CommunicatorOptions::sm_budget) of this rank's calls from now on. It is not
    /// collective. Calls that are on a stream already, or captured in a graph, keep theirs. In host memory it changes
    /// nothing. Waits for a call under way in another thread.
    ///
    /// # Errors
    ///
    /// `is_invalid_argument` for fewer than 2 SMs.
    pub fn set_sm_budget(&self, most: Option<u32>) -> Result<()> {
        check_sm_budget(most)?;
        self.lock().engine.set_sm_budget(most);
        Ok(())
    }

    /// How long calls wait for a late rank.
    pub fn timeout(&self) -> Duration {
        self.timeout.get()
    }

    /// Changes how long this rank's calls wait for a late rank. It is not collective: ranks with different
    /// timeouts give up at different times. A call under way keeps its timeout, and so do calls that are on a stream
    /// already, or captured in a graph. Does not wait for a call under way in another thread. Commits
    /// wait as long as the group's timeout says.
    ///
    /// Fails with [`Error::is_invalid_argument`] for a timeout of zero.
    pub fn set_timeout(&self, timeout: Duration) -> Result<()> {
        check_timeout(timeout)?;
        self.timeout.set(timeout);
        Ok(())
    }
}

fn check_sm_budget(most: Option<u32>) -> Result<()> {
    match most.filter(|sms| *sms < MIN_SM_BUDGET) {
        Some(wrong) => Err(Error::invalid_argument(format!(
            "SM budget {wrong}: the most SMs that a kernel takes, at least {MIN_SM_BUDGET}"
        ))),
        None => Ok(()),
    }
}

fn check_timeout(timeout: Duration) -> Result<()> {
    if timeout.is_zero() {
        let why = "timeout: zero; pass a time above zero";
        return Err(Error::invalid_argument(why));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_makes_no_sense_is_refused_whatever_the_memory() {
        let good = CommunicatorOptions::default;
        assert!(CommunicatorOptions { concurrent: Some(16), ..good() }.check(2).is_ok());
        assert!(CommunicatorOptions { links: Some(Topology::host(2)), ..good() }.check(2).is_ok());
        for (options, name) in [
            (CommunicatorOptions { concurrent: Some(0), ..good() }, "concurrent 0"),
            (CommunicatorOptions { concurrent: Some(17), ..good() }, "concurrent 17"),
            (CommunicatorOptions { sm_budget: Some(1), ..good() }, "SM budget 1"),
            (
                CommunicatorOptions { device_memory_bytes: Some(1 << 20), ..good() },
                "1048576 bytes of device memory",
            ),
            (CommunicatorOptions { timeout: Duration::ZERO, ..good() }, "timeout"),
            (CommunicatorOptions { first_epoch: 0, ..good() }, "first epoch"),
            (CommunicatorOptions { links: Some(Topology::host(3)), ..good() }, "links of 3 ranks"),
        ] {
            let error = options.check(2).expect_err("nonsense");
            assert!(error.is_invalid_argument() && error.to_string().contains(name), "{error}");
        }
    }
}
