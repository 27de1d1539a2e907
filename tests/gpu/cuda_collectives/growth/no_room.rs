//! Devices without room for the memory that grows: all ranks keep what they have, calls are right, and it is tried again.

use symmpool_allocator::{Error, Result};

use super::{GrowingCall, GrowthChecks, MANY, SMALL};
use crate::cuda::CallGraph;
use crate::launches::{Emulated, Failing};

impl GrowthChecks<'_> {
    /// One rank's device has no memory, or no room to map that of others. Emulated devices alone fail when they are asked to.
    pub(super) fn has_no_room(&mut self) -> Result<()> {
        let Some(emulated) = Emulated::find() else { return Ok(()) };
        // The first segment, the last one, this rank's mapping, and that of a peer.
        for (what, nth) in [
            (Failing::Create, 1),
            (Failing::Create, 3),
            (Failing::Mapping, 1),
            (Failing::Mapping, 8),
            (Failing::Mapping, 9),
        ] {
            for captured in [false, true] {
                self.one_rank_without_room(emulated, (what, nth), captured)?;
            }
        }
        Ok(())
    }

    fn one_rank_without_room(
        &mut self,
        emulated: Emulated,
        (what, nth): (Failing, i32),
        captured: bool,
    ) -> Result<()> {
        let name = format!("{what:?} {nth}, captured: {captured}");
        // Memory of communicators that are gone is not there to be used again.
        self.renew()?;
        self.pool.commit()?;
        self.pool.lane(symmpool_allocator::CONTROL_LANE)?.trim()?;
        self.pool.commit()?;
        self.case(GrowingCall::AllReduce, 1000)?;
        let before = self.pool.lane(symmpool_allocator::CONTROL_LANE)?.reserved()?;
        let odd = self.pool.rank() == self.pool.world() - 1;
        if odd {
            emulated.fail(what, nth);
        }
        let mut graphs = Vec::new();
        let mut large = |growth: &mut Self, may_fail: bool| {
            if captured {
                let made = CallGraph::capture(growth.pool, growth.stream, || {
                    growth.call(GrowingCall::AllReduce, MANY)
                })?;
                graphs.push(made);
            } else {
                growth.case(GrowingCall::AllReduce, MANY)?;
            }
            if may_fail {
                let calls = emulated.fail(what, 0);
                let failed = !odd || calls >= nth;
                growth.check(&format!("{name}: the device was asked {calls} times"), failed);
            }
            Ok::<_, Error>(growth.comm.memory())
        };
        let held = large(self, true)?;
        let small = held.total <= SMALL && held.wanted > 0;
        self.check(&format!("{name}: all keep what they have: {held:?}"), small);
        // In a capture, what the ranks had made for it returns with the next commit, which is due.
        self.check(&format!("{name}: is due"), captured || !self.pool.is_commit_due());
        // Tried again after two more large calls.
        let held = [large(self, false)?, large(self, false)?, large(self, false)?];
        let grown = held.map(|held| held.total > SMALL);
        self.check(&format!("{name}: it is tried again: {grown:?}"), grown == [false, false, true]);
        for graph in graphs {
            self.case_by(GrowingCall::AllReduce, MANY, |growth| {
                graph.launch(growth.pool, growth.stream)
            })?;
            self.case(GrowingCall::AllReduce, 1000)?;
            graph.destroy(self.pool)?;
        }
        self.case(GrowingCall::AllToAll, MANY)?;
        self.check(&format!("{name}: nothing is due"), !self.pool.is_commit_due());
        let held = self.pool.lane(symmpool_allocator::CONTROL_LANE)?.reserved()? - before;
        let taken = self.comm.memory().total;
        self.check(&format!("{name}: {held} bytes more for {taken}"), held <= taken);
        Ok(())
    }
}
