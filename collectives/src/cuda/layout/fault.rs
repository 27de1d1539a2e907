//! Report of a kernel to the host when a peer is missing or called something else (rules S5, S6).

use std::time::Duration;

use symmpool_allocator::Error;

use super::memory_channels::{MEMORY_CHANNELS, PIECE_CHANNELS};
use crate::call::p2p::{Afterwards, Payload, payloads_differ, refused_elsewhere};
use crate::call::{CallDescription, mismatch_of_two};
use crate::signal::channel::CHANNELS;
use crate::types::kernel_struct::kernel_structs;

kernel_structs! {
    /// An error that the host reads although the call went on: that of the last call that had one.
    #[derive(Clone, Copy, Default)]
    pub(in crate::cuda) struct AsyncError as "AsyncError" {
        /// How many calls have written such an error.
        pub(in crate::cuda) calls: u64,
        kind: u32,
        epoch: u32,
        rank: u32,
        unused: u32,
        /// Elements that the rank was sent; a token, for `NO_EXPERT`; a part of a handle, for `WRONG_HANDLE`.
        needed: u64,
        /// Elements that its output holds; an id, for `NO_EXPERT`; what was found, for `WRONG_HANDLE`.
        room: u64,
    }

    /// The record in pinned host memory in which the host reads what went wrong (rule S5). It is written at most once, except
    /// for the asynchronous error.
    #[derive(Default)]
    pub(in crate::cuda) struct FaultRecord as "FaultRecord" {
        pub(in crate::cuda) complete: u32,
        kind: u32,
        /// The epoch of the call; for a wait on a channel, the low half of the signal's number.
        epoch: u32,
        pub(in crate::cuda) peer: u32,
        phase: u32,
        /// For `MISMATCH`, this rank's call description. For `COUNTS`, a pair of ranks and its two counts; for `PAYLOADS`, a pair
        /// and its two payloads. For `TIMEOUT` on a channel or by a memory operation, the timeout in nanoseconds.
        ours: [u64; 4],
        /// For `MISMATCH`, the peer's call description. For `PEER_FAILED`, the reason in its failed handshake, and two payloads
        /// if a message was refused.
        theirs: [u64; 4],
        pub(in crate::cuda) async_error: AsyncError,
    }
}

// Those of `all_to_all/traffic.cuh`.
const OVERFLOW: u32 = 1;
const SPLITS: u32 = 2;
// Those of `experts/params.cuh`.
const NO_EXPERT: u32 = 3;
const ROWS_OVERFLOW: u32 = 4;
const EXPERTS_OVERFLOW: u32 = 5;
const EXPERT_OVERFLOW: u32 = 6;
const WRONG_HANDLE: u32 = 7;
/// Parts of a handle that may be wrong, by the numbers of `experts/handle.cuh`.
const PARTS_OF_HANDLES: [&str; 7] = [
    "handle",
    "layout",
    "number of tokens",
    "number of received rows",
    "list of where ranks' rows begin",
    "list of the places of rows that this rank sent",
    "list of the places of received rows",
];

impl AsyncError {
    /// The error that `rank` returns, after `calls` calls with such errors.
    pub(in crate::cuda) fn error(&self, rank: u32, calls: u64) -> Error {
        let Self { kind, epoch, rank: culprit, needed, room, .. } = *self;
        let more = match calls {
            1 => String::new(),
            calls => format!(" The last of {calls} such calls."),
        };
        if kind == OVERFLOW {
            return Error::overflow(format!(
                "all_to_all_v, collective {epoch} on the device, seen on rank {rank}: rank {culprit} \
                 was sent {needed} elements, and its output holds {room}. The {} beyond were not \
                 written, and the communicator stays usable.{more} Pass a longer output, or send less.",
                needed.saturating_sub(room)
            ))
            .naming([culprit]);
        }
        if let NO_EXPERT | ROWS_OVERFLOW | EXPERTS_OVERFLOW | EXPERT_OVERFLOW | WRONG_HANDLE = kind
        {
            return self.error_of_experts(rank, &more).naming([culprit]);
        }
        if kind != SPLITS {
            return Error::system("reading what a call reported", format!("kind {kind}"));
        }
        Error::invalid_argument(format!(
            "all_to_all_v, collective {epoch} on the device, seen on rank {rank}: the input splits \
             of rank {culprit} are negative, or more than its input has. It sent nothing, and the \
             communicator stays usable.{more}"
        ))
        .naming([culprit])
    }
}

