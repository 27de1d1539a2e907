//! Writes the CUDA kernel of one rank's program of a plan, from the parts in `symmpool/impl/plan.cuh`.
//!
//! The source depends on the plan alone: its macros say for how many ranks, which element type and which operation it is
//! compiled. Operations that move data at once are written as one where that keeps links and memory busy together: a
//! reduction and the put of its result, copies of one chunk to several places, and a copy within a rank beside one to a
//! peer.

use std::fmt::Write;

use super::schedule::{Level, PeerFlag, Schedule, ScratchSlot};
use super::{Buffer, Cell, CheckedPlan, Collective, Item, Protocol};

/// The entry point of every kernel of a plan.
pub(crate) const ENTRY: &str = "symmpool_plan";
/// Reductions of a program from which on they are functions, and not written out each time.
const MANY_REDUCTIONS: usize = 3;
/// Vectors of a slice that a block copies in about the time in which the handshake travels.
const SHORT_VECTORS: u32 = 512;

struct Writer<'a> {
    checked: &'a CheckedPlan,
    schedule: &'a Schedule,
    rank: u32,
    text: String,
}

/// The kernel of a rank's program.
pub(crate) fn source(checked: &CheckedPlan, schedule: &Schedule, rank: u32) -> String {
    let mut writer = Writer { checked, schedule, rank, text: String::new() };
    writer.kernel();
    writer.text
}

macro_rules! line {
    ($writer:expr, $($what:tt)*) => {{
        // Writing to a string cannot fail.
        let _ = writeln!($writer.text, $($what)*);
    }};
}

mod ll;

