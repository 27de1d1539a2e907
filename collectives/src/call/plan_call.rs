//! Calls with a plan: what both engines check of their arguments, how ranks describe them, and how elements are divided
//! into chunks.

use symmpool_allocator::{Error, Result};

use super::{Arguments, CallDescription, OpType};
use crate::plan::{CheckedPlan, Collective, Plan};
use crate::types::place::Place;
use crate::{DType, ReduceOp};

/// Chunks of scratch begin at multiples of this, a cache line; so do chunks of inputs and outputs, if they may differ in
/// length.
pub(crate) const LINE: usize = 64;
/// Counts from here on leave no room in call descriptions for an algorithm's hash.
const MAX_COUNT: usize = 1 << 48;

/// How a call's elements are divided into chunks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ChunkSizes {
    /// Elements of a part.
    pub(crate) count: usize,
    /// Elements of a chunk; those at the end of a part may have fewer, or none.
    pub(crate) each: usize,
    of_part: usize,
    pub(crate) size: usize,
}

impl ChunkSizes {
    fn new(checked: &CheckedPlan, count: usize, size: usize) -> Result<Self> {
        let plan = checked.plan();
        let of_part = plan.chunks_of_part() as usize;
        if checked.needs_equal_chunks && !count.is_multiple_of(of_part) {
            let why = match &plan.collective {
                Collective::Custom { name, .. } => {
                    format!("{name} is a collective of equal chunks")
                }
                _ => "its results pass through chunks that may be shorter".to_owned(),
            };
            return Err(Error::invalid_argument(format!(
                "the algorithm {}: {count} elements do not divide into {of_part} equal chunks, which it needs, as {why}",
                plan.name
            )));
        }
        let each = count.div_ceil(of_part);
        let each = if checked.needs_equal_chunks {
            each
        } else {
            each.next_multiple_of((LINE / size).max(1))
        };
        Ok(Self { count, each, of_part, size })
    }

    /// The elements of chunks with this index in their parts.
    pub(crate) fn length(&self, index_in_part: usize) -> usize {
        self.count.saturating_sub(index_in_part.saturating_mul(self.each)).min(self.each)
    }

    /// Where a chunk of the input or output begins, in bytes.
    pub(crate) fn start(&self, index: u32) -> usize {
        let (part, index_in_part) = (index as usize / self.of_part, index as usize % self.of_part);
        // A chunk without elements may lie behind the end, where nothing is accessed.
        (part * self.count + (index_in_part * self.each).min(self.count)) * self.size
    }
}

impl Arguments {
    /// Refuses what no engine can run, and finds the chunks.
    pub(crate) fn check(&self, checked: &CheckedPlan, rank: u32, world: u32) -> Result<ChunkSizes> {
        let Self { count, dtype, op, .. } = *self;
        let plan = checked.plan();
        let name = &plan.name;
        let has_root = plan.collective == Collective::Broadcast;
        self.check_ranks((name, plan.collective.name(), has_root), Some(plan.world), rank, world)?;
        if count >= MAX_COUNT {
            return Err(Error::invalid_argument(format!("{count} elements on rank {rank}")));
        }
        let reached = [checked.needs_input_window(), checked.needs_output_window()];
        if reached[1] && count > 0 && !self.output.is_window() && plan.output_chunks(rank) == 0 {
            return Err(Error::unsupported(format!(
                "the algorithm {name} on rank {rank}, which has no output: peers' outputs are found at the offset of its \
                 own, so pass what other ranks pass, allocated from the pool in the same order; it is not touched"
            )));
        }
        self.check_windows(name, rank, reached)?;
        let is_integer = matches!(dtype, DType::I32 | DType::I64 | DType::U8 | DType::I8);
        let divides = plan.collective.reduces() && op == ReduceOp::Avg;
        if divides && checked.has_partial_results && is_integer {
            return Err(Error::unsupported(format!(
                "the algorithm {name} on rank {rank}: it reduces in several steps, between which sums of {} can \
                 overflow before they are divided; use sum, or an algorithm that reduces once",
                dtype.name()
            )));
        }
        ChunkSizes::new(checked, count, dtype.size())
    }

    /// Description of the call that ranks compare.
    pub(crate) fn describe(&self, checked: &CheckedPlan) -> CallDescription {
        let plan = checked.plan();
        let reached = [checked.needs_input_window(), checked.needs_output_window()];
        self.described(operation(plan), plan.collective.reduces(), reached, checked.hash())
    }

    /// Description of a call with an algorithm of that hash, which ranks compare. `reached` says whether peers access
    /// the input and the output; where they do not, buffers may lie anywhere.
    pub(crate) fn described(
        &self,
        operation: OpType,
        reduces: bool,
        reached: [bool; 2],
        hash: u64,
    ) -> CallDescription {
        let mut call =
            CallDescription::new(operation).elements(self.dtype, self.count).root(self.root);
        if reduces {
            call = call.reduce(self.op);
        }
        let [input, output] = [(reached[0], self.input), (reached[1], self.output)]
            .map(|(is, place)| if is { place } else { Place::Unregistered(std::ptr::null_mut()) });
        call.input(input).output(output).registered(hash)
    }

    /// Refuses another number of ranks than an algorithm is for, and a root that there is not. The algorithm has a name and
    /// a collective, of which calls may or may not have a root.
    pub(crate) fn check_ranks(
        &self,
        (name, collective, has_root): (&str, &str, bool),
        made_for: Option<u32>,
        rank: u32,
        world: u32,
    ) -> Result<()> {
        if let Some(made_for) = made_for.filter(|made_for| *made_for != world) {
            return Err(Error::invalid_argument(format!(
                "the algorithm {name} on rank {rank}: it is for {made_for} ranks, and the communicator has {world}"
            )));
        }
        let root = self.root;
        if root >= world || (root > 0 && !has_root) {
            return Err(Error::invalid_argument(format!(
                "root {root} of {collective} on rank {rank}, among {world} ranks"
            )));
        }
        Ok(())
    }

    /// Refuses an input and an output that peers access and that are no windows.
    pub(crate) fn check_windows(&self, name: &str, rank: u32, reached: [bool; 2]) -> Result<()> {
        for (reached, what, place) in
            [(reached[0], "input", self.input), (reached[1], "output", self.output)]
        {
            if reached && self.count > 0 && !place.is_window() {
                return Err(Error::unsupported(format!(
                    "the algorithm {name} on rank {rank}: peers access its {what}, which must lie in a window: \
                     allocate it from the pool, as by pool.empty"
                )));
            }
        }
        Ok(())
    }

    /// The error for a plan that is wrong where input and output are one memory.
    pub(crate) fn check_in_place(checked: &CheckedPlan, rank: u32) -> Result<()> {
        checked.in_place().map_err(|why| {
            Error::invalid_argument(format!(
                "the algorithm {} on rank {rank} is wrong in place ({}); pass an output of its own",
                checked.plan().name,
                why.message
            ))
        })
    }
}

fn operation(plan: &Plan) -> OpType {
    match plan.collective {
        Collective::AllReduce => OpType::AllReduce,
        Collective::AllGather => OpType::AllGather,
        Collective::ReduceScatter => OpType::ReduceScatter,
        Collective::Broadcast => OpType::Broadcast,
        Collective::AllToAll => OpType::AllToAll,
        Collective::Custom { .. } => OpType::Custom,
    }
}
