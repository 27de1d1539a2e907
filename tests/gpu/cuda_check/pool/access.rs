//! Reading and writing a pool's memory, by the CPU or by CUDA copies.

use symmpool_allocator::driver::CudaDriver;
use symmpool_allocator::{Driver, Result};

use crate::CheckedDriver;

/// How this process accesses the memory of its driver.
pub(super) enum ForeignAccess {
    Host,
    /// A second driver of the same device. Copies need the device, not the driver that mapped the memory.
    Cuda(Box<CudaDriver>),
}

impl ForeignAccess {
    /// The driver of `rank`, and how to access its memory.
    pub(super) fn open(kind: CheckedDriver, rank: u32) -> Result<(Driver, Self)> {
        match kind {
            CheckedDriver::Host => Ok((Driver::host()?, Self::Host)),
            CheckedDriver::Cuda => {
                let ordinal = rank % CudaDriver::device_count()?.max(1);
                let copies = CudaDriver::new(ordinal)?;
                Ok((Driver::cuda(ordinal)?, Self::Cuda(Box::new(copies))))
            }
        }
    }

    /// Writes `bytes` to `address`.
    ///
    /// # Safety
    ///
    /// The range is mapped by this process's driver, and nobody else uses it meanwhile.
    pub(super) unsafe fn write(&self, address: u64, bytes: &[u8]) -> Result<()> {
        match self {
            Self::Host => {
                // SAFETY: the caller promised that the range is mapped and that nobody else uses it; the slice does
                // not overlap a heap.
                unsafe {
                    std::ptr::copy_nonoverlapping(bytes.as_ptr(), address as *mut u8, bytes.len());
                }
                Ok(())
            }
            // SAFETY: the caller promised that the range is mapped by this driver and that nobody else uses it.
            Self::Cuda(driver) => unsafe { driver.copy_from_host(address, bytes) },
        }
    }

    /// Reads `count` bytes from `address`.
    ///
    /// # Safety
    ///
    /// The range is mapped by this process's driver, and nobody writes it meanwhile.
    pub(super) unsafe fn read(&self, address: u64, count: u64) -> Result<Vec<u8>> {
        let mut bytes = vec![0; count as usize];
        match self {
            Self::Host => {
                let (from, to) = (address as *const u8, bytes.as_mut_ptr());
                // SAFETY: the caller promised that the range is mapped and that nobody writes it; the vector does not
                // overlap a heap.
                unsafe { std::ptr::copy_nonoverlapping(from, to, bytes.len()) };
            }
            // SAFETY: the caller promised that the range is mapped by this driver and that nobody writes it.
            Self::Cuda(driver) => unsafe { driver.copy_to_host(&mut bytes, address) }?,
        }
        Ok(bytes)
    }
}
