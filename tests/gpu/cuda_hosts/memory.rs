//! Copies to and from blocks on a device.

#![allow(unsafe_code)] // names blocks by their addresses

use symmpool_allocator::{Block, Error, Pool, Result};

/// Copies bytes to a block, in front of what the stream is given next.
pub(crate) fn write(pool: &Pool, block: &Block<u8>, bytes: &[u8]) -> Result<()> {
    let cuda = pool.driver().as_cuda().ok_or_else(|| Error::unsupported("no device"))?;
    // SAFETY: the block lives, and is as long; nobody else touches it.
    unsafe { cuda.copy_from_host(block.address(), bytes) }
}

/// The first bytes of a block, when the stream has done what it was given.
pub(crate) fn read(pool: &Pool, block: &Block<u8>, count: usize) -> Result<Vec<u8>> {
    let cuda = pool.driver().as_cuda().ok_or_else(|| Error::unsupported("no device"))?;
    let mut bytes = vec![0; count];
    // SAFETY: the block lives, and is as long.
    unsafe { cuda.copy_to_host(&mut bytes, block.address()) }?;
    Ok(bytes)
}
