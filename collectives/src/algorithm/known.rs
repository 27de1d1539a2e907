//! The names of algorithms that this process has made, by the part of their hashes that call descriptions have room for:
//! so errors can say the name of what a rank called.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use symmpool_allocator::short;

/// More names than programs have algorithms. Further ones are known by their hashes alone.
const MAX_NAMES: usize = 4096;

/// Names of an algorithm in errors.
#[derive(Debug)]
pub(crate) struct KnownNames {
    pub(crate) name: String,
    pub(crate) collective: String,
}

static NAMES: Mutex<BTreeMap<u32, Arc<KnownNames>>> = Mutex::new(BTreeMap::new());

fn names() -> MutexGuard<'static, BTreeMap<u32, Arc<KnownNames>>> {
    // Nothing is half-changed after a panic: insertions are the last thing.
    NAMES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Remembers what an algorithm is called.
pub(super) fn remember(hash: u64, name: &str, collective: &str) {
    let mut names = names();
    if names.len() < MAX_NAMES {
        let known = || KnownNames {
            name: short(name).to_string(),
            collective: short(collective).to_string(),
        };
        names.entry(hash as u32).or_insert_with(|| Arc::new(known()));
    }
}

/// The algorithm of a hash, of which a call description has the lowest 32 bits.
pub(crate) fn known(hash: u64) -> Option<Arc<KnownNames>> {
    names().get(&(hash as u32)).cloned()
}
