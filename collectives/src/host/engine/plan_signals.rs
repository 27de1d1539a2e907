//! How many signals of plans this rank has sent and taken, by peer and channel.
//!
//! A slot holds the number of signals that were ever sent on it, over all calls. A checked plan takes every signal that
//! it sends, so the numbers of both sides are equal between calls.

use crate::signal::channel::CHANNELS;

#[derive(Debug)]
pub(super) struct PlanSignals {
    sent: Vec<u64>,
    taken: Vec<u64>,
}

impl PlanSignals {
    pub(super) fn new(world: u32) -> Self {
        let none = vec![0; world as usize * CHANNELS as usize];
        Self { sent: none.clone(), taken: none }
    }

    /// The number of the next signal to a peer.
    pub(super) fn send(&mut self, peer: u32, channel: u32) -> u64 {
        next(&mut self.sent, peer, channel)
    }

    /// The number of the next signal from a peer.
    pub(super) fn take(&mut self, peer: u32, channel: u32) -> u64 {
        next(&mut self.taken, peer, channel)
    }
}

fn next(counts: &mut [u64], peer: u32, channel: u32) -> u64 {
    let count = &mut counts[(peer * CHANNELS + channel) as usize];
    *count += 1;
    *count
}
