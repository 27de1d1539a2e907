//! Random programs on the host engine: ranks are threads, and a communicator makes the calls of many programs.

use std::sync::Arc;
use std::time::Duration;

use symmpool_allocator::Result;
use symmpool_allocator::testing::SplitMix64;
use symmpool_collectives::plan::reference::ChunkLayout;
use symmpool_collectives::plan::{
    Buffer as Part, CheckedPlan, Collective, Operation, Plan, Protocol,
};
use symmpool_collectives::{HostEngineOptions, Place};

use crate::flat_heap::{FlatHeap, small_scratch};
use crate::random_plans::calls::{Boundaries, RandomCall, differs, inputs};
use crate::random_plans::schedules::outputs;
use crate::random_shrink::shrink;

/// Bytes of a rank's input or output, at most, and where they lie in its windows.
const MAX_BYTES: usize = 200 << 10;
const ROOM: u64 = 256 << 10;
/// Byte that lies in front of a buffer and behind it.
const FENCE: u8 = 0xa5;
const FENCE_BYTES: usize = 128;
/// Smaller programs that are tried when one is wrong.
const MAX_TRIES: u32 = 300;

pub(super) fn boundaries() -> Boundaries {
    let scratch = small_scratch().scratch_bytes as usize;
    Boundaries { scratch, chunks: vec![1024, 4096, 32 << 10], most: MAX_BYTES }
}

/// A program, and the calls that are made of it.
#[derive(Debug)]
pub(super) struct HostProgram {
    number: u64,
    checked: Arc<CheckedPlan>,
    calls: Vec<Prepared>,
}

/// A call with its data, and what it must leave; nothing if it must be refused.
#[derive(Debug)]
struct Prepared {
    case: RandomCall,
    inputs: Vec<Vec<u8>>,
    wanted: Option<Vec<Vec<u8>>>,
}

impl HostProgram {
    pub(super) fn new(
        number: u64,
        checked: CheckedPlan,
        cases: Vec<RandomCall>,
        seed: u64,
    ) -> Self {
        let plan = checked.plan();
        let prepare = |(nth, case): (u64, RandomCall)| {
            let layout = ChunkLayout::of_call(&checked, case.count, case.dtype.size());
            let Some(layout) = layout else {
                return Prepared { case, inputs: Vec::new(), wanted: None };
            };
            let inputs = inputs(plan, &case, &layout, SplitMix64::at(seed, nth));
            let found = outputs(plan, &case, layout, &inputs, seed);
            Prepared { case, inputs, wanted: found.ok().map(|(outputs, _)| outputs) }
        };
        let calls = (0..).zip(cases).map(prepare).collect();
        Self { number, calls, checked: Arc::new(checked) }
    }

    pub(super) fn world(&self) -> u32 {
        self.checked.plan().world
    }

    /// Properties of the program that make it more than trivial.
    pub(super) fn shapes(&self) -> Vec<&'static str> {
        let plan = self.checked.plan();
        let all = || plan.programs.iter().flatten();
        let spans = || {
            all().flat_map(|each| match &each.operation {
                Operation::Copy { dst, src }
                | Operation::Put { dst, src }
                | Operation::Get { dst, src } => vec![*dst, *src],
                Operation::Reduce { dst, srcs } => srcs.iter().copied().chain([*dst]).collect(),
                _ => Vec::new(),
            })
        };
        let is = |name: &'static str| all().any(|each| each.operation.name() == name);
        let channel = |each: &Operation| matches!(each, Operation::Signal { channel: 1.., .. });
        let shapes = [
            ("with block groups", all().any(|each| each.group.is_some())),
            ("with barriers", is("barrier")),
            ("with reductions", is("reduce")),
            ("with gets", is("get")),
            ("with puts", is("put")),
            ("with several channels", all().any(|each| channel(&each.operation))),
            ("with ranges", spans().any(|span| span.count > 1)),
            ("through scratch", spans().any(|span| span.buffer == Part::Scratch)),
            ("in place", self.checked.in_place().is_ok()),
            ("in LL", plan.protocol == Protocol::Ll),
            ("of one's own collective", matches!(plan.collective, Collective::Custom { .. })),
            ("with an idle rank", plan.world > 1 && plan.programs.iter().any(Vec::is_empty)),
            ("of 30 operations or more", plan.len() >= 30),
            ("of 3 ranks or more", plan.world >= 3),
        ];
        shapes.iter().filter(|(_, has)| *has).map(|(name, _)| *name).collect()
    }
}

