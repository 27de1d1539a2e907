//! Gathers of a group through its store.

use std::sync::atomic::Ordering;
use std::time::Duration;

use super::{Group, Interrupt, Member};
use crate::store::{Gathered, Store};
use crate::{Deadline, Error, Result};

/// How often a rank that waits for others checks whether they still exist.
const LOOK_EVERY: Duration = Duration::from_secs(1);

impl Group {
    /// Every rank's `value`. Collective; `what` says in messages, and in the key, what is
    /// gathered. A timeout names the ranks that are missing. A value longer than
    /// [`MAX_VALUE`](crate::store::MAX_VALUE) is refused here, while the other ranks wait.
    pub fn all_gather(&self, what: &str, value: &[u8], deadline: Deadline) -> Result<Gathered> {
        self.gather(what, |store, key, rank, world| {
            self.gather_unless_interrupted(store, (key, rank, world), value, deadline)
        })
    }

    /// Gathers for a caller that can tell which ranks are gone: while this waits, it calls `gone` about
    /// once a second, and fails with [`Error::is_peer_lost`] when a missing rank is among them. Most stores
    /// do not know whether a rank that has yet to come still exists.
    pub(crate) fn all_gather_from_living(
        &self,
        what: &str,
        value: &[u8],
        deadline: Deadline,
        gone: impl Fn() -> Vec<u32>,
    ) -> Result<Gathered> {
        self.gather(what, |store, key, rank, world| {
            loop {
                let turn = deadline.min(Deadline::after(LOOK_EVERY));
                let place = (key, rank, world);
                let error = match self.gather_unless_interrupted(store, place, value, turn) {
                    Err(error) if error.is_timeout() => error,
                    decided => return decided,
                };
                let missing = error.ranks();
                let lost: Vec<u32> =
                    gone().into_iter().filter(|rank| missing.contains(rank)).collect();
                if !lost.is_empty() {
                    return Err(Error::peer_lost(lost, "gone while others waited for it"));
                }
                if deadline.expired() {
                    return Err(error.waited_for(deadline.budget()));
                }
            }
        })
    }

    fn gather_unless_interrupted(
        &self,
        store: &dyn Store,
        (key, rank, world): (&str, u32, u32),
        value: &[u8],
        deadline: Deadline,
    ) -> Result<Gathered> {
        let requested = || self.interrupt.as_ref().is_some_and(Interrupt::is_requested);
        let stop: Option<&dyn Fn() -> bool> = self.interrupt.is_some().then_some(&requested);
        store.all_gather_until(key, rank, world, value, deadline, stop)
    }

    /// Gathers as the group that this one descends from. That and all its descendants share the count of these gathers,
    /// which is `number`: the caller keeps it.
    pub(super) fn gather_of_root(
        &self,
        what: &str,
        number: u64,
        value: &[u8],
        deadline: Deadline,
    ) -> Result<Gathered> {
        // No other gather's key begins so: names of children have a number.
        let key = format!("{}/{what}/all/{number}", self.namespace.root.name);
        self.gather_at(&key, |store, key, rank, world| {
            self.gather_unless_interrupted(store, (key, rank, world), value, deadline)
        })
    }

    /// Makes the group's next gather by `gather`, which is passed the store, the key, the rank and the world.
    fn gather(
        &self,
        what: &str,
        gather: impl FnOnce(&dyn Store, &str, u32, u32) -> Result<Gathered>,
    ) -> Result<Gathered> {
        let number = self.namespace.collectives.fetch_add(1, Ordering::Relaxed);
        self.gather_at(&format!("{}/{what}/{number}", self.name()), gather)
    }

    fn gather_at(
        &self,
        key: &str,
        gather: impl FnOnce(&dyn Store, &str, u32, u32) -> Result<Gathered>,
    ) -> Result<Gathered> {
        let Member { rank, world, .. } = *self.member;
        let gathered = gather(&*self.member.store, key, rank, world);
        let gathered = gathered.map_err(|error| {
            let doubt = self.member.doubt.as_ref().filter(|_| error.is_timeout());
            let error = match doubt {
                Some(doubt) => error.context(doubt),
                None => error,
            };
            error.context(format!("group {:?}, rank {rank} of {world}", self.name()))
        })?;
        if gathered.world() != world {
            return Err(Error::system(
                format!("gathering {key:?} as rank {rank}"),
                format!("the store returned {} parts for {world} ranks", gathered.world()),
            ));
        }
        Ok(gathered)
    }
}
