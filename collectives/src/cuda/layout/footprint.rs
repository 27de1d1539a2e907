//! The memory that a communicator takes of its device, and what each of its parts gets.
//!
//! A process has a communicator for each of its groups, so programs with many groups want the memory of one to be small.
//! Small calls need little: their data fits into small inboxes. Large calls go in pieces or stages, whatever the memory
//! is; with more of it pieces are longer, which matters most between some hundred KiB and some MiB. Without a request a
//! communicator gets [`DEFAULT`], with which every size is as fast as memory can make it; or, where its memory may grow,
//! [`AT_FIRST`], and parts for data as those of [`DEFAULT`] before its first large call.

use std::ffi::OsStr;

use symmpool_allocator::{Error, Result};

use super::params::{ControlLayout, LOCAL};
use crate::cuda::layout::params::Footprint;
use crate::signal::channel::CHANNELS;

/// Bytes of a communicator where nothing else was requested: as much as its parts have use for.
pub(crate) const DEFAULT: u64 = 397 << 20;
/// Bytes of a communicator whose memory may grow, before it does.
const AT_FIRST: u64 = 16 << 20;
/// Bytes of a communicator of one rank, which has no peers.
const ALONE: u64 = 4 << 20;
/// The least and the most bytes that can be requested.
const MIN_TOTAL: u64 = 8 << 20;
const MAX_TOTAL: u64 = 4 << 30;

/// The divisor of a communicator's memory for each part that is one of several. Scratch gets what is left, about a
/// third. A part has no more than its bound, with which every size is as fast as with more memory.
const LL_DIVISOR: u64 = 24;
const ESCAPED_DIVISOR: u64 = 12;
const INBOX_DIVISOR: u64 = 12;
const STAGING_DIVISOR: u64 = 24;
const PLAN_SCRATCH_DIVISOR: u64 = 24;
const MAX_LL: u64 = 8 << 20;
const MAX_ESCAPED: u64 = 32 << 20;
const MAX_INBOX: u64 = 32 << 20;
const MAX_STAGING: u64 = 8 << 20;
const MAX_PLAN_SCRATCH: u64 = 16 << 20;
/// Divisor of a requested scratch: slots of point-to-point messages have at most this part of its bytes, on top of it, and so has
/// the scratch of plans in each parity.
const SCRATCH_DIVISOR: u64 = 4;

/// The environment variable that says how much memory communicators take.
pub(crate) const VARIABLE: &str = "SYMMPOOL_DEVICE_MEMORY";

/// Requested sizes of a communicator's memory; the others follow from them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Requested {
    /// All of it.
    pub(crate) total: Option<u64>,
    /// Each of the three parts of the Lamport inbox.
    pub(crate) inbox: Option<u64>,
    pub(crate) scratch: Option<u64>,
}

impl Footprint {
    /// Divides the memory of a communicator of `world` ranks.
    pub(crate) fn new(world: u32, requested: Requested) -> Result<Self> {
        check_total(requested.total)?;
        let total = match requested.total {
            Some(total) => total,
            None if world < 2 => ALONE,
            None => DEFAULT,
        };
        for (what, bytes) in [("an inbox", requested.inbox), ("scratch", requested.scratch)] {
            let Some(bytes) = bytes else { continue };
            if !(1 << 20..=1 << 32).contains(&bytes) || !bytes.is_multiple_of(1 << 12) {
                return Err(Error::invalid_argument(format!(
                    "{what} of {bytes} bytes on a device: a multiple of 4096 from 1 MiB to 4 GiB \
                     is needed"
                )));
            }
        }
        let part = |divisor, most| pages(total / divisor).min(most);
        let staging = part(STAGING_DIVISOR, MAX_STAGING);
        let within_scratch = |part: u64| {
            requested.scratch.map_or(part, |bytes| part.min(pages(bytes / SCRATCH_DIVISOR)))
        };
        let parts = Self {
            ll: part(LL_DIVISOR, MAX_LL),
            ll128: part(LL_DIVISOR, MAX_LL),
            escaped: part(ESCAPED_DIVISOR, MAX_ESCAPED),
            inbox: requested.inbox.unwrap_or(part(INBOX_DIVISOR, MAX_INBOX)),
            scratch: 0,
            plan_scratch: within_scratch(part(PLAN_SCRATCH_DIVISOR, MAX_PLAN_SCRATCH)),
            staging: if world < 2 { 0 } else { within_scratch(staging) },
        };
        let rest = pages(total.saturating_sub(parts.without_scratch(world)));
        let scratch = requested.scratch.unwrap_or(rest.max(1 << 20));
        Ok(Self { scratch, ..parts })
    }

