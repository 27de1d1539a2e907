//! How many pools this process has on each device.
//!
//! A process should take little of a device in all, however many groups it is in. So ranks tell each other at
//! rendezvous whether they have other pools there already; see [`Pool::is_first_on_device`](super::Pool).

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use crate::driver::Driver;

/// The pools of this process on each device, by the device's UUID.
static POOLS: Mutex<BTreeMap<String, u32>> = Mutex::new(BTreeMap::new());

/// One of the pools on a device, for as long as this lives.
#[derive(Debug)]
pub(super) struct OnDevice {
    /// `None` for memory of the host, and for a pool of one rank, which needs little: nobody keeps count of those.
    uuid: Option<String>,
    /// Whether there was no other pool there when this one was begun.
    pub(super) first: bool,
}

impl OnDevice {
    pub(super) fn enter(driver: &Driver, world: u32) -> Self {
        Self::of(driver.as_cuda().filter(|_| world > 1).map(|_| driver.device().uuid))
    }

    fn of(uuid: Option<String>) -> Self {
        let first = uuid.clone().is_none_or(|uuid| change(uuid, |count| count + 1) == 1);
        Self { uuid, first }
    }
}

impl Drop for OnDevice {
    fn drop(&mut self) {
        if let Some(uuid) = self.uuid.take() {
            change(uuid, |count| count.saturating_sub(1));
        }
    }
}

fn change(uuid: String, change: impl FnOnce(u32) -> u32) -> u32 {
    let mut pools = POOLS.lock().unwrap_or_else(PoisonError::into_inner);
    let count = pools.entry(uuid).or_default();
    *count = change(*count);
    *count
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_pool_is_first_again_when_all_are_gone() {
        let enter = || OnDevice::of(Some("of a test".to_owned()));
        let (one, two) = (enter(), enter());
        assert!(one.first && !two.first);
        drop(one);
        assert!(!enter().first, "the second is still there");
        drop(two);
        assert!(enter().first);
        let host = Driver::host().expect("host memory");
        assert!([2, 2].map(|world| OnDevice::enter(&host, world).first) == [true, true]);
    }
}
