//! A limit for all the memory that clients can make the server hold.

use std::cell::Cell;
use std::rc::Rc;

use crate::{Error, Result};

/// Counts bytes held on behalf of clients: values, parts, half-read requests, unsent replies.
#[derive(Clone, Debug)]
pub(super) struct Meter(Rc<Account>);

#[derive(Debug)]
struct Account {
    held: Cell<usize>,
    limit: usize,
}

impl Meter {
    pub(super) fn new(limit: usize) -> Self {
        Self(Rc::new(Account { held: Cell::new(0), limit }))
    }

    /// Counts `bytes`, or refuses with [`Error::is_out_of_memory`].
    pub(super) fn charge(&self, bytes: usize) -> Result<Charge> {
        let mut charge = Charge { meter: self.clone(), bytes: 0 };
        charge.grow(bytes)?;
        Ok(charge)
    }

    /// Counts `bytes` even beyond the limit: for replies, after which as much is freed.
    pub(super) fn charge_reply(&self, bytes: usize) -> Charge {
        self.0.held.set(self.0.held.get().saturating_add(bytes));
        Charge { meter: self.clone(), bytes }
    }

    #[cfg(any(test, feature = "testing"))]
    pub(super) fn held(&self) -> usize {
        self.0.held.get()
    }
}

/// Bytes counted in a [`Meter`] until this is dropped.
#[derive(Debug)]
pub(super) struct Charge {
    meter: Meter,
    bytes: usize,
}

impl Charge {
    pub(super) fn grow(&mut self, bytes: usize) -> Result<()> {
        let account = &self.meter.0;
        match account.held.get().checked_add(bytes) {
            Some(held) if held <= account.limit => account.held.set(held),
            _ => {
                return Err(Error::out_of_memory(format!(
                    "the store holds {} of {} bytes and has no room for {bytes} more; delete \
                     keys, or give its server a higher limit",
                    account.held.get(),
                    account.limit
                )));
            }
        }
        self.bytes += bytes;
        Ok(())
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        let held = &self.meter.0.held;
        held.set(held.get().saturating_sub(self.bytes));
    }
}

/// Bytes with their charge; clones share both. Orders by content.
#[derive(Clone, Debug)]
pub(super) struct MeteredPayload(Rc<(Vec<u8>, Charge)>);

impl MeteredPayload {
    pub(super) fn new(bytes: Vec<u8>, charge: Charge) -> Self {
        Self(Rc::new((bytes, charge)))
    }
}

impl AsRef<[u8]> for MeteredPayload {
    fn as_ref(&self) -> &[u8] {
        &self.0.0
    }
}

impl PartialEq for MeteredPayload {
    fn eq(&self, other: &Self) -> bool {
        self.as_ref() == other.as_ref()
    }
}

impl Eq for MeteredPayload {}

impl PartialOrd for MeteredPayload {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for MeteredPayload {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.as_ref().cmp(other.as_ref())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn charges_are_returned_when_the_last_holder_goes() {
        let meter = Meter::new(100);
        let mut charge = meter.charge(60).unwrap();
        assert!(meter.charge(41).unwrap_err().is_out_of_memory());
        charge.grow(40).unwrap();
        assert!(charge.grow(1).unwrap_err().is_out_of_memory());
        let payload = MeteredPayload::new(vec![0; 100], charge);
        let other = payload.clone();
        drop(payload);
        assert_eq!(meter.held(), 100);
        let reply = meter.charge_reply(50);
        assert!(meter.charge(0).unwrap_err().is_out_of_memory());
        drop((other, reply));
        assert_eq!(meter.held(), 0);
    }
}
