//! Configuration of a lane. Ranks compare all of it at rendezvous (rule D8).

use crate::{Error, Result};

/// Sizes and offsets inside a lane are multiples of this many bytes, as in PyTorch's allocator.
pub const UNIT: u64 = 512;

/// The longest range a lane can have: offsets are kept as 31-bit counts of [`UNIT`]s.
pub const MAX_LANE_BYTES: u64 = UNIT << 31;

/// Whether a lane's memory is shared with peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LaneKind {
    /// Every rank makes the same sequence of calls, which commits check, and every peer maps its memory.
    Symmetric,
    /// Only this rank uses it: freed in any order, reused immediately, never shared.
    Local,
}

/// How blocks relate to segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WindowPolicy {
    /// Blocks may cross segment boundaries. Packs tightest.
    Contiguous,
    /// A block lies in one segment, so that one window and one physical handle cover it, as NCCL
    /// before 2.30.3 needs. Segments grow geometrically, from 16 MiB to 1 GiB.
    PerSegment,
}

/// Configuration of one lane.
#[derive(Clone, Debug)]
pub struct LaneConfig {
    pub(crate) name: String,
    pub(crate) kind: LaneKind,
    pub(crate) policy: WindowPolicy,
    pub(crate) range: Option<u64>,
    pub(crate) limit: Option<u64>,
    pub(crate) history: usize,
    /// Whether the lane takes no more memory than its blocks need, as for few blocks that stay.
    pub(crate) grows_exactly: bool,
}

impl LaneConfig {
    /// A symmetric lane with a contiguous range, no limit, and a history of 16,384 events.
    pub fn symmetric(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            kind: LaneKind::Symmetric,
            policy: WindowPolicy::Contiguous,
            range: None,
            limit: None,
            history: 16 << 10,
            grows_exactly: false,
        }
    }

    /// A lane that is never shared.
    pub fn local(name: impl Into<String>) -> Self {
        Self { kind: LaneKind::Local, ..Self::symmetric(name) }
    }

    /// How blocks relate to segments; [`WindowPolicy::Contiguous`] unless set.
    #[must_use]
    pub fn window_policy(mut self, policy: WindowPolicy) -> Self {
        self.policy = policy;
        self
    }

    /// Bytes of address space for this lane; an equal share of what other lanes leave unless set.
    /// At most [`MAX_LANE_BYTES`].
    #[must_use]
    pub fn range(mut self, bytes: u64) -> Self {
        self.range = Some(bytes);
        self
    }

    /// Limits the bytes of physical memory that this lane may hold. The limit is the same on every rank, so
    /// all ranks reach it at the same allocation.
    #[must_use]
    pub fn limit(mut self, bytes: u64) -> Self {
        self.limit = Some(bytes);
        self
    }

    /// How many events are kept in full, so that an error can name the first call that differs: its
    /// size, and the line it comes from. For an older divergence it names a range of events. At least 16.
    #[must_use]
    pub fn history(mut self, events: usize) -> Self {
        self.history = events.max(16);
        self
    }

    /// Lets the lane take no more memory than its blocks need, in whole segments of the driver's granularity.
    #[must_use]
    pub(crate) fn grows_exactly(mut self) -> Self {
        self.grows_exactly = true;
        self
    }

    /// The settings that must be equal on every rank, as a readable line (rule D8).
    pub(crate) fn describe(&self, range: u64) -> String {
        let kind = match self.kind {
            LaneKind::Symmetric => "symmetric",
            LaneKind::Local => "local",
        };
        let policy = match self.policy {
            WindowPolicy::Contiguous => "contiguous",
            WindowPolicy::PerSegment => "per-segment",
        };
        let limit = self.limit.map_or("none".to_string(), |limit| limit.to_string());
        format!("lane {:?}: {kind}, {policy}, range {range}, limit {limit}", self.name)
    }

    pub(crate) fn validate(&self) -> Result<()> {
        if self.name.is_empty() || self.name.len() > 64 {
            return Err(Error::invalid_argument(format!(
                "lane name {:?} has {} bytes; 1 to 64 are allowed",
                self.name,
                self.name.len()
            )));
        }
        if let Some(range) = self.range
            && (range == 0 || range > MAX_LANE_BYTES)
        {
            return Err(Error::invalid_argument(format!(
                "lane {:?}: a range of {range} bytes; 1 to {MAX_LANE_BYTES} can be served",
                self.name
            )));
        }
        Ok(())
    }
}
