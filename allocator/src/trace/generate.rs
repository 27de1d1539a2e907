//! Making random traces, and writing traces.

use std::io::Write;

use super::{Trace, TraceOp};
use crate::testing::SplitMix64;
use crate::{Error, Result};

/// About how many blocks a random trace keeps alive.
const LIVE: usize = 2048;

/// Sizes of random traces are below two to this power.
const LARGEST: u64 = 26;

/// Streams that a random trace uses.
const STREAMS: u64 = 4;

impl Trace {
    /// A random trace of `events` operations that follows from `seed` alone. It has all kinds of operations,
    /// four streams, sizes from 1 byte to 64 MiB (each power of two equally often), a commit about every 1,000
    /// events, and about 2,000 blocks in use.
    pub fn synthetic(events: usize, seed: u64) -> Self {
        let mut random = SplitMix64::for_participant(seed, 0);
        let mut trace = Self::default();
        trace.ops.reserve(events);
        let mut live: Vec<(u32, u64)> = Vec::new();
        let mut free_slots = Vec::new();
        let mut live_bytes = 0;
        for _ in 0..events {
            let op = match random.below(4096) {
                0 => TraceOp::Trim,
                1..5 => TraceOp::Commit,
                5..200 if !live.is_empty() => {
                    let (slot, _) = live[random.below(live.len() as u64) as usize];
                    TraceOp::Record { slot, stream: random.below(STREAMS) as u16 }
                }
                draw if live.is_empty() || draw < if live.len() < LIVE { 2600 } else { 1700 } => {
                    let slot = free_slots.pop().unwrap_or_else(|| {
                        trace.slots += 1;
                        trace.slots - 1
                    });
                    let power = 1 << random.below(LARGEST);
                    let bytes = power + random.below(power);
                    live.push((slot, bytes));
                    live_bytes += bytes;
                    trace.peak_live = trace.peak_live.max(live_bytes);
                    TraceOp::Alloc { slot, bytes, stream: random.below(STREAMS) as u16 }
                }
                _ => {
                    let (slot, bytes) = live.swap_remove(random.below(live.len() as u64) as usize);
                    live_bytes -= bytes;
                    free_slots.push(slot);
                    let ordered = random.below(5) > 0;
                    if ordered { TraceOp::Free { slot } } else { TraceOp::FreeUnordered { slot } }
                }
            };
            trace.ops.push(op);
        }
        trace
    }

    /// The first `events` operations.
    #[must_use]
    pub fn prefix(&self, events: usize) -> Self {
        let ops = self.ops[..events.min(self.ops.len())].to_vec();
        let mut sizes = vec![0; self.slots as usize];
        let (mut live, mut peak_live) = (0, 0);
        for op in &ops {
            match *op {
                TraceOp::Alloc { slot, bytes, .. } => {
                    sizes[slot as usize] = bytes;
                    live += bytes;
                    peak_live = peak_live.max(live);
                }
                TraceOp::Free { slot } | TraceOp::FreeUnordered { slot } => {
                    live -= sizes[slot as usize];
                }
                TraceOp::Record { .. } | TraceOp::Commit | TraceOp::Trim => {}
            }
        }
        Self { ops, slots: self.slots, peak_live }
    }

    /// Writes the trace as CSV. The name of a block is the number of its allocation.
    pub fn write(&self, out: impl Write) -> Result<()> {
        self.write_lines(out).map_err(|error| Error::system("writing the trace", error))
    }

    fn write_lines(&self, out: impl Write) -> std::io::Result<()> {
        let mut out = std::io::BufWriter::new(out);
        writeln!(out, "op,id,bytes,stream")?;
        let mut ids = vec![0_u64; self.slots as usize];
        let mut next = 0;
        for op in &self.ops {
            match *op {
                TraceOp::Alloc { slot, bytes, stream } => {
                    ids[slot as usize] = next;
                    writeln!(out, "alloc,{next},{bytes},{stream}")?;
                    next += 1;
                }
                TraceOp::Free { slot } => writeln!(out, "free,{},,", ids[slot as usize])?,
                TraceOp::FreeUnordered { slot } => {
                    writeln!(out, "free_unordered,{},,", ids[slot as usize])?;
                }
                TraceOp::Record { slot, stream } => {
                    writeln!(out, "record,{},,{stream}", ids[slot as usize])?;
                }
                TraceOp::Commit => writeln!(out, "commit,,,")?,
                TraceOp::Trim => writeln!(out, "trim,,,")?,
            }
        }
        out.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_reads_back_the_same() {
        let trace = Trace::synthetic(20_000, 7);
        let mut text = Vec::new();
        trace.write(&mut text).unwrap();
        let back = Trace::read(&text[..]).unwrap();
        assert_eq!(back.ops(), trace.ops());
        assert_eq!((back.slots(), back.peak_live()), (trace.slots(), trace.peak_live()));
    }

    #[test]
    fn random_traces_follow_from_the_seed_and_hold_every_operation() {
        let trace = Trace::synthetic(20_000, 7);
        assert_eq!(trace.ops(), Trace::synthetic(20_000, 7).ops());
        assert_ne!(trace.ops(), Trace::synthetic(20_000, 8).ops());
        let count = |of: fn(&TraceOp) -> bool| trace.ops().iter().filter(|op| of(op)).count();
        assert!(count(|op| matches!(op, TraceOp::Alloc { .. })) > 8_000);
        assert!(count(|op| matches!(op, TraceOp::Free { .. })) > 5_000);
        assert!(count(|op| matches!(op, TraceOp::FreeUnordered { .. })) > 1_000);
        assert!(count(|op| matches!(op, TraceOp::Record { .. })) > 500);
        assert!(count(|op| matches!(op, TraceOp::Commit)) > 5);
        assert!(count(|op| matches!(op, TraceOp::Trim)) > 0);
    }

    #[test]
    fn a_prefix_has_the_peak_of_its_own_operations() {
        let trace = Trace::synthetic(5_000, 3);
        assert_eq!(trace.prefix(5_000).peak_live(), trace.peak_live());
        let start = trace.prefix(10);
        assert_eq!(start.ops(), &trace.ops()[..10]);
        assert!(start.peak_live() > 0 && start.peak_live() < trace.peak_live());
    }
}
