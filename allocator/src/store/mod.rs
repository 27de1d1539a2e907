//! Meeting points: a small key-value service through which ranks find each other.
//!
//! A [`Store`] is needed only at rendezvous and commit, never on the path of an allocation or a
//! collective. [`MemoryStore`] serves ranks that are threads of one process, [`FileStore`] ranks
//! that share a filesystem, [`TcpStore`] everyone else.

mod file;
mod memory;
pub mod tcp;

use std::sync::Arc;

pub use file::FileStore;
pub use memory::MemoryStore;
pub use tcp::{TcpServer, TcpStore};

use crate::{Deadline, Error, Result};

/// The longest key a store takes, in bytes.
pub const MAX_KEY: usize = 1024;

/// The longest value a store takes, in bytes.
pub const MAX_VALUE: usize = 16 << 20;

/// A key-value meeting point. Implementations are thread safe; calls may block until their
/// deadline and return [`Error::is_timeout`] errors that name missing ranks where ranks are
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
    /// names the ranks that did not contribute; a rank that contributes twice, or with another
    /// world size, is an error.
    ///
    /// This default is made of [`set`](Store::set) and [`get`](Store::get) and costs `world`
    /// round trips; stores that can answer in one should.
    fn all_gather(
        &self,
        key: &str,
        rank: u32,
        world: u32,
        value: &[u8],
        deadline: Deadline,
    ) -> Result<Gathered> {
        self.set(&format!("{key}/{rank}"), value, deadline)?;
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
            Err(Error::timeout(format!("in all_gather {key:?}"), deadline.budget(), missing))
        }
    }

    /// How this store was used, for those that count.
    fn traffic(&self) -> Traffic {
        Traffic::default()
    }
}

/// What a client of a store has sent and received.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Requests that waited for an answer.
    pub round_trips: u64,
    /// Payload bytes sent to the store.
    pub bytes_sent: u64,
    /// Payload bytes received from the store.
    pub bytes_received: u64,
}

/// The result of an all-gather: one part a rank, equal parts held (and sent) once.
///
/// What ranks publish at a commit is equal on all of them unless something is wrong, so keeping
/// distinct parts only makes an answer's size independent of the world's in the usual case.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gathered {
    distinct: Vec<Arc<[u8]>>,
    /// Rank to index into `distinct`.
    which: Vec<u32>,
}

impl Gathered {
    /// Collects parts in rank order.
    pub fn from_parts<P: AsRef<[u8]>>(parts: impl IntoIterator<Item = P>) -> Self {
        let mut distinct: Vec<Arc<[u8]>> = Vec::new();
        let mut index = std::collections::BTreeMap::<Arc<[u8]>, u32>::new();
        let mut which = Vec::new();
        for part in parts {
            let part = part.as_ref();
            let at = match index.get(part) {
                Some(&at) => at,
                None => {
                    let at = u32::try_from(distinct.len()).expect("at most u32::MAX ranks");
                    let part: Arc<[u8]> = part.into();
                    distinct.push(part.clone());
                    index.insert(part, at);
                    at
                }
            };
            which.push(at);
        }
        Self { distinct, which }
    }

    /// Rebuilds a result from its distinct parts and, for each rank, which of them is its own.
    /// `None` when an index has no part.
    pub fn from_distinct(distinct: Vec<Arc<[u8]>>, which: Vec<u32>) -> Option<Self> {
        let known = which.iter().all(|&at| (at as usize) < distinct.len());
        known.then_some(Self { distinct, which })
    }

    /// The number of ranks.
    pub fn world(&self) -> u32 {
        u32::try_from(self.which.len()).expect("at most u32::MAX ranks")
    }

    /// What `rank` contributed. Panics when `rank` is not below [`world`](Gathered::world).
    pub fn part(&self, rank: u32) -> &[u8] {
        &self.distinct[self.which[rank as usize] as usize]
    }

    /// The parts in rank order.
    pub fn parts(&self) -> impl ExactSizeIterator<Item = &[u8]> {
        self.which.iter().map(|&at| &*self.distinct[at as usize])
    }

    /// The distinct parts, in order of the first rank that contributed each.
    pub fn distinct(&self) -> &[Arc<[u8]>] {
        &self.distinct
    }

    /// For each rank, the index of its part in [`distinct`](Gathered::distinct).
    pub fn which(&self) -> &[u32] {
        &self.which
    }

    /// Whether every rank contributed the same bytes.
    pub fn is_uniform(&self) -> bool {
        self.distinct.len() <= 1
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