/// A rank's memory of a call.
struct Buffers<'a> {
    heap: &'a FlatHeap,
    rank: u32,
    /// Memory that is no window.
    own: [Vec<u8>; 2],
}

/// Where a call's input and output lie.
struct Places {
    input: Place,
    output: Place,
    from: *mut u8,
    to: *mut u8,
}

impl Buffers<'_> {
    fn places(
        &mut self,
        work: &HostProgram,
        case: &RandomCall,
        in_place: bool,
        nth: usize,
    ) -> Places {
        let plan = work.checked.plan();
        let size = case.dtype.size();
        let skew = if nth.is_multiple_of(3) { 0 } else { size * (nth % 5) };
        let reached = [work.checked.needs_input_window(), work.checked.needs_output_window()];
        let in_windows = nth.is_multiple_of(2) || reached.contains(&true);
        let begin = |which: usize| FENCE_BYTES + skew + which * 3 * size;
        let place = |buffers: &mut Self, which: usize, at: usize| {
            if in_windows {
                let offset = buffers.heap.windows + which as u64 * ROOM + at as u64;
                (Place::Window(offset), buffers.heap.at(buffers.rank, offset))
            } else {
                let address = buffers.own[which].as_mut_ptr().wrapping_add(at);
                (Place::Unregistered(address), address)
            }
        };
        let part = case.count * size * self.rank as usize;
        let (input, output) = match (in_place, &plan.collective) {
            (false, _) => (place(self, 0, begin(0)), place(self, 1, begin(1))),
            (true, Collective::AllGather) => {
                (place(self, 1, begin(1) + part), place(self, 1, begin(1)))
            }
            (true, Collective::ReduceScatter) => {
                (place(self, 0, begin(0)), place(self, 0, begin(0) + part))
            }
            (true, _) => {
                let one = place(self, 1, begin(1));
                (one, one)
            }
        };
        Places { input: input.0, output: output.0, from: input.1, to: output.1 }
    }
}

fn fill(at: *mut u8, bytes: usize, value: u8) {
    // SAFETY: the caller passes parts of its own buffers, which nobody else accesses between calls.
    unsafe { std::ptr::write_bytes(at, value, bytes) };
}

fn store(at: *mut u8, data: &[u8]) {
    // SAFETY: the caller passes parts of its own buffers, which nobody else accesses between calls.
    unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), at, data.len()) };
}

fn load(at: *const u8, bytes: usize) -> Vec<u8> {
    let mut data = vec![0; bytes];
    // SAFETY: the caller passes parts of its own buffers, which nobody else accesses between calls.
    unsafe { std::ptr::copy_nonoverlapping(at, data.as_mut_ptr(), bytes) };
    data
}

/// Findings of a rank about a call.
type Found = (Result<()>, Option<String>);

