//! Stores: a small key-value service through which ranks find each other.
//!
//! A [`Store`] is needed only at rendezvous and commit, never on the path of an allocation or a
//! collective. [`MemoryStore`] serves ranks that are threads of one process, [`FileStore`] ranks
//! that share a filesystem, [`TcpStore`] everyone else.
//!
//! | store | a value lives in | a gather costs a rank |
//! | --- | --- | --- |
//! | memory | the process, until the last handle is dropped | one step, the result is shared |
//! | file | a file of the directory, until deleted | one file written, `world` files read |
//! | tcp | the server's memory, until the server is dropped | one round trip |
//!
//! All stores keep these rules: a rank whose wait in [`Store::all_gather`] times out takes its part
//! back, so that ranks that come later get an error that names it instead of going on without it; two
//! ranks with the same number, or with different world sizes, make the gather an error for all its ranks.

mod file;
mod gathered;
mod gathering;
mod memory;
pub mod tcp;
mod traffic;

pub use file::FileStore;
pub use gathered::Gathered;
pub use memory::MemoryStore;
pub use tcp::{TcpServer, TcpStore};
pub use traffic::StoreTraffic;

use std::time::Duration;

use crate::{Deadline, Error, Result};

/// Says whether a waiting rank is to stop.
pub(crate) type Stop<'a> = &'a dyn Fn() -> bool;

/// How often a waiting rank asks whether it is to stop.
pub(crate) const ASK_EVERY: Duration = Duration::from_secs(1);

/// The longest key a store takes, in bytes.
pub const MAX_KEY: usize = 1024;

/// The longest value a store takes, in bytes.
pub const MAX_VALUE: usize = 16 << 20;

/// The most ranks that can take part in a gather, and so the most of a
/// [`Group`](crate::Group::MAX_WORLD).
pub const MAX_WORLD: u32 = 65_536;

/// The most bytes the distinct parts of one gather may have together.
pub const MAX_GATHERED: usize = 256 << 20;

/// A key-value store. Implementations are thread safe; calls may block until their deadline and
/// return [`Error::is_timeout`] errors that name missing ranks where ranks are
/// known.
///
/// Keys are at most [`MAX_KEY`] bytes of UTF-8, values at most [`MAX_VALUE`] bytes; more is
/// refused with [`Error::is_invalid_argument`].
pub trait Store: Send + Sync {
    /// Stores `value` under `key`, replacing what was there.
    fn set(&self, key: &str, value: &[u8], deadline: Deadline) -> Result<()>;

    /// The value of `key`, waiting for it until `deadline`.
    fn get(&self, key: &str, deadline: Deadline) -> Result<Vec<u8>>;

    /// Adds `delta` to the counter under `key` (absent counts as 0) and returns the sum. The sum
    /// is stored as decimal text.
    fn add(&self, key: &str, delta: i64, deadline: Deadline) -> Result<i64>;

    /// Removes `key`; says whether it was there.
    fn delete(&self, key: &str, deadline: Deadline) -> Result<bool>;

    /// Contributes `value` as `rank`'s part of the gather named `key` and returns every rank's
    /// part, waiting until all `world` ranks have contributed.
    ///
    /// A key serves one gather. The parts are kept at least until every rank has them. A timeout
    /// names the ranks that did not contribute, and takes this rank's part back, so that it may
    /// try again. A rank that contributes twice, or with another world size, is an error for
    /// every rank of the gather ([`Error::is_diverged`]). Ranks are below `world`, worlds at most
    /// [`MAX_WORLD`], and the distinct parts at most [`MAX_GATHERED`] bytes together.
    ///
    /// Stores implement [`all_gather_until`](Store::all_gather_until), of which this is the form that
    /// nothing stops.
    fn all_gather(
        &self,
        key: &str,
        rank: u32,
        world: u32,
        value: &[u8],
        deadline: Deadline,
    ) -> Result<Gathered> {
        self.all_gather_until(key, rank, world, value, deadline, None)
    }

