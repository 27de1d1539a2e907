//! Why a communicator has failed, and how a rank reports that to the others (rule S5).

use std::fmt;
use std::time::Duration;

use symmpool_allocator::Error;

use crate::call::operation::OpType;

/// Cause that ended a wait without its signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(in crate::host) enum Cause {
    /// The deadline passed.
    Timeout = 1,
    /// The peer's process is gone.
    PeerLost = 2,
    /// The waiting rank was asked to stop, as by Ctrl-C.
    Interrupted = 3,
}

/// The record of a failed wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::host) struct WaitFault {
    pub(in crate::host) cause: Cause,
    /// Code of the current operation.
    pub(in crate::host) operation: u8,
    /// 0 is the handshake; step `n` of the call is `n`.
    pub(in crate::host) phase: u32,
    /// The rank that did not signal.
    pub(in crate::host) peer: u32,
    pub(in crate::host) epoch: u64,
    /// The timeout of the rank that reports the fault. Ranks may have different timeouts.
    pub(in crate::host) timeout: Duration,
}

impl WaitFault {
    /// Cause, operation, peer and phase in one word, which is never zero. The other fields travel separately.
    pub(in crate::host) fn pack(&self) -> u64 {
        (self.cause as u64)
            | u64::from(self.operation) << 8
            | u64::from(self.peer & 0xffff) << 16
            | u64::from(self.phase) << 32
    }

    pub(in crate::host) fn unpack(word: u64, epoch: u64, timeout: Duration) -> Option<Self> {
        let cause = match word as u8 {
            1 => Cause::Timeout,
            2 => Cause::PeerLost,
            3 => Cause::Interrupted,
            _ => return None,
        };
        Some(Self {
            cause,
            operation: (word >> 8) as u8,
            peer: u32::from((word >> 16) as u16),
            phase: (word >> 32) as u32,
            epoch,
            timeout,
        })
    }

    /// The error for the caller. `reporter` is the peer that reported the fault, if one did. `gone` are other peers
    /// whose processes have ended: the one that was waited for may have ended because of them.
    pub(in crate::host) fn to_error(self, rank: u32, reporter: Option<u32>, gone: &[u32]) -> Error {
        let source = match reporter {
            Some(reporter) => format!(", as rank {reporter} reported to rank {rank}"),
            None => format!(" on rank {rank}"),
        };
        let text = format!("{self}{source}; the communicator has failed and must be rebuilt");
        match self.cause {
            Cause::Timeout => Error::timeout(
                format!("waiting for rank {} in {text}", self.peer),
                self.timeout,
                vec![self.peer],
            ),
            // For the rank that stopped, this is no failure of a peer; for the others it is the rank that left.
            Cause::Interrupted => {
                let what = format!("interrupted while waiting for rank {} in {text}", self.peer);
                match reporter {
                    None => Error::interrupted(what),
                    Some(left) => Error::peer_lost(vec![left], format!("it was {what}")),
                }
            }
            Cause::PeerLost if gone.is_empty() => Error::peer_lost(
                vec![self.peer],
                format!("its process ended, or dropped its pool, during {text}"),
            ),
            Cause::PeerLost => {
                let mut ranks = [gone, &[self.peer]].concat();
                ranks.sort_unstable();
                let what = "their processes ended, or dropped their pools, before or during";
                Error::peer_lost(ranks, format!("{what} {text}"))
            }
        }
    }
}

/// How a wait ended without its signal: the fault, and the peer that reported it, if one did.
#[derive(Clone, Copy)]
pub(in crate::host) struct WaitFailure {
    pub(in crate::host) fault: WaitFault,
    pub(in crate::host) reporter: Option<u32>,
}

impl fmt::Display for WaitFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let operation = OpType::from_code(self.operation);
        let name = operation.map_or("an unknown operation", OpType::name);
        if matches!(operation, Some(OpType::Send | OpType::Recv)) {
            // The number counts chunks of messages, which mean nothing to a user.
            return f.write_str(name);
        }
        write!(f, "{name}, call {}, ", self.epoch)?;
        match self.phase {
            0 => f.write_str("handshake"),
            step => write!(f, "step {step}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> WaitFault {
        let (epoch, timeout) = (1 << 40, Duration::from_secs(1));
        WaitFault { cause: Cause::Timeout, operation: 3, phase: 70_000, peer: 1023, epoch, timeout }
    }

    #[test]
    fn faults_travel_through_a_word_whole() {
        for cause in [Cause::Timeout, Cause::PeerLost] {
            let fault = WaitFault { cause, ..sample() };
            let (epoch, timeout) = (fault.epoch, fault.timeout);
            assert_eq!(WaitFault::unpack(fault.pack(), epoch, timeout), Some(fault));
            let error = fault.to_error(0, Some(4), &[]);
            assert_eq!(error.ranks(), [1023]);
            assert!(error.to_string().contains("all_reduce, call 1099511627776, step 70000"));
            assert_eq!(error.is_timeout(), cause == Cause::Timeout);
            assert_eq!(error.is_peer_lost(), cause == Cause::PeerLost);
            if cause == Cause::PeerLost {
                assert_eq!(fault.to_error(0, None, &[2]).ranks(), [2, 1023]);
            }
        }
        let fault = WaitFault { cause: Cause::Interrupted, ..sample() };
        assert_eq!(WaitFault::unpack(fault.pack(), fault.epoch, fault.timeout), Some(fault));
        assert!(fault.to_error(0, None, &[]).is_invalid_state());
        let reported = fault.to_error(0, Some(4), &[]);
        assert!(reported.is_peer_lost() && reported.ranks() == [4], "{reported}");
        let message = WaitFault { operation: 10, peer: 1, ..sample() };
        let text = message.to_error(0, None, &[]).to_string();
        assert!(text.contains("waiting for rank 1 in recv on rank 0"), "{text}");
        assert_eq!(WaitFault::unpack(0, 0, Duration::ZERO), None);
    }
}