impl AsyncError {
    /// The error of a dispatch to experts.
    fn error_of_experts(&self, rank: u32, more: &str) -> Error {
        let Self { kind, epoch, rank: culprit, needed, room, .. } = *self;
        let call =
            format!("dispatch to experts, collective {epoch} on the device, seen on rank {rank}");
        if kind == WRONG_HANDLE {
            let part = PARTS_OF_HANDLES.get(needed as usize).unwrap_or(&PARTS_OF_HANDLES[0]);
            let found = room as u32 as i32;
            let what = match (needed, room) {
                (1, 1) => "is of a dispatch in the other layout".to_owned(),
                (1, _) => "is none that a dispatch has written".to_owned(),
                (2, _) => format!("is of a dispatch of {found} tokens, and this call has others"),
                (7, _) => format!(
                    "does not agree with that of another rank, which sends it {found} rows: a program has written to one of \
                     them"
                ),
                _ => format!("has {found} in its {part}, which is out of bounds"),
            };
            return Error::invalid_argument(format!(
                "a call of experts, collective {epoch} on the device, seen on rank {rank}: the handle of rank {culprit} \
                 {what}. Pass a handle as the dispatch of these tokens gave it. What the call wrote is wrong, and the \
                 communicator stays usable.{more}"
            ));
        }
        let left = "The communicator stays usable";
        match kind {
            NO_EXPERT => Error::invalid_argument(format!(
                "{call}: token {needed} of rank {culprit} has the id {}, which is no expert; it counts as -1. \
                 {left}.{more}",
                room as u32 as i32
            )),
            ROWS_OVERFLOW => Error::overflow(format!(
                "{call}: rank {culprit} was sent {needed} rows, and its buffer has room for {room} (capacity). The \
                 {} beyond were not written. {left}.{more}",
                needed.saturating_sub(room)
            )),
            EXPERT_OVERFLOW => Error::overflow(format!(
                "{call}: an expert of rank {culprit} was sent {needed} rows, and its part of the output has room for \
                 {room}. The {} beyond were not written. {left}.{more}",
                needed.saturating_sub(room)
            )),
            _ => Error::overflow(format!(
                "{call}: rank {culprit} received rows for its experts that take {needed} places, and its output has \
                 {room}. Those beyond were not written. {left}.{more} Pass a longer output."
            )),
        }
    }
}

const TIMEOUT: u32 = 1;
const MISMATCH: u32 = 2;
const COUNTS: u32 = 3;
const PEER_FAILED: u32 = 4;
/// The two ends of a send and recv have different payloads.
const PAYLOADS: u32 = 5;
/// In place of the rank that was waited for: `REFUSED_MESSAGE` and `HALFWAY` in `symmpool/impl/comm.cuh`.
const REFUSED_MESSAGE: u32 = 1 << 31;
const HALFWAY: u32 = 1 << 29;
/// With it, the next two words say what was sent and what was expected: `MESSAGE_FOLLOWS` in `symmpool/impl/comm.cuh`.
const MESSAGE_FOLLOWS: u32 = 1 << 30;
/// The phase in which a companion kernel and its call's other kernels wait for each other: `COMPANION` in
/// `symmpool/impl/comm.cuh`.
const COMPANION: u32 = 4;
/// Phases from here on are waits on channels: `CHANNEL` in `symmpool/impl/comm.cuh`.
const CHANNEL: u32 = 16;
/// Behind those are the phases of point-to-point operations: a sender's wait for a free slot, and a receiver's
/// wait for data. `p2p/p2p.cu` has both.
const SENDING: u32 = CHANNEL + CHANNELS;
const RECEIVING: u32 = SENDING + 1;
/// Behind those are waits by memory operations: for a signal of a peer on each channel, and then for the peer to take the
/// last signal. No kernel reports them.
const MEMORY: u32 = RECEIVING + 1;
const MEMORY_UNTAKEN: u32 = MEMORY + MEMORY_CHANNELS;

