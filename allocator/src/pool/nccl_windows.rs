//! Registering a pool's windows with NCCL.
//!
//! NCCL's calls have no deadline, so they are made on threads of their own. A call that does not return keeps its
//! thread, which keeps the pool: its memory stays mapped for as long as NCCL may touch it. No further call is made on
//! that communicator, and the pool makes no more commits, as they could unmap memory.

use serde::{Deserialize, Serialize};

use super::Pool;
use super::commit_guard::LockedLane;
use super::committer::{Attached, Committer, Registered};
use crate::driver::MemoryDriver;
use crate::error::ErrorKind;
use crate::lane::WindowPolicy;
use crate::nccl::{Nccl, NcclComm};
use crate::rendezvous::message::{Message, decode_all};
use crate::rendezvous::status::{RankStatus, all_ok, encode_status};
use crate::{CONTROL_LANE, Deadline, Error, Result, blocking};

/// The outcome of a step with NCCL on one rank: the version of its library, or an error.
#[derive(Debug, Serialize, Deserialize)]
struct NcclStatus(RankStatus<i32>);

impl Message for NcclStatus {
    const KIND: u16 = 11;
    const NAME: &'static str = "NCCL";
}

/// The deadline of NCCL's calls in a step: a quarter of the time is left for the ranks to agree on what came of them.
fn for_nccl(deadline: Deadline) -> Deadline {
    deadline.min(Deadline::after(deadline.remaining() * 3 / 4))
}

/// Calls `work` with the driver's device as the current one, as NCCL requires.
fn on_device<T>(driver: &dyn MemoryDriver, work: impl FnOnce() -> Result<T>) -> Result<T> {
    match driver.as_cuda() {
        Some(cuda) => cuda.with_context(work),
        None => work(),
    }
}

impl Pool {
    /// Registers all windows with a communicator of NCCL, as symmetric windows and in the same order on every
    /// rank, and those of later commits too. Returns the number of windows registered now. Collective.
    ///
    /// If windows of a later commit cannot be registered, the communicator keeps the windows it has and gets no
    /// more: call [`unregister_nccl`](Self::unregister_nccl), and register it again.
    ///
    /// The pool's lanes must be built with [`WindowPolicy::PerSegment`], so that a block lies in one window. The
    /// communicator must have the ranks of the pool's group, in the same order. `comm` is an `ncclComm_t`. NCCL
    /// waits for its peers without a deadline, so all ranks agree that they can register before any begins. Where NCCL
    /// does not come back within three quarters of the group's timeout, every rank gets a timeout that names the rank
    /// and the window; the pool then makes no more commits, and keeps its memory for as long as NCCL holds the call.
    ///
    /// # Errors
    ///
    /// They are equal on every rank: [`Error::is_unsupported`] if no NCCL is loaded, if it is older than 2.27, or if
    /// it makes no symmetric windows between these ranks; [`Error::is_invalid_argument`] for lanes or a communicator
    /// that do not fit; [`Error::is_diverged`] for different versions; [`Error::is_timeout`] and
    /// [`Error::is_peer_lost`].
    ///
    /// # Safety
    ///
    /// `comm` is a communicator of the NCCL that this process has loaded. It lives until
    /// [`unregister_nccl`](Self::unregister_nccl), or until the pool makes no more commits.
    #[allow(unsafe_code)] // passes on the caller's promise
    pub unsafe fn register_nccl(&self, comm: usize) -> Result<u64> {
        let mut committer = self.committer()?;
        let deadline = self.0.group.deadline();
        // SAFETY: the caller promised that `comm` is a communicator of the NCCL of this process, which lives until it
        // is unregistered.
        let comm = unsafe { NcclComm::new(comm) };
        let ready = comm.and_then(|comm| {
            if let Some(attached) = committer.nccl.iter().find(|attached| attached.comm == comm) {
                return Err(Error::invalid_argument(if attached.gets_more {
                    "this communicator has the pool's windows already"
                } else {
                    "this communicator has windows of the pool already, but those of a later commit \
                     could not be registered with it; unregister it first"
                }));
            }
            let nccl = Nccl::loaded()?;
            let version = nccl.version()?;
            self.check_fit(nccl, comm)?;
            Ok((Attached { nccl, comm, windows: Vec::new(), gets_more: true }, version))
        });
        let version = ready.as_ref().map(|(_, version)| *version).map_err(Clone::clone);
        self.agree_on_nccl(
            &mut committer,
            ("nccl-register", "registering windows with NCCL"),
            version,
            deadline,
        )?;
        let (mut attached, version) = ready?;
        let done = self.register_missing(&mut attached, for_nccl(deadline));
        if let Err(error) = self.agree_on_nccl(
            &mut committer,
            ("nccl-registered", "NCCL's windows"),
            done.map(|()| version),
            deadline,
        ) {
            if committer.broken.is_none() {
                self.take_back(&mut attached, |_| true, deadline, &mut committer);
            }
            return Err(error);
        }
        let count = attached.windows.len() as u64;
        committer.nccl.push(attached);
        Ok(count)
    }