/// Makes all calls of all programs of so many ranks. Returns how many there were, and what was wrong.
pub(super) fn run(world: u32, works: &[HostProgram], seed: u64) -> (u64, Vec<String>) {
    let mut random = SplitMix64::for_participant(seed, world.into());
    let epochs = [1, 1, (1 << 30) - 40, (1 << 32) - 60, u64::MAX >> 1];
    let first_epoch = epochs[random.below(epochs.len() as u64) as usize];
    let options = || HostEngineOptions { first_epoch, ..small_scratch() };
    let heap = FlatHeap::new(world, 1, 2 * ROOM, &options());
    let found: Vec<(Vec<Found>, Result<()>)> = heap.ranks(|rank| {
        let mut engine = heap.engine(rank, 0, options());
        let own = [vec![0; MAX_BYTES + 4096], vec![0; MAX_BYTES + 4096]];
        let mut buffers = Buffers { heap: &heap, rank, own };
        let mut found = Vec::new();
        let mut nth = 0;
        for work in works {
            for prepared in &work.calls {
                nth += 1;
                found.push(call(&mut engine, work, prepared, &mut buffers, nth));
            }
        }
        // A rank that declined the last calls reports them in its next one.
        let ended = engine.barrier();
        (found, ended)
    });
    let ends = found.iter().filter_map(|(_, ended)| ended.as_ref().err());
    let mut wrong: Vec<String> = ends.map(|error| format!("the last barrier: {error}")).collect();
    let found: Vec<Vec<Found>> = found.into_iter().map(|(found, _)| found).collect();
    let calls: Vec<(&HostProgram, &Prepared)> =
        works.iter().flat_map(|work| work.calls.iter().map(move |call| (work, call))).collect();
    for (nth, (work, prepared)) in calls.iter().enumerate() {
        let of_ranks: Vec<&Found> = found.iter().map(|rank| &rank[nth]).collect();
        if let Some(why) = judge(work, prepared, &of_ranks) {
            let RandomCall { count, dtype, op, in_place, root } = &prepared.case;
            let smallest = shrunk(work, prepared);
            wrong.push(format!(
                "program {} on the host, call {nth} from epoch {first_epoch} on, {count} {dtype:?} by {op:?}, in \
                 place {in_place:?}, root {root}: {why}\n{}",
                work.number, smallest
            ));
            // Later calls of a communicator that has failed say nothing more.
            if of_ranks.iter().any(|(result, _)| {
                result.as_ref().is_err_and(|error| error.is_timeout() || error.is_peer_lost())
            }) {
                break;
            }
        }
    }
    (calls.len() as u64, wrong)
}

/// The smallest program of which the same call is wrong, if it is wrong without the calls before it.
fn shrunk(work: &HostProgram, prepared: &Prepared) -> String {
    let mut tries = 0;
    let plan = work.checked.plan();
    let is_wrong = |plan: &Plan| {
        tries += 1;
        let Ok(checked) = plan.clone().check() else { return false };
        let calls =
            HostProgram::new(work.number, checked, vec![prepared.case.clone(); 3], work.number);
        tries < MAX_TRIES && !run_once(&calls).is_empty()
    };
    shrink(plan, is_wrong).to_json()
}

/// Makes the calls of one program on a heap of its own, and says what was wrong.
fn run_once(work: &HostProgram) -> Vec<String> {
    let options = || HostEngineOptions { timeout: Duration::from_secs(3), ..small_scratch() };
    let heap = FlatHeap::new(work.world(), 1, 2 * ROOM, &options());
    let found: Vec<Vec<Found>> = heap.ranks(|rank| {
        let mut engine = heap.engine(rank, 0, options());
        let own = [vec![0; MAX_BYTES + 4096], vec![0; MAX_BYTES + 4096]];
        let mut buffers = Buffers { heap: &heap, rank, own };
        let calls = work.calls.iter().enumerate();
        calls.map(|(nth, each)| call(&mut engine, work, each, &mut buffers, nth)).collect()
    });
    let judge = |(nth, prepared): (usize, &Prepared)| {
        let of_ranks: Vec<&Found> = found.iter().map(|rank| &rank[nth]).collect();
        judge(work, prepared, &of_ranks)
    };
    work.calls.iter().enumerate().filter_map(judge).collect()
}

