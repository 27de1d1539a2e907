//! Where one rank's data of a call begins.

/// Where one rank's input or output of a call begins.
///
/// All ranks must pass the same kind of place, because it decides how the data travels. Ranks compare it in the
/// handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Memory of this process alone; its data passes through the communicator's scratch.
    Unregistered(*mut u8),
    /// An offset of the heap, the same on every rank, that every rank has mapped; peers reach the
    /// data itself.
    Window(u64),
}
impl Place {
    /// Whether this is memory that peers reach.
    #[inline]
    pub fn is_window(self) -> bool {
        matches!(self, Self::Window(_))
    }

    /// The place that lies `bytes` bytes after this one.
    pub(crate) fn offset_by(self, bytes: u64) -> Self {
        match self {
            Self::Window(offset) => Self::Window(offset + bytes),
            Self::Unregistered(pointer) => Self::Unregistered(pointer.wrapping_add(bytes as usize)),
        }
    }
}
