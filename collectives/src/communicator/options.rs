//! How a communicator behaves.

use std::time::Duration;

use symmpool_allocator::topology::Topology;
use symmpool_allocator::{Error, Result};

use super::Communicator;
use crate::{AllReduceAlgorithm, AllToAllAlgorithm, HostOptions};

/// How a [`Communicator`] behaves. The same on every rank, but for what says otherwise.
#[derive(Clone, Debug)]
pub struct CommunicatorOptions {
    /// Longest wait for a late rank (rule S5). Default 30 s. A rank of this machine whose process
    /// is gone is noticed sooner.
    pub timeout: Duration,
    /// How all-reduces go about it. Results have the same bits with each. Default: `Auto`, which is
    /// by links, size and kind of memory, on devices by what was measured on such; or what the
    /// environment names in `SYMMPOOL_ALL_REDUCE`, on every rank, where it is not empty.
    pub algorithm: AllReduceAlgorithm,
    /// How all-to-alls go about it, on devices all-gathers and broadcasts as well. Results are the same
    /// with each. Default: `Auto`, or what the environment names in `SYMMPOOL_ALL_TO_ALL`, on every rank,
    /// where it is not empty.
    pub all_to_all: AllToAllAlgorithm,
    /// Bytes of scratch per parity, of which there are two; see [`HostOptions::scratch_bytes`].
    /// Default 2 MiB. In host memory.
    pub scratch_bytes: u64,
    /// On a device: bytes of each of the three parts of an inbox, which hold what ranks send each
    /// other in one call of up to some MiB, twice the size of an all-reduce as a rule. A multiple
    /// of 4096, at least 1 MiB. Larger calls go in pieces. Default 32 MiB.
    pub device_inbox_bytes: u64,
    /// On a device: bytes of scratch, where shares of large calls wait to be reduced: all but a
    /// rank's own. A multiple of 4096, at least 1 MiB. Larger calls go in rounds, which cost some
    /// microseconds each. Default 192 MiB, which holds those of 256 MiB from 4 ranks. A
    /// communicator takes as much, three times the inbox, and 117 MiB, of which 16 MiB are for messages
    /// between two ranks; with less scratch than 64 MiB a quarter of that is.
    pub device_scratch_bytes: u64,
    /// On a device: communicators whose calls may be under way there at once, on several streams; 1 to 16.
    /// A kernel keeps its place on the device while it waits for a peer. If one takes all of it, another
    /// communicator's waits outside, and ranks that began with different ones wait for each other until
    /// time is over. So each takes its share of two thirds of the processors, which large calls pay for.
    /// `None`, the default: as many as there are streams that communicators of this process have their calls
    /// on there, and one more for each that has made none yet, has changed its stream, or has calls in graphs,
    /// as its next may be anywhere. If that is one, it takes everything, unless
    /// [`leave_room`](crate::leave_room) says otherwise. A graph keeps what held when it captured a call: before
    /// capturing have all communicators made, or say how many there will be. Ranks may differ.
    pub concurrent: Option<u32>,
    /// The number of the first call, 1 or more. Default 1; others serve to test what happens when
    /// numbers have used up their bits.
    pub first_epoch: u32,
    /// How the ranks are linked, where it is not as the pool's topology says: for trying out a
    /// machine that is not there. In host memory all-reduces on a hybrid cube mesh move data over direct
    /// links only ([`AllReduceAlgorithm::CubeMesh`]); on devices LL128
    /// ([`AllReduceAlgorithm::OneShotLl128`]) is for ranks that are all linked directly. Other collectives
    /// do not ask for links. Default: [`Pool::topology`](symmpool_allocator::Pool::topology).
    pub links: Option<Topology>,
}

impl Default for CommunicatorOptions {
    fn default() -> Self {
        let HostOptions { timeout, scratch_bytes, .. } = HostOptions::default();
        Self {
            timeout,
            algorithm: AllReduceAlgorithm::Auto,
            all_to_all: AllToAllAlgorithm::Auto,
            scratch_bytes,
            device_inbox_bytes: 32 << 20,
            device_scratch_bytes: 192 << 20,
            concurrent: None,
            first_epoch: 1,
            links: None,
        }
    }
}

/// The most communicators whose calls may be under way at once.
const MOST_CONCURRENT: u32 = 16;

impl CommunicatorOptions {
    /// Refuses what makes no sense, whatever the memory, so that it is found on any machine.
    pub(super) fn check(&self, world: u32) -> Result<()> {
        let refuse = |why: String| Err(Error::invalid_argument(why));
        check_timeout(self.timeout)?;
        if self.first_epoch == 0 {
            return refuse("first epoch 0: calls count from 1".to_owned());
        }
        if let Some(told) = self.concurrent.filter(|told| !(1..=MOST_CONCURRENT).contains(told)) {
            return refuse(format!(
                "concurrent {told}: communicators whose calls are under way at once, 1 to \
                 {MOST_CONCURRENT}"
            ));
        }
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
    /// How long calls wait for a late rank.
    pub fn timeout(&self) -> Duration {
        self.timeout.get()
    }

    /// Changes how long this rank's calls wait for a late rank. Talks to nobody: ranks whose times differ
    /// give up at different times. A call under way keeps its time, and so does what is on a stream
    /// already, or captured in a graph. Needs no turn: a call under way in another thread holds it up no
    /// more than it is held up. Commits wait as long as the group's timeout says.
    ///
    /// Fails with [`Error::is_invalid_argument`] for a time of nothing.
    pub fn set_timeout(&self, timeout: Duration) -> Result<()> {
        check_timeout(timeout)?;
        self.timeout.set(timeout);
        Ok(())
    }
}

fn check_timeout(timeout: Duration) -> Result<()> {
    if timeout.is_zero() {
        let why = "timeout: calls wait longer than nothing; pass a time above zero";
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
            (CommunicatorOptions { timeout: Duration::ZERO, ..good() }, "timeout"),
            (CommunicatorOptions { first_epoch: 0, ..good() }, "first epoch"),
            (CommunicatorOptions { links: Some(Topology::host(3)), ..good() }, "links of 3 ranks"),
        ] {
            let error = options.check(2).expect_err("nonsense");
            assert!(error.is_invalid_argument() && error.to_string().contains(name), "{error}");
        }
    }
}
