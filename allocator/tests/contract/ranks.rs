//! Running ranks, and the kinds of memory that they use.

use std::time::Duration;

use symmpool_allocator::driver::{
    DeviceIdentity, DriverWrapper, Exported, MemoryDriver, Physical, SimDriver, Transport,
};
pub(crate) use symmpool_allocator::testing::on_each as each;
use symmpool_allocator::testing::on_ranks;
use symmpool_allocator::{Driver, Error, Group, Result};

/// The timeout of ranks in tests where none should be reached.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// Runs `body` as every rank of a group of `world`; returns their results in rank order.
pub(crate) fn ranks<R: Send>(world: u32, body: impl Fn(Group) -> R + Sync) -> Vec<R> {
    on_ranks(world, |group| body(group.with_timeout(PATIENCE)))
}

/// Asserts that all errors are the same, except for the rank and commit that they name; returns the first.
pub(crate) fn same_error(errors: Vec<Error>) -> Error {
    let essence = |error: &Error| {
        let text = error.to_string();
        let (_, rest) = text.split_once("commit ").unwrap_or(("", &text));
        rest.to_owned()
    };
    for error in &errors[1..] {
        assert_eq!(essence(error), essence(&errors[0]));
    }
    errors.into_iter().next().expect("at least one rank")
}

/// The three ways in which handles get to peers.
#[derive(Clone, Copy, Debug)]
pub(crate) enum HandlePath {
    /// Memory files, whose descriptors are sent over Unix sockets.
    Host,
    /// Addresses without memory; handles are bytes that go through the store.
    Bytes,
    /// Addresses without memory; there are no handles.
    Sim,
}

impl HandlePath {
    pub(crate) const ALL: [Self; 3] = [Self::Host, Self::Bytes, Self::Sim];

    pub(crate) fn driver(self, seed: u64) -> Driver {
        match self {
            Self::Host => Driver::host().expect("memory files"),
            Self::Bytes => Driver::new(Bytes(SimDriver::new(seed))),
            Self::Sim => Driver::sim(seed),
        }
    }
}

/// Simulated memory whose handles are bytes, like fabric handles.
struct Bytes(SimDriver);

// SAFETY: every call is forwarded to the wrapped driver, with the same values.
unsafe impl DriverWrapper for Bytes {
    fn inner(&self) -> &dyn MemoryDriver {
        &self.0
    }

    fn name(&self) -> &'static str {
        "bytes"
    }

    fn device(&self) -> DeviceIdentity {
        DeviceIdentity { kind: "bytes".into(), ..self.0.device() }
    }

    fn transport(&self) -> Transport {
        Transport::Store
    }

    fn export(&self, physical: &Physical) -> Result<Exported> {
        self.0.export(physical)?;
        Ok(Exported::Bytes(physical.bytes().to_le_bytes().to_vec()))
    }

    fn import(&self, exported: Exported, bytes: u64) -> Result<Physical> {
        match exported {
            Exported::Bytes(handle) if handle == bytes.to_le_bytes() => {
                self.0.import(Exported::Derived, bytes)
            }
            other => Err(Error::invalid_argument(format!("{other:?} is no handle to {bytes}"))),
        }
    }
}