    /// The footprint of a communicator of `world` ranks whose memory may grow, before it does. Slots of messages do not grow, as
    /// messages may be under way in them, so they have all that they have use for. The rest are inboxes of small calls, and what
    /// calls need that cannot make it grow.
    pub(crate) fn at_first(world: u32) -> Self {
        let parts = Self {
            ll: 512 << 10,
            ll128: 320 << 10,
            escaped: 768 << 10,
            inbox: 768 << 10,
            scratch: 0,
            plan_scratch: 256 << 10,
            staging: MAX_STAGING,
        };
        let scratch = pages(AT_FIRST.saturating_sub(parts.without_scratch(world)));
        Self { scratch, ..parts }
    }

    /// Bytes of everything but the scratch, at most.
    fn without_scratch(&self, world: u32) -> u64 {
        let inboxes = 2 * (self.ll + self.ll128 + self.escaped) + self.escaped / 8 + 3 * self.inbox;
        inboxes + 2 * self.plan_scratch + self.staging + words(world)
    }
}

/// Refuses a communicator's memory of which too little or too much was requested.
pub(crate) fn check_total(total: Option<u64>) -> Result<()> {
    match total.filter(|total| !(MIN_TOTAL..=MAX_TOTAL).contains(total)) {
        Some(total) => Err(Error::invalid_argument(format!(
            "{total} bytes of device memory for a communicator: 8 MiB to 4 GiB are possible \
             (option device_memory_bytes, {VARIABLE})"
        ))),
        None => Ok(()),
    }
}

/// Bytes of what does not depend on the memory that was requested, at most: flags, counts, descriptions of calls, and
/// of each part the rest of its last page.
fn words(world: u32) -> u64 {
    let ranks = u64::from(world);
    LOCAL
        + ControlLayout::flags_bytes(world)
        + ranks * (80 * u64::from(CHANNELS) + (8 << 10))
        + (64 << 10)
}

/// Bytes of the whole pages in `bytes` bytes: rounds down to a multiple of 4096.
fn pages(bytes: u64) -> u64 {
    bytes / 4096 * 4096
}

/// Bytes that a communicator of several ranks takes at most where its options say nothing.
pub(crate) fn communicator_bytes(first: bool) -> Result<u64> {
    let value = std::env::var_os(VARIABLE);
    let total = requested_total(as_text(value.as_deref())?, first)?;
    check_total(total)?;
    Ok(total.unwrap_or(DEFAULT))
}

/// Bytes that a communicator takes at most before and after its memory has grown, unless the variable says how much it is.
pub(crate) fn growing_bytes() -> Result<Option<[u64; 2]>> {
    let value = std::env::var_os(VARIABLE);
    let said = requested_total(as_text(value.as_deref())?, true)?;
    // Slots of messages stay, and are not made again.
    Ok(said.is_none().then_some([AT_FIRST, AT_FIRST + DEFAULT - MAX_STAGING]))
}

/// The variable's value as text. One that is no text is refused, and not taken for one that is not set.
pub(crate) fn as_text(value: Option<&OsStr>) -> Result<Option<&str>> {
    let text = |value: &OsStr| {
        format!("{VARIABLE}={}: it is not UTF-8; bytes, as in 64M", value.display())
    };
    let read = |value| OsStr::to_str(value).ok_or_else(|| Error::invalid_argument(text(value)));
    value.map(read).transpose()
}

/// Reads the environment variable: bytes for every communicator, or for the first one of a process and for each further
/// one. Numbers may end in K, M or G.
pub(crate) fn requested_total(value: Option<&str>, first: bool) -> Result<Option<u64>> {
    let Some(value) = value.map(str::trim).filter(|value| !value.is_empty()) else {
        return Ok(None);
    };
    let bytes = |text: &str| {
        let text = text.trim();
        let unit = text.chars().last().and_then(|last| match last.to_ascii_uppercase() {
            'K' => Some(10),
            'M' => Some(20),
            'G' => Some(30),
            _ => None,
        });
        let digits = &text[..text.len() - usize::from(unit.is_some())];
        let number = digits.parse::<u64>().ok()?;
        number.checked_mul(1 << unit.unwrap_or(0))
    };
    let parts: Vec<Option<u64>> = value.split(',').map(bytes).collect();
    match parts[..] {
        [Some(all)] => Ok(Some(all)),
        [Some(of_first), Some(further)] => Ok(Some(if first { of_first } else { further })),
        _ => Err(Error::invalid_argument(format!(
            "{VARIABLE} has {value:?}: bytes of device memory for every communicator, as in 64M, or for the first \
             one of a process and for each further one, as in 96M,16M"
        ))),
    }
}