/// Knowledge of the host besides the record.
pub(in crate::cuda) struct HostView<'a> {
    pub(in crate::cuda) rank: u32,
    pub(in crate::cuda) world: u32,
    /// The timeout of collectives.
    pub(in crate::cuda) timeout: Duration,
    /// Whether a rank's process still runs.
    pub(in crate::cuda) alive: &'a dyn Fn(u32) -> bool,
}

impl FaultRecord {
    pub(in crate::cuda) fn error(&self, view: &HostView<'_>) -> Error {
        let Self { kind, epoch, peer, phase, ours, theirs, .. } = *self;
        let HostView { rank, world, timeout, alive } = *view;
        let absent = |missing: u32, what: String, after: Duration| {
            if alive(missing) {
                Error::timeout(what, after, vec![missing])
            } else {
                // A peer that is missing may have left because other ranks are gone, which are named too.
                let others = (0..world).filter(|other| *other != rank && !alive(*other));
                Error::peer_lost(others.collect(), what)
            }
        };
        match kind {
            TIMEOUT if phase == COMPANION => Error::timeout(
                format!(
                    "collective {epoch} on the device, on rank {rank}: two of its kernels did not \
                     run at once, as large all-to-alls by copy engines need; allow more of them \
                     (CUDA_DEVICE_MAX_CONNECTIONS), or make communicators with another algorithm \
                     for all-to-alls, such as \"direct\""
                ),
                timeout,
                vec![rank],
            ),
            PEER_FAILED if (theirs[0] >> 32) as u32 & (REFUSED_MESSAGE | HALFWAY) != 0 => {
                // The words, as departures and failed handshakes have them.
                let word = (theirs[0] >> 32) as u32;
                let ends = (word & 0xff, word >> 8 & 0xff);
                let error = if word & HALFWAY != 0 {
                    failed_halfway(rank, ends.0)
                } else if word & MESSAGE_FOLLOWS == 0 {
                    refused_elsewhere(rank, ends, Afterwards::Failed)
                } else {
                    refused_message(rank, ends, theirs[1], theirs[2])
                };
                if phase >= CHANNEL {
                    // A message, or a wait for a signal.
                    return error;
                }
                error.context(format!("collective {epoch} on the device, which rank {peer} left"))
            }
            PEER_FAILED => {
                // The upper half of the word, as `fail_handshake` in `symmpool/impl/comm.cuh` writes it.
                let missing = (theirs[0] >> 32) as u32;
                let what = format!(
                    "rank {missing} in collective {epoch} on the device, as rank {peer} reported to rank \
                     {rank}, which came to the call after that"
                );
                absent(missing, what, timeout)
            }
            TIMEOUT => {
                let (what, after) = if phase == SENDING {
                    let what = format!(
                        "waiting for rank {peer} to receive what rank {rank} sends it, on the device: earlier \
                         sends fill all slots; the communicator has failed"
                    );
                    (what, timeout)
                } else if phase == RECEIVING {
                    let what = format!(
                        "waiting for a message of rank {peer} in recv, on the device, on rank {rank}; the \
                         communicator has failed"
                    );
                    (what, timeout)
                } else if phase >= MEMORY {
                    (waited_by_memory_operation(rank, peer, phase), Duration::from_nanos(ours[0]))
                } else if phase >= CHANNEL {
                    // The timeout of such a wait is in its call description: see `CudaEngine::wait`.
                    let what = format!(
                        "waiting for a signal of rank {peer} on channel {} on the device, on rank \
                         {rank} (the number of the signal ends in {epoch}); the communicator has \
                         failed",
                        phase - CHANNEL
                    );
                    (what, Duration::from_nanos(ours[0]))
                } else {
                    let for_what = match phase {
                        0 => "to enter the call",
                        1 => "for its data",
                        2 => "for its results",
                        _ => "to leave the call",
                    };
                    let what = format!(
                        "rank {peer} in collective {epoch} on the device ({for_what}), on rank {rank}"
                    );
                    (what, timeout)
                };
                absent(peer, what, after)
            }
            MISMATCH => {
                let (ours, theirs) =
                    (CallDescription::from_words(ours), CallDescription::from_words(theirs));
                mismatch_of_two(u64::from(epoch), rank, &ours, peer, &theirs)
            }
            COUNTS => {
                let [sender, receiver, sent, expected] = ours;
                Error::mismatch(format!(
                    "all_to_all_v counts disagree in collective {epoch} on the device, seen on \
                     rank {rank}:\n  rank {sender} sends {sent} elements to rank {receiver}, which \
                     expects {expected}\nNothing was written where it should not be. The \
                     communicator has failed: make a new one; what a rank sends must be what the \
                     other receives."
                ))
                .naming([sender as u32, receiver as u32])
            }
            PAYLOADS => {
                let [sender, receiver, sent, expected] = ours;
                refused_message(rank, (sender as u32, receiver as u32), sent, expected)
            }
            kind => Error::system("reading what a kernel reported", format!("kind {kind}")),
        }
    }
}

