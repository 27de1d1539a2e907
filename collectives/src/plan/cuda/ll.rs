//! The kernel of a program in the LL protocol, in which data shows by itself that it has arrived.

use std::fmt::Write;

use super::super::schedule::ScratchSlot;
use super::super::{Buffer, Cell, Item};
use super::Writer;

/// Copies that a thread makes at once.
const AT_ONCE: usize = 8;

impl Writer<'_> {
    /// The program of one thread in the LL protocol, on its own vectors.
    pub(super) fn ll_program(&mut self) {
        let levels = &self.schedule.ranks[self.rank as usize];
        let items: Vec<&Item> = levels.iter().flat_map(|level| &level.items).collect();
        let mut left = items.as_slice();
        // The atomic operation in it takes some time, so data that waits for nobody is sent before.
        let mut is_advanced = false;
        while let Some(first) = left.first() {
            let count = if first.srcs.len() == 1 { self.copies_at_once(left) } else { 1 };
            if !is_advanced && left[..count].iter().any(|item| self.waits(item)) {
                line!(self, "    session.advance();");
                is_advanced = true;
            }
            if let &[_] = first.srcs.as_slice() {
                let (now, rest) = left.split_at(count);
                left = rest;
                let sources: Vec<(Cell, u32)> =
                    now.iter().map(|item| (item.srcs[0], item.index_in_part)).collect();
                let stores: Vec<(usize, Cell, u32)> = now
                    .iter()
                    .enumerate()
                    .map(|(nth, item)| (nth, item.dst, item.index_in_part))
                    .collect();
                self.ll_loop(&sources, None, &stores);
                continue;
            }
            // Copies of the result that follow go out with it.
            let goes_out = |next: &&&Item| {
                next.srcs == [first.dst] && next.index_in_part == first.index_in_part
            };
            let copies = left[1..].iter().take_while(goes_out).count();
            let sources: Vec<(Cell, u32)> =
                first.srcs.iter().map(|src| (*src, first.index_in_part)).collect();
            let stores: Vec<(usize, Cell, u32)> =
                left[..=copies].iter().map(|item| (0, item.dst, first.index_in_part)).collect();
            self.ll_loop(&sources, Some(first), &stores);
            left = &left[copies + 1..];
        }
        if !is_advanced {
            line!(self, "    session.advance();");
        }
    }

    /// Whether an operation waits for a peer in the LL protocol.
    fn waits(&self, item: &Item) -> bool {
        item.srcs.iter().any(|src| matches!(self.slot(*src), Some(ScratchSlot::Ll(..))))
    }

    /// How many of the copies at the beginning can be made at once: none reads or writes what another one writes here,
    /// and nothing is awaited before what a peer may need first has gone out.
    fn copies_at_once(&self, items: &[&Item]) -> usize {
        let mut written: Vec<Cell> = Vec::new();
        let mut sends = false;
        for item in items.iter().take(AT_ONCE) {
            let &[src] = item.srcs.as_slice() else { break };
            let (from, to) = (self.memory(src), self.memory(item.dst));
            if written.contains(&from) || written.contains(&to) || (sends && self.waits(item)) {
                break;
            }
            written.push(to);
            sends |= item.dst.rank != self.rank;
        }
        written.len().max(1)
    }

    /// A loop over a thread's vectors: loads or awaits the sources, reduces them for `reduction`, and stores results,
    /// each as the number of a source, a chunk and the index in a part whose length it has.
    fn ll_loop(
        &mut self,
        sources: &[(Cell, u32)],
        reduction: Option<&Item>,
        stores: &[(usize, Cell, u32)],
    ) {
        let count = sources.len();
        // A block has several slices where there are fewer than the call was divided for. It does each operation for all of them
        // before the next one, so among threads that wait for each other one is at the earliest operation.
        line!(
            self,
            "    for (u32 index = run.blocks.first; index < run.blocks.end; ++index) {{\n        \
             const Slice slice = run.slice(index, 0);"
        );
        line!(self, "        const LlSource from[{count}] = {{");
        for (cell, index_in_part) in sources {
            let bytes = format!("run.bytes(slice, {index_in_part})");
            match self.slot(*cell) {
                Some(ScratchSlot::Ll(slot, writer)) => {
                    let (inbox, peer) = (self.inbox(cell.rank, slot), self.real(writer));
                    line!(self, "            {{nullptr, {inbox}, {peer}, {bytes}}},");
                }
                _ => {
                    let at = self.address(*cell);
                    line!(self, "            {{{at}, nullptr, 0, {bytes}}},");
                }
            }
        }
        line!(self, "        }};");
        line!(self, "        uint4 all[{count}];");
        line!(
            self,
            "        for (u64 at = threadIdx.x; 16 * at < slice.bytes; at += blockDim.x) {{"
        );
        line!(
            self,
            "            if (!collect_ll(session, from, at, all)) {{\n                return;\n            }}"
        );
        if let Some(item) = reduction {
            let op = if item.divisor > 1 { "OP" } else { "(OP == AVG ? SUM : OP)" };
            let divisor = item.divisor;
            line!(self, "            all[0] = reduce_vectors<DTYPE, {op}>(all, {divisor});");
        }
        for (nth, cell, index_in_part) in stores {
            let bytes = format!("run.bytes(slice, {index_in_part})");
            line!(self, "            if (from[{nth}].has(at)) {{");
            match self.slot(*cell) {
                Some(ScratchSlot::Ll(slot, _)) => {
                    let inbox = self.inbox(cell.rank, slot);
                    let to = format!("{inbox} + 32 * at");
                    line!(
                        self,
                        "                ll_store_vector({to}, all[{nth}], session.epoch);"
                    );
                }
                _ => {
                    let to = self.address(*cell);
                    line!(self, "                Target({to}, {bytes}).store(at, all[{nth}]);");
                }
            }
            line!(self, "            }}");
        }
        line!(self, "        }}\n    }}");
    }

    fn slot(&self, cell: Cell) -> Option<ScratchSlot> {
        if cell.buffer == Buffer::Scratch { self.schedule.slot(cell) } else { None }
    }

    fn inbox(&self, owner: u32, slot: u32) -> String {
        format!("run.inbox(slice, {}, {slot})", self.real(owner))
    }
}