    /// Deregisters all windows from a communicator, in the order in which they were registered. Collective. Must
    /// be called before the communicator is destroyed, if the pool commits afterwards.
    pub fn unregister_nccl(&self, comm: usize) -> Result<()> {
        let mut committer = self.committer()?;
        let deadline = self.0.group.deadline();
        let found = committer.nccl.iter().position(|attached| attached.comm.is(comm));
        let ready = found.ok_or_else(|| {
            Error::invalid_argument("this communicator was not given the pool's windows")
        });
        self.agree_on_nccl(
            &mut committer,
            ("nccl-unregister", "deregistering windows from NCCL"),
            ready.clone().map(|_| 0),
            deadline,
        )?;
        let mut attached = committer.nccl.remove(ready?);
        let done = self.deregister(&mut attached, |_| true, for_nccl(deadline));
        self.agree_on_nccl(
            &mut committer,
            ("nccl-unregistered", "deregistering windows from NCCL"),
            done.map(|()| 0),
            deadline,
        )
    }

    /// Checks that a communicator has the pool's ranks, and that the pool's lanes suit NCCL.
    fn check_fit(&self, nccl: Nccl, comm: NcclComm) -> Result<()> {
        let crossing: Vec<String> = self
            .0
            .lanes
            .iter()
            .filter(|lane| lane.name != CONTROL_LANE)
            .filter(|lane| lane.is_symmetric() && lane.policy() != WindowPolicy::PerSegment)
            .map(|lane| lane.name.clone())
            .collect();
        if !crossing.is_empty() {
            return Err(Error::invalid_argument(format!(
                "blocks of the lanes {crossing:?} may cross segments, but a window of NCCL is one \
                 segment; build the pool with the window policy per-segment"
            )));
        }
        let (rank, world) = nccl.place(comm)?;
        let (own, all) = (self.0.group.rank(), self.0.group.world());
        if (rank, world) != (own, all) {
            return Err(Error::invalid_argument(format!(
                "this process is rank {rank} of {world} in the communicator, but rank {own} of {all} in the \
                 pool"
            )));
        }
        Ok(())
    }

    /// Exchanges the outcomes of a step, so that every rank returns the same. Ranks that miss each other's
    /// outcome cannot know what the others will do: the pool then makes no more commits.
    fn agree_on_nccl(
        &self,
        committer: &mut Committer,
        (name, step): (&str, &str),
        own: Result<i32>,
        deadline: Deadline,
    ) -> Result<()> {
        let status = encode_status(NcclStatus, own.map_err(|error| error.kind().clone()))?;
        let gathered = committer.peers.all_gather(&self.0.group, name, &status, deadline);
        let gathered = gathered.inspect_err(|error| committer.stop_commits_after(error))?;
        let statuses: Vec<NcclStatus> = decode_all(&gathered)?;
        // NCCL still holds a call of such a rank, and may touch the memory that the call names.
        let held = statuses.iter().find_map(|NcclStatus(status)| {
            status.as_ref().err().filter(|kind| matches!(kind, ErrorKind::Timeout { .. }))
        });
        if let Some(kind) = held {
            committer.stop_commits_after(&Error::from_kind(kind.clone()));
        }
        let versions = all_ok(step, statuses.into_iter().map(|NcclStatus(status)| status))?;
        match versions.iter().position(|version| *version != versions[0]) {
            None => Ok(()),
            Some(rank) => Err(Error::mismatch(format!(
                "rank 0 has NCCL {}, rank {rank} has {}",
                versions[0], versions[rank]
            ))
            .naming(u32::try_from(rank))),
        }
    }

    /// Registers the windows that a communicator does not have yet.
    #[allow(unsafe_code)] // FFI: windows' memory for NCCL
    fn register_missing(&self, attached: &mut Attached, deadline: Deadline) -> Result<()> {
        let windows = self.windows();
        let layout = self.layout();
        for lane in self.0.lanes.iter().filter(|lane| lane.name != CONTROL_LANE) {
            let mut own: Vec<_> =
                windows.list().iter().filter(|window| window.lane == lane.name).collect();
            own.sort_by_key(|window| window.counter);
            for window in own {
                let has = |has: &Registered| has.lane == lane.name && has.counter == window.counter;
                if attached.windows.iter().any(has) {
                    continue;
                }
                let address = layout.address(layout.rank, window.offset);
                let (nccl, comm, bytes) = (attached.nccl, attached.comm, window.bytes);
                let what = format!(
                    "ncclCommWindowRegister of rank {}'s window {} of lane {:?}, {bytes} bytes at offset {:#x}",
                    self.rank(),
                    window.counter,
                    lane.name,
                    window.offset
                );
                let made = self.call_nccl(&what, deadline, move || {
                    // SAFETY: the segment is mapped for as long as it is a window, and a commit that retires it deregisters it
                    // before (`deregister_retired`). The thread keeps the pool, which keeps the mapping, until NCCL returns.
                    unsafe { nccl.register(comm, address, bytes, deadline) }
                })?;
                attached.windows.push(Registered {
                    lane: lane.name.clone(),
                    counter: window.counter,
                    window: made,
                });
            }
        }
        Ok(())
    }

