//! Facts by which the algorithm of a reduce-scatter is chosen.

/// Facts by which the algorithm of a reduce-scatter is chosen. They are the same on every rank.
#[derive(Clone, Copy, Debug)]
pub(in crate::cuda) struct ScatterShape {
    pub(in crate::cuda) part: u64,
    pub(in crate::cuda) world: u32,
    pub(in crate::cuda) lamport: bool,
    pub(in crate::cuda) input_window: bool,
    /// Whether all ranks' devices are linked by NVLink, or are one device.
    pub(in crate::cuda) nvlinked: bool,
    /// Whether calls may run beside compute.
    pub(in crate::cuda) beside_compute: bool,
    /// Whether large calls beside compute go in pieces.
    pub(in crate::cuda) in_pieces: bool,
    /// Bytes of a part that one launch takes through inboxes.
    pub(in crate::cuda) launch: u64,
    /// Bytes of a part that scratch has room for.
    pub(in crate::cuda) room: u64,
}
