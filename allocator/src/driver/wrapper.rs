//! Drivers that change some calls of another driver and pass on the rest.

#![allow(unsafe_code)] // passes on another driver's promise

use super::{
    CudaDriver, DeviceIdentity, Event, Exported, MemoryDriver, Physical, Reservation, Step, Stream,
    Transport,
};
use crate::{Deadline, Result};

/// Declares [`DriverWrapper`] from the methods of [`MemoryDriver`]: each is listed once.
macro_rules! driver_wrapper {
    ($(fn $method:ident(&self $(, $argument:ident: $kind:ty)*) $(-> $result:ty)?;)*) => {
        /// A driver made of another one. It writes the methods that it changes; all others call the same
        /// method of [`inner`](DriverWrapper::inner). Whatever implements this is a [`MemoryDriver`].
        ///
        /// # Safety
        ///
        /// An implementation must keep the promises of [`MemoryDriver`]. Methods that are not written here keep those
        /// of the inner driver.
        pub unsafe trait DriverWrapper: Send + Sync {
            /// The driver that does what is not changed.
            fn inner(&self) -> &dyn MemoryDriver;

            /// See [`MemoryDriver::map_again`].
            ///
            /// # Safety
            ///
            /// You must keep the promises of [`MemoryDriver::map_again`].
            unsafe fn map_again(
                &self,
                reservation: &Reservation,
                offset: u64,
                from: u64,
                bytes: u64,
            ) -> Result<()> {
                // SAFETY: the caller promised that `bytes` of this driver's memory are mapped from `from` on until
                // this returns; they are the inner driver's.
                unsafe { self.inner().map_again(reservation, offset, from, bytes) }
            }

            $(
                #[doc = concat!("See [`MemoryDriver::", stringify!($method), "`].")]
                fn $method(&self $(, $argument: $kind)*) $(-> $result)? {
                    self.inner().$method($($argument),*)
                }
            )*
        }

        // SAFETY: an implementation of `DriverWrapper` promises what `MemoryDriver` asks, and the methods below call
        // it or the inner driver.
        unsafe impl<W: DriverWrapper> MemoryDriver for W {
            unsafe fn map_again(
                &self,
                reservation: &Reservation,
                offset: u64,
                from: u64,
                bytes: u64,
            ) -> Result<()> {
                // SAFETY: the caller promised that `bytes` of this driver's memory are mapped from `from` on until
                // this returns.
                unsafe { DriverWrapper::map_again(self, reservation, offset, from, bytes) }
            }

            $(
                fn $method(&self $(, $argument: $kind)*) $(-> $result)? {
                    DriverWrapper::$method(self $(, $argument)*)
                }
            )*
        }
    };
}

driver_wrapper! {
    fn name(&self) -> &'static str;
    fn device(&self) -> DeviceIdentity;
    fn granularity(&self) -> u64;
    fn transport(&self) -> Transport;
    fn host_accessible(&self) -> bool;
    fn reserve(&self, bytes: u64, align: u64) -> Result<Reservation>;
    fn unreserve(&self, reservation: Reservation) -> Result<()>;
    fn check_room(&self, bytes: u64) -> Result<()>;
    fn create(&self, bytes: u64) -> Result<Physical>;
    fn create_lazily(&self, bytes: u64) -> Result<Physical>;
    fn create_sparsely(&self, bytes: u64) -> Result<Physical>;
    fn export(&self, physical: &Physical) -> Result<Exported>;
    fn has_slow_handles(&self) -> bool;
    fn import(&self, exported: Exported, bytes: u64) -> Result<Physical>;
    fn map(&self, reservation: &Reservation, offset: u64, physical: &Physical) -> Result<()>;
    fn map_all(&self, reservation: &Reservation, offset: u64, physicals: &[Physical]) -> Result<()>;
    fn unmap(&self, reservation: &Reservation, offset: u64, bytes: u64) -> Result<()>;
    fn release(&self, physical: Physical) -> Result<()>;
    fn record_event(&self, stream: Stream) -> Result<Event>;
    fn wait_event(&self, stream: Stream, event: &Event) -> Result<()>;
    fn is_event_done(&self, event: &Event) -> Result<bool>;
    fn release_event(&self, event: Event);
    fn synchronize(&self) -> Result<()>;
    fn synchronize_by(&self, deadline: Deadline) -> Result<()>;
    fn is_capturing(&self, stream: Stream) -> bool;
    fn as_cuda(&self) -> Option<&CudaDriver>;
    fn at_step(&self, step: Step) -> Result<()>;
}