fn call(
    engine: &mut symmpool_collectives::HostEngine,
    work: &HostProgram,
    prepared: &Prepared,
    buffers: &mut Buffers<'_>,
    nth: usize,
) -> Found {
    let Prepared { case, inputs, wanted } = prepared;
    let plan = work.checked.plan();
    let (world, rank) = (plan.world, buffers.rank);
    let of_plan = (rank + world - case.root) % world;
    let is_in_place = case.in_place[of_plan as usize];
    let places = buffers.places(work, case, is_in_place, nth);
    let size = case.dtype.size();
    let input: &[u8] = inputs.get(of_plan as usize).map_or(&[], Vec::as_slice);
    let lengths =
        work.checked.lengths(of_plan, case.count).map(|length| length.unwrap_or(0) * size);
    // Output first: in place it is the input's memory.
    for (at, bytes) in [(places.to, lengths[1]), (places.from, lengths[0].max(input.len()))] {
        if !is_in_place || at == places.to {
            fill(at.wrapping_sub(FENCE_BYTES), bytes + 2 * FENCE_BYTES, FENCE);
        }
    }
    if is_in_place {
        let longest = lengths[0].max(lengths[1]);
        let begin = if places.from < places.to { places.from } else { places.to };
        fill(begin.wrapping_sub(FENCE_BYTES), longest + 2 * FENCE_BYTES, FENCE);
    }
    store(places.from, input);
    let RandomCall { count, dtype, op, root, .. } = *case;
    let (from, to) = (places.input, places.output);
    // SAFETY: the buffers hold what the call reads and writes; between calls only their rank accesses them.
    let result = unsafe { engine.run_plan(&work.checked, from, to, count, dtype, op, root) };
    let Some(wanted) = wanted else { return (result, None) };
    if result.is_err() {
        return (result, None);
    }
    let wanted = &wanted[of_plan as usize];
    let got = load(places.to, wanted.len());
    let reduces = plan.collective.reduces();
    let mut why = None;
    if let Some(at) = differs(&got, wanted, dtype, reduces) {
        let of = |bytes: &[u8]| bytes[at * size..(at + 1) * size].to_vec();
        let lacks = (of(&got), of(wanted));
        why =
            Some(format!("rank {rank}: element {at} is {:?} and should be {:?}", lacks.0, lacks.1));
    }
    let fences = |at: *mut u8, bytes: usize| {
        let before = load(at.wrapping_sub(FENCE_BYTES), FENCE_BYTES);
        let behind = load(at.wrapping_add(bytes), FENCE_BYTES);
        before.iter().chain(&behind).all(|byte| *byte == FENCE)
    };
    if !is_in_place {
        if !fences(places.to, wanted.len()) {
            why = Some(format!("rank {rank}: wrote outside of the output"));
        }
        if !fences(places.from, input.len().max(lengths[0])) {
            why = Some(format!("rank {rank}: wrote outside of the input"));
        }
        if load(places.from, input.len()) != input {
            why = Some(format!("rank {rank}: wrote to the input"));
        }
    }
    (result, why)
}

/// Why a call was wrong, if it was.
fn judge(work: &HostProgram, prepared: &Prepared, of_ranks: &[&Found]) -> Option<String> {
    if let Some(why) = of_ranks.iter().find_map(|(_, why)| why.clone()) {
        return Some(why);
    }
    let errors: Vec<_> = of_ranks.iter().filter_map(|(result, _)| result.as_ref().err()).collect();
    let Some(error) = errors.first() else {
        return match &prepared.wanted {
            None if prepared.case.count > 0 => Some("it was to be refused".to_owned()),
            _ => None,
        };
    };
    if errors.len() < of_ranks.len() {
        return Some(format!("some ranks were served: {error}"));
    }
    let typed = |error: &symmpool_allocator::Error| {
        error.is_invalid_argument() || error.is_unsupported() || error.is_diverged()
    };
    if let Some(other) = errors.iter().find(|error| !typed(error)) {
        return Some(other.to_string());
    }
    let in_place = &prepared.case.in_place;
    let is_mixed = in_place.contains(&true) && in_place.contains(&false);
    let reached = work.checked.needs_input_window() || work.checked.needs_output_window();
    // In place on some ranks, buffers that peers reach lie at other offsets there.
    let may_be_refused = prepared.wanted.is_none()
        || (in_place.contains(&true) && work.checked.in_place().is_err())
        || (is_mixed && reached && error.is_diverged())
        || error.to_string().contains("between which sums of")
        || error.to_string().contains("bytes of scratch are too few");
    (!may_be_refused).then(|| error.to_string())
}