/// The error of `rank` where a message was refused, perhaps between other ranks.
fn refused_message(rank: u32, ends: (u32, u32), sent: u64, expected: u64) -> Error {
    let payloads = (Payload::from_word(sent), Payload::from_word(expected));
    payloads_differ(rank, ends, payloads, Afterwards::Failed)
}

/// The error of `rank` where another one failed in the middle of a call.
fn failed_halfway(rank: u32, culprit: u32) -> Error {
    Error::mismatch(format!(
        "rank {culprit} failed in the middle of a call, as rank {rank} learned while it waited for it; see the error of rank \
         {culprit}. What that call should have written is undefined. The communicator has failed: make a new one."
    ))
    .naming([culprit])
}

/// The upper half of the reason for which a rank departs that fails in the middle of a call.
pub(in crate::cuda) fn halfway_reason(rank: u32) -> u32 {
    HALFWAY | rank
}

/// Describes what a stream of `rank` waited for by a memory operation.
fn waited_by_memory_operation(rank: u32, peer: u32, phase: u32) -> String {
    let (channel, what) = match phase.checked_sub(MEMORY_UNTAKEN) {
        Some(channel) => (channel, "to take the last signal"),
        None => (phase - MEMORY, "to signal"),
    };
    let on = match channel.checked_sub(CHANNELS) {
        Some(_) if channel >= PIECE_CHANNELS => {
            "behind its copies in a collective by copy engines".to_owned()
        }
        Some(step) => format!("in step {step} of a fused matmul"),
        None => format!("on channel {channel}, by memory operations"),
    };
    format!(
        "waiting for rank {peer} {what} {on}, on the device, on rank {rank}; the communicator has failed"
    )
}

impl FaultRecord {
    /// That a peer did not signal on a channel of memory operations, or did not take a signal, in time.
    pub(in crate::cuda) fn missing(
        (peer, channel): (u32, u32),
        untaken: bool,
        after: Duration,
    ) -> Self {
        let phase = if untaken { MEMORY_UNTAKEN } else { MEMORY } + channel;
        let after = crate::types::timeout::nanoseconds(after);
        Self { kind: TIMEOUT, peer, phase, ours: [after, 0, 0, 0], ..Self::default() }
    }

    /// That a peer has departed for which a stream waits on a channel of memory operations. `why` are the words of the
    /// departure behind the first one.
    pub(in crate::cuda) fn departed((peer, channel): (u32, u32), why: [u64; 3]) -> Self {
        let theirs = [why[0], why[1], why[2], 0];
        Self { kind: PEER_FAILED, peer, phase: MEMORY + channel, theirs, ..Self::default() }
    }
}

