//! Reports of why a rank gave up, each written by one rank and read by another (rule S5).

use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::host::wait::fault::WaitFault;
use crate::signal::{Atomics, Native, Word};
use crate::sync::{mutant, weakened};
use crate::types::timeout::nanoseconds;

/// One rank's report of why it gave up.
#[repr(C, align(64))]
pub(in crate::host) struct AbortRecord<A: Atomics = Native> {
    /// Zero, or a packed cause; see [`crate::host::wait::fault`].
    cause: A::U64,
    /// The epoch of the failed call.
    epoch: A::U64,
    /// The rank's timeout, in nanoseconds.
    timeout: A::U64,
}

impl<A: Atomics> AbortRecord<A> {
    /// Reports a fault, then raises the flag of the rank that reads this. Others may raise it as well.
    pub(super) fn report(&self, flag: &A::U32, fault: &WaitFault) {
        if mutant("mutant_flag_before_record") {
            flag.store(1, Ordering::Release);
        }
        self.epoch.store(fault.epoch, Ordering::Relaxed);
        self.timeout.store(nanoseconds(fault.timeout), Ordering::Relaxed);
        let order = weakened("mutant_relaxed_cause", Ordering::Release);
        self.cause.store(fault.pack(), order);
        flag.store(1, Ordering::Release);
    }

    /// The fault, if it was reported as a whole.
    pub(super) fn read(&self) -> Option<WaitFault> {
        let cause = self.cause.load(Ordering::Acquire);
        let epoch = self.epoch.load(Ordering::Relaxed);
        let timeout = Duration::from_nanos(self.timeout.load(Ordering::Relaxed));
        WaitFault::unpack(cause, epoch, timeout)
    }
}

#[cfg(test)]
mod models {
    use std::sync::Arc;

    use loom::sync::atomic::{AtomicU32, AtomicU64};
    use symmpool_allocator::models::prove;

    use super::*;
    use crate::host::wait::fault::Cause;
    use crate::signal::tests::Loom;

    struct AbortBlock {
        flag: AtomicU32,
        records: [AbortRecord<Loom>; 2],
    }

    fn fault(epoch: u64) -> WaitFault {
        let timeout = Duration::from_secs(epoch);
        WaitFault { cause: Cause::Timeout, operation: 3, phase: 1, peer: 2, epoch, timeout }
    }

    /// Two ranks report to a third one. Whatever it reads is whole, and a raised flag has a report.
    fn two_ranks_report() {
        let word = || AtomicU64::new(0);
        let record = || AbortRecord { cause: word(), epoch: word(), timeout: word() };
        let block = Arc::new(AbortBlock { flag: AtomicU32::new(0), records: [record(), record()] });
        let reporters = [0, 1].map(|rank| {
            let theirs = Arc::clone(&block);
            loom::thread::spawn(move || {
                theirs.records[rank].report(&theirs.flag, &fault(rank as u64 + 5));
            })
        });
        if block.flag.load(Ordering::Acquire) != 0 {
            let read = block.records.each_ref().map(AbortRecord::read);
            for (found, epoch) in read.iter().zip(5..).filter(|(found, _)| found.is_some()) {
                assert_eq!(*found, Some(fault(epoch)));
            }
            assert!(read.iter().any(Option::is_some), "a flag without a report");
        }
        reporters.into_iter().for_each(|reporter| reporter.join().unwrap());
    }

    /// Rule S5.
    #[test]
    fn loom_reports_of_faults_are_whole() {
        prove(4, &["mutant_flag_before_record", "mutant_relaxed_cause"], two_ranks_report);
    }
}