impl Writer<'_> {
    fn kernel(&mut self) {
        let plan = self.checked.plan();
        let (schedule, rank) = (self.schedule, self.rank);
        let (world, collective) = (plan.world, plan.collective.name());
        let is_ll = plan.protocol == Protocol::Ll;
        let flags = if is_ll { 0 } else { schedule.flags + 1 };
        let (slots, ll_slots) = (schedule.plain_slots.max(1), schedule.ll_slots);
        let remote = schedule.first_remote(rank);
        let release = remote.is_some() || schedule.begins_with_barrier;
        line!(
            self,
            "// {collective} of {world} ranks in {}: the program of rank {rank}.",
            plan.protocol.name()
        );
        line!(self, "#include <symmpool/impl/plan.cuh>\n");
        line!(self, "using namespace symmpool;\n");
        line!(self, "using Run = PlanRun<{flags}, {slots}, {ll_slots}>;\n");
        line!(self, "extern \"C\" __global__ void __launch_bounds__(THREADS, 1)");
        line!(
            self,
            "    {ENTRY}(const __grid_constant__ Comm comm, const __grid_constant__ CallParams call,"
        );
        line!(self, "                  const __grid_constant__ PlanWork work) {{");
        line!(self, "    begin_kernel(comm.early);");
        line!(self, "    Session session(comm);");
        line!(self, "    const SmGrant grant(comm);");
        line!(self, "    if (grant.is_over() || session.failed) {{\n        return;\n    }}");
        line!(self, "    if (is_leader_block()) {{");
        line!(self, "        run_leader_block<{release}>(session, call, Run::used(call, work));");
        line!(self, "        return;\n    }}");
        if !is_ll {
            line!(self, "    session.advance();");
        }
        line!(self, "    const Run run(session, call, work);");
        if is_ll {
            self.ll_program();
        } else {
            self.program(remote);
        }
        line!(self, "}}");
    }

    /// The turns of a program whose data is followed by signals.
    fn program(&mut self, remote: Option<u32>) {
        let schedule = self.schedule;
        let levels = &schedule.ranks[self.rank as usize];
        // Peers' inputs and outputs are accessed only when they have made the same call.
        let early = self.early();
        if early.contains(&true) {
            line!(
                self,
                "    const bool is_short = work.stages == 1 && work.each <= {SHORT_VECTORS};"
            );
            line!(self, "    if (is_short) {{");
            line!(self, "        run.each(0, [&](const Slice& slice) {{");
            let items = levels.first().map_or(&[][..], |level| &level.items);
            for (item, _) in items.iter().zip(&early).filter(|(_, is_early)| **is_early) {
                let copy = self.copy(item);
                line!(self, "            {copy}");
            }
            line!(self, "        }});\n    }}");
        }
        if schedule.begins_with_barrier {
            line!(
                self,
                "    if (!await_handshakes<true>(session, call)) {{\n        return;\n    }}"
            );
        }
        let uses_scratch = schedule.plain_slots > 0;
        // A rank that accesses no scratch needs none from the beginning on.
        let accesses = schedule.scratch_levels(self.rank);
        let (first, last) =
            (accesses.map(|(first, _)| first), accesses.map_or(0, |(_, last)| last));
        if uses_scratch {
            line!(self, "    const bool reuses = work.stages > work.slots;");
        }
        line!(self, "    const u32 turns = (work.stages - 1) * work.interval + {};", levels.len());
        line!(self, "#pragma unroll 1");
        line!(self, "    for (u32 turn = 0; turn < turns; ++turn) {{");
        line!(self, "        u32 stage = 0;");
        for (number, level) in (0u32..).zip(levels) {
            let frees = uses_scratch && number == last;
            let takes = first == Some(number);
            if level.waits.is_empty()
                && level.items.is_empty()
                && level.signals.is_empty()
                && !frees
                && !takes
            {
                continue;
            }
            line!(self, "        if (run.runs(turn, {number}, stage)) {{");
            if remote == Some(number) && !schedule.begins_with_barrier {
                line!(
                    self,
                    "            if (turn == {number} && !await_handshakes<false>(session, call)) {{"
                );
                line!(self, "                return;\n            }}");
            }
            if takes {
                line!(
                    self,
                    "            if (reuses && !run.await_slot(stage)) {{\n                return;\n            }}"
                );
            }
            if !level.waits.is_empty() {
                let (count, words) = packed(&level.waits);
                line!(
                    self,
                    "            if (!run.await<{count}>(stage, [](u32 nth) {{ return nth_flag(nth, {words}); }})) {{"
                );
                line!(self, "                return;\n            }}");
            }
            if !level.items.is_empty() {
                line!(self, "            run.each(stage, [&](const Slice& slice) {{");
                self.items(level, if number == 0 { &early } else { &[] });
                line!(self, "            }});");
            }
            if !level.signals.is_empty() || frees {
                let (count, words) = packed(&level.signals);
                let frees = if frees { "reuses" } else { "false" };
                let raise = format!(
                    "run.raise<{count}>(stage, {frees}, [](u32 nth) {{ return nth_flag(nth, {words}); }});"
                );
                if level.signals.is_empty() {
                    line!(
                        self,
                        "            if (reuses) {{\n                {raise}\n            }}"
                    );
                } else {
                    line!(self, "            {raise}");
                }
            }
            line!(self, "        }}");
        }
        line!(self, "    }}");
    }

    /// Which operations of the first level are made while the handshake travels with which the program begins, if they
    /// are short: copies within the rank that neither read nor write what operations before them do. Operations are known
    /// by their positions, as a later one may be equal. Empty where there is none.
    fn early(&self) -> Vec<bool> {
        let level = self.schedule.ranks[self.rank as usize].first();
        let Some(level) = level.filter(|_| self.schedule.begins_with_barrier) else {
            return Vec::new();
        };
        let is_early = |(nth, item): (usize, &Item)| {
            let &[src] = item.srcs.as_slice() else { return false };
            let is_local = item.dst.rank == self.rank && src.rank == self.rank;
            let (from, to) = (self.memory(src), self.memory(item.dst));
            let is_free = level.items[..nth].iter().all(|before| {
                let written = self.memory(before.dst);
                let reads = before.srcs.iter().any(|read| self.memory(*read) == to);
                written != from && written != to && !reads
            });
            is_local && is_free
        };
        let early: Vec<bool> = level.items.iter().enumerate().map(is_early).collect();
        // Where there is nothing else to do, nothing is gained.
        if early.contains(&false) { early } else { Vec::new() }
    }

    /// A copy of one slice.
    fn copy(&self, item: &Item) -> String {
        let (from, to) = (self.address(item.srcs[0]), self.address(item.dst));
        format!("copy_slice({from}, {to}, run.bytes(slice, {}));", item.index_in_part)
    }

    /// The operations of a level, on one slice. Those that are `early` have been made already if they are short.
    fn items(&mut self, level: &Level, early: &[bool]) {
        let (result_op, partial_op) = ("OP", "(OP == AVG ? SUM : OP)");
        let reductions = self.schedule.ranks[self.rank as usize]
            .iter()
            .flat_map(|level| &level.items)
            .filter(|item| item.srcs.len() > 1)
            .count();
        let early_at = |at: usize| early.get(at).copied().unwrap_or(false);
        let mut at = 0;
        while let Some(item) = level.items.get(at) {
            let alike = self.copies_of_one_chunk(&level.items[at..]);
            if alike > 1 {
                let copies = at..at + alike;
                let late: Vec<&Item> = copies
                    .clone()
                    .filter(|nth| !early_at(*nth))
                    .map(|nth| &level.items[nth])
                    .collect();
                self.copy_to_all(&level.items[copies], &late);
                at += alike;
                continue;
            }
            at += 1;
            let next = level.items.get(at);
            if item.srcs.len() == 1 {
                let copy = self.copy(item);
                let (is_early, is_next_early) = (early_at(at - 1), early_at(at));
                let Some(next) = next.filter(|next| self.can_be_beside(item, next)) else {
                    let unless = if is_early { "if (!is_short) " } else { "" };
                    line!(self, "                {unless}{copy}");
                    continue;
                };
                at += 1;
                // One of the two is within the rank. Alone, the other is left.
                let other = if is_early { self.copy(next) } else { copy };
                if is_early || is_next_early {
                    line!(self, "                if (is_short) {{\n                    {other}");
                    line!(self, "                }} else");
                }
                let (from, to) = (self.address(item.srcs[0]), self.address(item.dst));
                let (from2, to2) = (self.address(next.srcs[0]), self.address(next.dst));
                let (index_in_part, index2) = (item.index_in_part, next.index_in_part);
                line!(
                    self,
                    "                copy_slices({from}, {to}, run.bytes(slice, {index_in_part}),"
                );
                line!(
                    self,
                    "                            {from2}, {to2}, run.bytes(slice, {index2}));"
                );
                continue;
            }
            let bytes = format!("run.bytes(slice, {})", item.index_in_part);
            let to = self.address(item.dst);
            let count = item.srcs.len();
            let also = next.filter(|next| {
                next.srcs == [item.dst]
                    && next.dst != item.dst
                    && next.index_in_part == item.index_in_part
            });
            at += usize::from(also.is_some());
            let also_at = also.map_or("nullptr".to_owned(), |also| self.address(also.dst));
            let op = if item.divisor > 1 { result_op } else { partial_op };
            let divisor = item.divisor;
            let name = if reductions > MANY_REDUCTIONS {
                "reduce_slices_out_of_line"
            } else {
                "reduce_slices"
            };
            let sources: Vec<String> = item.srcs.iter().map(|src| self.address(*src)).collect();
            line!(self, "                {name}<DTYPE, {op}, {}, {count}>(", also.is_some());
            line!(
                self,
                "                    ReducedSlices<{count}>{{{{{}}}}},",
                sources.join(",\n                        ")
            );
            line!(self, "                    {bytes}, {divisor}, {to}, {also_at});");
        }
    }

    /// How many of the operations at the beginning copy the same chunk. None of them changes it: one that copies it to
    /// where it lies, which a call in place may do, leaves it as it is.
    fn copies_of_one_chunk(&self, items: &[Item]) -> usize {
        let Some(first) = items.first().filter(|item| item.srcs.len() == 1) else { return 0 };
        let is_alike =
            |item: &&Item| item.srcs == first.srcs && item.index_in_part == first.index_in_part;
        items.iter().take_while(is_alike).count()
    }

    /// Copies of one chunk, on one slice. If the slice is short, only those that are `late` are left to be made.
    fn copy_to_all(&mut self, copies: &[Item], late: &[&Item]) {
        if late.len() < copies.len() {
            line!(self, "                if (is_short) {{");
            for item in late {
                let copy = self.copy(item);
                line!(self, "                    {copy}");
            }
            line!(self, "                }} else");
        }
        let (from, index_in_part) = (self.address(copies[0].srcs[0]), copies[0].index_in_part);
        let to: Vec<String> = copies.iter().map(|item| self.address(item.dst)).collect();
        let count = copies.len();
        line!(self, "                copy_slice_to_all<{count}>({from},");
        line!(
            self,
            "                    Targets<{count}>{{{{{}}}}},",
            to.join(",\n                        ")
        );
        line!(self, "                    run.bytes(slice, {index_in_part}));");
    }

    /// Whether a copy can be made at the same time as the one before it: one is within the rank, the other is not, and
    /// none touches what the other writes.
    fn can_be_beside(&self, first: &Item, second: &Item) -> bool {
        let &[from] = second.srcs.as_slice() else { return false };
        let is_local = |item: &Item| item.dst.rank == self.rank && item.srcs[0].rank == self.rank;
        let (to, to2) = (self.memory(first.dst), self.memory(second.dst));
        let (from, from2) = (self.memory(first.srcs[0]), self.memory(from));
        is_local(first) != is_local(second) && to != to2 && to != from2 && to2 != from
    }

    /// The memory of a chunk, where input and output may be one.
    fn memory(&self, cell: Cell) -> Cell {
        match self.checked.plan().alias(cell.rank, cell.index) {
            Some(index) if cell.buffer == Buffer::Output => {
                Cell { buffer: Buffer::Input, index, ..cell }
            }
            _ => cell,
        }
    }

    /// The communicator's rank that is a rank of the plan.
    fn real(&self, rank: u32) -> String {
        match self.checked.plan().collective {
            Collective::Broadcast => format!("run.rank_of({rank})"),
            _ => rank.to_string(),
        }
    }

    /// Where a chunk's slice begins.
    fn address(&self, cell: Cell) -> String {
        let each = self.checked.plan().chunks_of_part().max(1);
        let (part, index_in_part) = (cell.index / each, cell.index % each);
        let own = match cell.buffer {
            Buffer::Scratch => {
                let slot = match self.schedule.slot(cell) {
                    Some(ScratchSlot::Plain(slot)) => slot,
                    _ => 0,
                };
                return format!("run.scratch(slice, {}, {slot})", self.real(cell.rank));
            }
            Buffer::Input => format!("run.input(slice, {part}, {index_in_part})"),
            Buffer::Output => format!("run.output(slice, {part}, {index_in_part})"),
        };
        if cell.rank == self.rank {
            own
        } else {
            format!("comm.at_peer({own}, {})", self.real(cell.rank))
        }
    }
}

/// How many flags there are, and their peers and numbers, as `nth_flag` takes them.
fn packed(flags: &[PeerFlag]) -> (usize, String) {
    let mut words: Vec<u64> = flags
        .chunks(4)
        .map(|four| {
            let packed = four.iter().map(|(peer, number)| u64::from(peer << 12 | number));
            packed.enumerate().fold(0, |word, (nth, flag)| word | flag << (16 * nth))
        })
        .collect();
    if words.is_empty() {
        words.push(0);
    }
    let texts: Vec<String> = words.iter().map(|word| format!("{word:#x}ull")).collect();
    (flags.len(), texts.join(", "))
}