#[cfg(test)]
pub(in crate::cuda) mod tests {
    use super::*;
    use crate::DType;
    use crate::call::OpType;

    /// A record of a wait for rank 2 that took too long, or of nothing yet.
    pub(in crate::cuda) fn record(complete: bool) -> FaultRecord {
        FaultRecord { complete: complete.into(), ..record_of(TIMEOUT, 0) }
    }

    /// The asynchronous error of one call.
    pub(in crate::cuda) fn async_error() -> AsyncError {
        AsyncError { kind: OVERFLOW, calls: 1, ..AsyncError::default() }
    }

    fn record_of(kind: u32, phase: u32) -> FaultRecord {
        let (ours, theirs) =
            (CallDescription::new(OpType::Barrier), CallDescription::new(OpType::AllReduce));
        FaultRecord {
            complete: 1,
            kind,
            epoch: 7,
            peer: 2,
            phase,
            ours: *ours.words(),
            theirs: *theirs.words(),
            async_error: AsyncError::default(),
        }
    }

    #[test]
    fn async_errors_name_the_rank_and_what_did_not_fit() {
        let async_error =
            AsyncError { kind: OVERFLOW, rank: 3, needed: 12, room: 10, ..AsyncError::default() };
        let error = async_error.error(0, 1);
        assert!(error.is_overflow() && error.ranks() == [3], "{error}");
        let text = error.to_string();
        assert!(text.contains("rank 3 was sent 12 elements, and its output holds 10"), "{text}");
        assert!(!text.contains("such calls"), "{text}");
        let no_expert = AsyncError { kind: NO_EXPERT, needed: 5, room: 0xffff_fff9, ..async_error };
        let error = no_expert.error(0, 1);
        assert!(error.is_invalid_argument() && error.ranks() == [3], "{error}");
        assert!(error.to_string().contains("token 5 of rank 3 has the id -7"), "{error}");
        for kind in [ROWS_OVERFLOW, EXPERTS_OVERFLOW, EXPERT_OVERFLOW] {
            let error = AsyncError { kind, ..async_error }.error(3, 2);
            assert!(error.is_overflow() && error.ranks() == [3], "{error}");
            assert!(
                error.to_string().contains("12") && error.to_string().contains("10"),
                "{error}"
            );
        }
        for (needed, room, said) in [
            (1, 1, "the other layout"),
            (1, 0, "none that a dispatch"),
            (2, 5, "5 tokens"),
            (5, 0xffff_fff9, "-7 in its list"),
            (7, 3, "which sends it 3 rows"),
            (9, 3, "3 in its handle"),
        ] {
            let error = AsyncError { kind: WRONG_HANDLE, needed, room, ..async_error }.error(0, 1);
            assert!(error.is_invalid_argument() && error.ranks() == [3], "{error}");
            assert!(error.to_string().contains(said), "{error}");
        }
        let nonsense = AsyncError { kind: 2, ..async_error }.error(0, 5);
        assert!(nonsense.is_invalid_argument() && nonsense.ranks() == [3], "{nonsense}");
        assert!(nonsense.to_string().contains("The last of 5 such calls"), "{nonsense}");
    }