    /// Makes a call of NCCL on a thread of its own, and waits for it until the deadline.
    fn call_nccl<T: Send + 'static>(
        &self,
        what: &str,
        deadline: Deadline,
        work: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<T> {
        // The thread keeps the pool, and so the memory, until NCCL returns.
        let pool = self.clone();
        let work = move || on_device(&**pool.driver(), work);
        blocking::within(deadline.remaining(), what, work)?.unwrap_or_else(|| {
            let held = format!("for NCCL to return from {what}");
            Err(Error::timeout(held, deadline.budget(), vec![self.rank()]))
        })
    }

    /// Deregisters the windows for which `gone` is true, in order. Continues after an error, but not after a call that
    /// NCCL has not returned from.
    #[allow(unsafe_code)] // FFI: gives windows of NCCL up
    fn deregister(
        &self,
        attached: &mut Attached,
        gone: impl Fn(&Registered) -> bool,
        deadline: Deadline,
    ) -> Result<()> {
        let (nccl, comm) = (attached.nccl, attached.comm);
        let mut outcome: Result<()> = Ok(());
        for window in attached.windows.extract_if(.., |window| gone(window)) {
            if outcome.as_ref().is_err_and(Error::is_timeout) {
                break;
            }
            let what = format!(
                "ncclCommWindowDeregister of rank {}'s window {} of lane {:?}",
                self.rank(),
                window.counter,
                window.lane
            );
            let taken = self.call_nccl(&what, deadline, move || {
                // SAFETY: `register_missing` made the window of this communicator, and it has just been taken out of the list.
                unsafe { nccl.deregister(comm, window.window, deadline) }
            });
            // A call that NCCL still holds says more than one that failed.
            outcome = if taken.as_ref().is_err_and(Error::is_timeout) {
                taken
            } else {
                outcome.and(taken)
            };
        }
        outcome
    }

    /// Deregisters windows that not all ranks could register.
    fn take_back(
        &self,
        attached: &mut Attached,
        gone: impl Fn(&Registered) -> bool,
        deadline: Deadline,
        committer: &mut Committer,
    ) {
        if let Err(error) = self.deregister(attached, gone, deadline) {
            tracing::error!(%error, "windows that were not registered on all ranks could not be deregistered");
            committer.stop_commits_after(&error);
        }
    }

    /// Deregisters the windows of segments that the commit is about to unmap.
    pub(super) fn deregister_retired(
        &self,
        committer: &mut Committer,
        locked: &[LockedLane<'_>],
        deadline: Deadline,
    ) -> Result<()> {
        let retired = |window: &Registered| {
            locked.iter().filter(|locked| locked.lane.name == window.lane).any(|locked| {
                locked.inner.state.retired().any(|segment| segment.counter == window.counter)
            })
        };
        committer
            .nccl
            .iter_mut()
            .try_for_each(|attached| self.deregister(attached, retired, deadline))
    }

    /// Registers the new windows of a commit. If that fails, it does so on all ranks: then no communicator gets
    /// more windows, but those that it has stay known, and are deregistered before their memory is unmapped.
    /// `ready` is an error if this rank did not complete the commit, because NCCL would wait for such a rank.
    pub(super) fn register_new(
        &self,
        committer: &mut Committer,
        ready: Result<()>,
        deadline: Deadline,
    ) -> Result<()> {
        if !committer.nccl.iter().any(|attached| attached.gets_more) {
            return Ok(());
        }
        let mut attached = std::mem::take(&mut committer.nccl);
        let had: Vec<usize> = attached.iter().map(|attached| attached.windows.len()).collect();
        let finished = ("nccl-finished", "finishing the commit");
        let registered = ("nccl-new", "registering new windows with NCCL");
        let done =
            self.agree_on_nccl(committer, finished, ready.map(|()| 0), deadline).and_then(|()| {
                let each = |attached| self.register_missing(attached, for_nccl(deadline));
                let mut getting = attached.iter_mut().filter(|attached| attached.gets_more);
                let done = getting.try_for_each(each);
                self.agree_on_nccl(committer, registered, done.map(|()| 0), deadline)
            });
        if done.is_err() {
            // Ranks that lost each other must not wait for each other in NCCL, and unmap nothing more.
            let together = committer.broken.is_none() && committer.incomplete.is_none();
            for (attached, had) in attached.iter_mut().zip(had) {
                attached.gets_more = false;
                if together {
                    let new: Vec<_> = attached.windows[had..]
                        .iter()
                        .map(|window| (window.lane.clone(), window.counter))
                        .collect();
                    let is_new =
                        |window: &Registered| new.contains(&(window.lane.clone(), window.counter));
                    self.take_back(attached, is_new, deadline, committer);
                }
            }
        }
        committer.nccl = attached;
        done.map_err(|error| {
            error.context(
                "the memory is committed, but NCCL has no windows of it, nor of later memory",
            )
        })
    }
}
