//! This rank's addresses of a collective's data.

use symmpool_allocator::{Error, HeapLayout, Result};

use crate::Place;
use crate::host::layout::control::ControlBlock;

/// Resolves places to this rank's addresses, and refuses places that cannot be right.
#[derive(Clone, Copy)]
pub(in crate::host) struct Resolver<'a> {
    pub(in crate::host) layout: &'a HeapLayout,
    pub(in crate::host) control: &'a ControlBlock,
}

impl Resolver<'_> {
    /// This rank's address of `bytes` bytes at `place`.
    #[inline]
    pub(in crate::host) fn address(
        &self,
        what: &'static str,
        place: Place,
        bytes: usize,
    ) -> Result<*mut u8> {
        match place {
            Place::Unregistered(pointer) => {
                if bytes > 0
                    && (pointer.is_null() || (pointer as usize).checked_add(bytes).is_none())
                {
                    return Err(Error::invalid_argument(format!(
                        "the {what} of {bytes} bytes at {pointer:?} is not memory"
                    )));
                }
                Ok(pointer)
            }
            Place::Window(offset) => {
                let end = offset.checked_add(bytes as u64);
                if end.is_none_or(|end| end > self.layout.stride) {
                    return Err(Error::invalid_argument(format!(
                        "the {what} of {bytes} bytes at heap offset {offset:#x} does not fit a \
                         slot of {} bytes",
                        self.layout.stride
                    )));
                }
                if self.control.overlaps(self.layout, offset, bytes as u64) {
                    return Err(Error::invalid_argument(format!(
                        "the {what} of {bytes} bytes at heap offset {offset:#x} lies over the \
                         communicator's own control block"
                    )));
                }
                let slot = self.layout.base + u64::from(self.layout.rank) * self.layout.stride;
                Ok((slot + offset) as *mut u8)
            }
        }
    }
}

/// Whether a call may be in place, and where its output then lies.
#[derive(Clone, Copy)]
pub(crate) enum InPlace {
    Never,
    /// The output begins this many bytes into the input.
    OutputAt(usize),
    /// The input begins this many bytes into the output.
    InputAt(usize),
}

/// The input and output of a call, resolved to addresses.
#[derive(Clone, Copy)]
pub(crate) struct Data {
    pub(crate) input: Place,
    pub(crate) output: Place,
    /// This rank's address of the input.
    pub(crate) from: *const u8,
    /// This rank's address of the output.
    pub(crate) to: *mut u8,
    pub(crate) in_place: bool,
}

/// Refuses an output that overlaps the input.
#[inline]
pub(crate) fn disjoint(
    (input, input_bytes): (*mut u8, usize),
    (output, output_bytes): (*mut u8, usize),
) -> Result<()> {
    let (a, b) = (input as usize, output as usize);
    if input_bytes > 0 && output_bytes > 0 && a < b + output_bytes && b < a + input_bytes {
        return Err(Error::invalid_argument(format!(
            "the input ({input_bytes} bytes at {input:?}) and the output ({output_bytes} bytes at \
             {output:?}) overlap; pass buffers that do not, or that are in place exactly as the \
             operation allows"
        )));
    }
    Ok(())
}

/// The size in bytes that `checked_mul` computed, or an error if it overflowed.
#[inline]
pub(crate) fn checked(bytes: Option<usize>) -> Result<usize> {
    bytes.filter(|bytes| *bytes <= isize::MAX as usize).ok_or_else(|| {
        Error::invalid_argument("a buffer larger than any address space; check the counts")
    })
}