    /// Rules S5 and S6.
    #[test]
    fn records_become_the_errors_that_the_host_has_too() {
        let timeout = Duration::from_secs(3);
        let there = HostView { rank: 1, world: 3, timeout, alive: &|_| true };
        let gone = HostView { rank: 1, world: 3, timeout, alive: &|rank| rank != 2 };
        for (phase, what) in [
            (0, "to enter the call"),
            (1, "for its data"),
            (2, "for its results"),
            (3, "to leave the call"),
            (CHANNEL, "on channel 0"),
            (CHANNEL + 5, "on channel 5"),
            (SENDING, "to receive what rank 1 sends"),
            (RECEIVING, "for a message of rank 2"),
            (MEMORY + 3, "rank 2 to signal on channel 3, by memory operations"),
            (MEMORY + PIECE_CHANNELS + 1, "rank 2 to signal behind its copies in a collective"),
            (MEMORY_UNTAKEN + 17, "rank 2 to take the last signal in step 1 of a fused"),
        ] {
            let late = record_of(TIMEOUT, phase).error(&there);
            assert!(late.is_timeout() && late.ranks() == [2], "{late}");
            assert!(late.to_string().contains(what), "{late}");
            let lost = record_of(TIMEOUT, phase).error(&gone);
            assert!(lost.is_peer_lost() && lost.ranks() == [2], "{lost}");
        }
        for missing in [1, 2] {
            let failed = || FaultRecord {
                theirs: [missing << 32, 0, 0, 0],
                peer: 0,
                ..record_of(PEER_FAILED, 0)
            };
            let late = failed().error(&there);
            assert!(late.is_timeout() && late.ranks() == [missing as u32], "{late}");
            assert!(late.to_string().contains("as rank 0 reported to rank 1"), "{late}");
            assert_eq!(failed().error(&gone).is_peer_lost(), missing == 2);
        }
        let companion = FaultRecord { peer: 1, ..record_of(TIMEOUT, COMPANION) }.error(&there);
        assert!(companion.is_timeout() && companion.ranks() == [1], "{companion}");
        assert!(companion.to_string().contains("CUDA_DEVICE_MAX_CONNECTIONS"), "{companion}");
        let differs = record_of(MISMATCH, 0).error(&gone);
        assert!(differs.is_diverged() && differs.ranks() == [1, 2], "{differs}");
        assert!(differs.to_string().contains("rank 1: barrier"), "{differs}");
        let counts = FaultRecord { ours: [2, 1, 100, 99], ..record_of(COUNTS, 0) }.error(&there);
        assert!(counts.is_diverged() && counts.ranks() == [1, 2], "{counts}");
        let text = counts.to_string();
        assert!(text.contains("rank 2 sends 100 elements to rank 1, which expects 99"), "{text}");
        let words = [(100, DType::F32), (99, DType::U8)]
            .map(|(count, dtype)| Payload::new("", 0, count, dtype).expect("sound").word());
        let refused =
            FaultRecord { ours: [2, 1, words[0], words[1]], ..record_of(PAYLOADS, RECEIVING) };
        let ends = REFUSED_MESSAGE | 1 << 8 | 2;
        let theirs = [u64::from(MESSAGE_FOLLOWS | ends) << 32, words[0], words[1], 0];
        let left = FaultRecord { theirs, peer: 1, ..record_of(PEER_FAILED, 0) };
        for error in [refused.error(&there), left.error(&there)] {
            assert!(error.is_diverged() && error.ranks() == [1, 2], "{error}");
            let text = error.to_string();
            let line = "rank 2 sends 100 f32 (400 bytes) to rank 1, which expects 99 u8 (99 bytes)";
            assert!(text.contains(line) && text.contains("failed"), "{text}");
        }
        assert!(left.error(&there).to_string().contains("which rank 1 left"));
        let theirs = [u64::from(ends) << 32, 7, 7, 7];
        let elsewhere = FaultRecord { theirs, peer: 3, ..record_of(PEER_FAILED, 0) }.error(&there);
        assert!(elsewhere.is_diverged() && elsewhere.ranks() == [1, 2], "{elsewhere}");
        assert!(elsewhere.to_string().contains("rank 2 sends to rank 1"), "{elsewhere}");
        for (phase, context) in [(0, true), (CHANNEL + 3, false), (MEMORY + 17, false)] {
            let theirs = [u64::from(halfway_reason(2)) << 32, 7, 7, 7];
            let error = FaultRecord { theirs, ..record_of(PEER_FAILED, phase) }.error(&there);
            assert!(error.is_diverged() && error.ranks() == [2], "{error}");
            let text = error.to_string();
            assert!(text.contains("rank 2 failed in the middle of a call, as rank 1"), "{text}");
            assert_eq!(text.contains("which rank 2 left"), context, "{text}");
        }
        let unknown = record_of(9, 0).error(&there);
        assert!(unknown.to_string().contains("kind 9"), "{unknown}");
    }
}