#[cfg(test)]
impl Footprint {
    /// Makes as much memory as every size can use, but for the inbox and the scratch.
    pub(in crate::cuda) const fn ample(inbox: u64, scratch: u64) -> Self {
        let (ll, ll128, escaped, staging) = (MAX_LL, MAX_LL, MAX_ESCAPED, MAX_STAGING);
        Self { ll, ll128, escaped, inbox, scratch, plan_scratch: MAX_PLAN_SCRATCH, staging }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::layout::p2p_layout::P2pLayout;

    fn bytes(world: u32, footprint: Footprint) -> u64 {
        let control = ControlLayout::new(world, footprint).expect("up to 8 ranks");
        P2pLayout::new(world, control.data_end(), footprint.staging).end(world)
    }

    #[test]
    fn a_variable_that_is_no_text_is_refused_by_name() {
        use std::os::unix::ffi::OsStrExt as _;
        let error = as_text(Some(OsStr::from_bytes(b"64\xffM"))).unwrap_err();
        assert!(error.is_invalid_argument() && error.to_string().contains(VARIABLE), "{error}");
        assert_eq!(as_text(Some(OsStr::new("64M"))).unwrap(), Some("64M"));
        assert_eq!(as_text(None).unwrap(), None);
    }

    #[test]
    fn a_communicator_takes_what_was_requested() {
        for world in 2..=8 {
            for (total, most) in [
                (None, DEFAULT),
                (Some(96 << 20), 96 << 20),
                (Some(16 << 20), 16 << 20),
                (Some(8 << 20), 8 << 20),
                (Some(4 << 30), 4 << 30),
            ] {
                let requested = Requested { total, ..Default::default() };
                let footprint = Footprint::new(world, requested).expect("valid");
                let taken = bytes(world, footprint);
                assert!(
                    taken <= most,
                    "{world} ranks, {total:?}: {taken} of {most}, {footprint:?}"
                );
                assert!(taken > most - (3 << 19), "{world} ranks, {total:?}: {taken} of {most}");
                // Each part serves its smallest calls.
                assert!(footprint.scratch >= 1 << 20 && footprint.inbox >= 512 << 10);
            }
        }
        for world in 2..=8 {
            let footprint = Footprint::at_first(world);
            let taken = bytes(world, footprint);
            assert!(taken <= AT_FIRST && taken > AT_FIRST - (3 << 19), "{taken}, {footprint:?}");
            assert!(footprint.scratch >= 1 << 20, "{world} ranks: {footprint:?}");
        }
        let alone = Footprint::new(1, Requested::default()).expect("valid");
        assert!(bytes(1, alone) <= 4 << 20);
    }

    #[test]
    fn parts_that_were_requested_have_their_size() {
        let requested = Requested { total: None, inbox: Some(2 << 20), scratch: Some(1 << 20) };
        let footprint = Footprint::new(2, requested).expect("valid");
        assert_eq!((footprint.inbox, footprint.scratch), (2 << 20, 1 << 20));
        assert_eq!(footprint.staging, 256 << 10, "a quarter of the scratch");
        for wrong in [0, 4095, (1 << 20) + 1, u64::MAX] {
            for requested in [
                Requested { inbox: Some(wrong), ..Default::default() },
                Requested { scratch: Some(wrong), ..Default::default() },
                Requested { total: Some(wrong), ..Default::default() },
            ] {
                let error = Footprint::new(2, requested).expect_err("nonsense");
                assert!(
                    error.is_invalid_argument() && error.to_string().contains(&wrong.to_string())
                );
            }
        }
    }

    #[test]
    fn the_environment_says_how_much() {
        let read = |text, first| requested_total(Some(text), first).expect("a size");
        assert_eq!(requested_total(None, true).expect("nothing"), None);
        assert_eq!(read(" ", true), None);
        assert_eq!((read("64M", true), read("64M", false)), (Some(64 << 20), Some(64 << 20)));
        assert_eq!(
            (read("1G, 512k", true), read("1G,512K", false)),
            (Some(1 << 30), Some(512 << 10))
        );
        for wrong in ["much", "-1", "1,2,3", "M", "1T", "99999999999G", "64M,"] {
            let error = requested_total(Some(wrong), true).expect_err("nonsense");
            assert!(error.is_invalid_argument() && error.to_string().contains(VARIABLE), "{error}");
        }
    }
}