    /// [`all_gather`](Store::all_gather) for a rank that may be interrupted: once `stop`, which the
    /// thread that waits calls about once a second, returns true, the rank's part is taken back as after
    /// a timeout, and the error is [`Error::is_invalid_state`] and names the ranks that are missing. If
    /// the gather is complete by then, it succeeds.
    ///
    /// This default is made of [`set`](Store::set) and [`get`](Store::get): it costs `world` round trips,
    /// leaves its keys behind, does not notice two ranks with one number and does not call `stop`. Stores
    /// that can do better should.
    fn all_gather_until(
        &self,
        key: &str,
        rank: u32,
        world: u32,
        value: &[u8],
        deadline: Deadline,
        stop: Option<&dyn Fn() -> bool>,
    ) -> Result<Gathered> {
        let _ = stop;
        check_gather(key, rank, world, value)?;
        let own = format!("{key}/{rank}");
        self.set(&own, value, deadline)?;
        let mut parts = Vec::with_capacity(world as usize);
        let mut missing = Vec::new();
        for peer in 0..world {
            match self.get(&format!("{key}/{peer}"), deadline) {
                Ok(part) => parts.push(part),
                Err(error) if error.is_timeout() => missing.push(peer),
                Err(error) => return Err(error),
            }
        }
        if missing.is_empty() {
            Ok(Gathered::from_parts(parts))
        } else {
            // Otherwise a second attempt would leave this part to ranks that come before the new one is
            // there. A moment beyond the deadline is allowed for this.
            let _ = self.delete(&own, Deadline::seconds(1));
            Err(Error::timeout(format!("in all_gather {key:?}"), deadline.budget(), missing))
        }
    }

    /// How this store was used, for those that count.
    fn traffic(&self) -> StoreTraffic {
        StoreTraffic::default()
    }
}

/// Refuses keys and values beyond the limits every store shares.
pub(crate) fn check_limits(key: &str, value: &[u8]) -> Result<()> {
    if key.is_empty() || key.len() > MAX_KEY {
        return Err(Error::invalid_argument(format!(
            "store key of {} bytes; keys have 1 to {MAX_KEY}",
            key.len()
        )));
    }
    if value.len() > MAX_VALUE {
        return Err(Error::invalid_argument(format!(
            "store value of {} bytes under {key:?}; the limit is {MAX_VALUE}",
            value.len()
        )));
    }
    Ok(())
}

/// Refuses gathers that make no sense: no ranks, too many, or a rank outside the world.
pub(crate) fn check_gather(key: &str, rank: u32, world: u32, value: &[u8]) -> Result<()> {
    check_limits(key, value)?;
    if world == 0 || world > MAX_WORLD {
        return Err(Error::invalid_argument(format!(
            "all_gather {key:?} in a world of {world}; worlds have 1 to {MAX_WORLD} ranks"
        )));
    }
    if rank >= world {
        return Err(Error::invalid_argument(format!(
            "all_gather {key:?} by rank {rank} of a world of {world}; ranks are below the world"
        )));
    }
    Ok(())
}

/// The new text of the counter under `key`: `old` (absent counts as 0) plus `delta`.
pub(crate) fn counter_sum(key: &str, old: Option<&[u8]>, delta: i64) -> Result<i64> {
    let Some(old) = old else { return Ok(delta) };
    let number: i64 =
        std::str::from_utf8(old).ok().and_then(|text| text.parse().ok()).ok_or_else(|| {
            Error::invalid_argument(format!(
                "add to {key:?}, which holds {} bytes that are not a decimal number",
                old.len()
            ))
        })?;
    number.checked_add(delta).ok_or_else(|| {
        Error::invalid_argument(format!(
            "add of {delta} to {key:?}, which holds {number}: overflow"
        ))
    })
}
