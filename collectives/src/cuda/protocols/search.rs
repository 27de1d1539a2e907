//! Models of kernels, and the search through all interleavings of their threads.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use symmpool_allocator::models::with_fault;

use super::memory::{MemoryPlace, MemoryWord, Sight, WeakMemory};

/// Answer to the words that a look has found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// The thread looks again.
    Missing,
    /// They are what the thread is to have.
    Right,
    /// They are something else, which the thread takes.
    Wrong,
}

impl Answer {
    /// Answer of a thread that takes what it has found.
    pub(super) fn of(is_right: bool) -> Self {
        if is_right { Self::Right } else { Self::Wrong }
    }

    /// Answer of a thread that waits until `is_there`.
    pub(super) fn when(is_there: bool, is_right: bool) -> Self {
        if is_there { Self::of(is_right) } else { Self::Missing }
    }
}

type Judge = Box<dyn Fn(&[MemoryWord]) -> Answer>;

enum Action {
    Kernel,
    Store { stores: Vec<(MemoryPlace, MemoryWord)>, releases: bool },
    Fence,
    Look { places: Vec<MemoryPlace>, acquires: bool, judge: Judge },
    Arrive { counter: MemoryPlace, of: u32, then: Vec<(MemoryPlace, MemoryWord)> },
    Meet { number: u32 },
    Settle,
}

struct ModelStep {
    says: String,
    action: Action,
}

/// A thread of a kernel, or of a host, with all that it does in all calls. It stands for all threads of its block.
struct Thread {
    rank: u32,
    name: String,
    is_host: bool,
    steps: Vec<ModelStep>,
}

/// Threads of all ranks, and the memory that they share.
#[derive(Default)]
pub(super) struct KernelModel {
    places: Vec<(String, MemoryWord)>,
    threads: Vec<Thread>,
}

impl KernelModel {
    /// The place of this name, which holds `initial` if it is new.
    pub(super) fn place(&mut self, name: impl Into<String>, initial: MemoryWord) -> MemoryPlace {
        let name = name.into();
        self.places.iter().position(|(known, _)| *known == name).unwrap_or_else(|| {
            self.places.push((name, initial));
            self.places.len() - 1
        })
    }

    /// A thread of a rank. All threads of a rank have the same kernels.
    pub(super) fn thread(&mut self, rank: u32, name: &str) -> usize {
        let (name, is_host) = (name.to_owned(), false);
        self.threads.push(Thread { rank, name, is_host, steps: Vec::new() });
        self.threads.len() - 1
    }

    /// A thread of a rank's host, which has no kernels.
    pub(super) fn host(&mut self, rank: u32) -> usize {
        let thread = self.thread(rank, "host");
        self.threads[thread].is_host = true;
        thread
    }

    fn step(&mut self, thread: usize, says: impl Into<String>, action: Action) {
        self.threads[thread].steps.push(ModelStep { says: says.into(), action });
    }

    /// Begins the next kernel, when all threads of the rank have ended the one before.
    pub(super) fn kernel(&mut self, thread: usize, epoch: u32) {
        self.step(thread, format!("begins call {epoch:#x}"), Action::Kernel);
    }

    /// Stores without order between them, nor after what the thread did before.
    pub(super) fn store(
        &mut self,
        thread: usize,
        says: &str,
        stores: Vec<(MemoryPlace, MemoryWord)>,
    ) {
        self.step(thread, says, Action::Store { stores, releases: false });
    }

    /// Stores behind all that the thread did before.
    pub(super) fn release(
        &mut self,
        thread: usize,
        says: &str,
        stores: Vec<(MemoryPlace, MemoryWord)>,
    ) {
        self.step(thread, says, Action::Store { stores, releases: true });
    }

    pub(super) fn fence(&mut self, thread: usize) {
        self.step(thread, "has a fence", Action::Fence);
    }

    /// Looks at places until they do not miss anything.
    pub(super) fn look(
        &mut self,
        thread: usize,
        says: &str,
        places: Vec<MemoryPlace>,
        judge: impl Fn(&[MemoryWord]) -> Answer + 'static,
    ) {
        self.step(thread, says, Action::Look { places, acquires: false, judge: Box::new(judge) });
    }

    /// Looks at places as [`look`](Self::look) does, and sees what was released with what it takes.
    pub(super) fn acquire(
        &mut self,
        thread: usize,
        says: &str,
        places: Vec<MemoryPlace>,
        judge: impl Fn(&[MemoryWord]) -> Answer + 'static,
    ) {
        self.step(thread, says, Action::Look { places, acquires: true, judge: Box::new(judge) });
    }

    /// Adds one to a counter; who is the last of `of` threads stores `then`.
    pub(super) fn arrive(
        &mut self,
        thread: usize,
        counter: MemoryPlace,
        of: u32,
        then: Vec<(MemoryPlace, MemoryWord)>,
    ) {
        self.step(thread, "has read the state", Action::Arrive { counter, of, then });
    }

    /// Waits on the host until a thread of every rank has come to the meeting of this number.
    pub(super) fn meet(&mut self, thread: usize, number: u32) {
        self.step(thread, format!("comes to meeting {number}"), Action::Meet { number });
    }

    /// Waits for so long that every thread sees every store.
    pub(super) fn settle(&mut self, thread: usize) {
        self.step(thread, "waits for a while", Action::Settle);
    }
}

/// How threads end where they must not.
pub(super) struct Violation {
    why: String,
    path: Vec<String>,
}

#[derive(Clone)]
struct State {
    at: Vec<u8>,
    memory: WeakMemory,
}

/// A model that is searched, with a number for each of its words.
struct ModelSearch<'a> {
    model: &'a KernelModel,
    words: Vec<MemoryWord>,
    numbers: BTreeMap<MemoryWord, u8>,
    /// The step behind the last one in which a thread accesses a place.
    ends: Vec<Vec<usize>>,
}

/// Threads that go on, which one it was, and whether they take something wrong.
type Next = (State, usize, bool);

impl<'a> ModelSearch<'a> {
    fn new(model: &'a KernelModel) -> Self {
        let mut words: BTreeSet<MemoryWord> =
            model.places.iter().map(|(_, initial)| *initial).collect();
        let mut ends = vec![vec![0; model.places.len()]; model.threads.len()];
        for (thread, ends) in model.threads.iter().zip(&mut ends) {
            assert!(thread.steps.len() < u8::MAX.into(), "{} steps", thread.steps.len());
            for (nth, step) in thread.steps.iter().enumerate() {
                let mut accesses = |place: MemoryPlace| ends[place] = nth + 1;
                match &step.action {
                    Action::Store { stores, .. } => {
                        words.extend(stores.iter().map(|(_, word)| *word));
                        stores.iter().for_each(|(place, _)| accesses(*place));
                    }
                    Action::Look { places, .. } => places.iter().for_each(|place| accesses(*place)),
                    Action::Arrive { counter, of, then } => {
                        words.extend((0..=*of).map(|count| (count, 0)));
                        words.extend(then.iter().map(|(_, word)| *word));
                        then.iter().for_each(|(place, _)| accesses(*place));
                        accesses(*counter);
                    }
                    Action::Kernel | Action::Fence | Action::Meet { .. } | Action::Settle => (),
                }
            }
        }
        let words: Vec<MemoryWord> = words.into_iter().collect();
        let number =
            |(nth, word): (usize, &MemoryWord)| (*word, u8::try_from(nth).expect("few words"));
        let numbers = words.iter().enumerate().map(number).collect();
        Self { model, words, numbers, ends }
    }

    fn begin(&self) -> State {
        let words: Vec<u8> =
            self.model.places.iter().map(|(_, initial)| self.numbers[initial]).collect();
        let at = vec![0; self.model.threads.len()];
        let mut state = State { memory: WeakMemory::new(&words, at.len()), at };
        self.settle(&mut state);
        state
    }

    /// Makes steps that change nothing for other threads, and forgets what nobody can see.
    fn settle(&self, state: &mut State) {
        for (thread, at) in state.at.iter_mut().enumerate() {
            while let Some(ModelStep { action: Action::Fence, .. }) =
                self.model.threads[thread].steps.get(*at as usize)
            {
                state.memory.fence(thread);
                *at += 1;
            }
        }
        let at = &state.at;
        state.memory.forget(|thread, place| self.ends[thread][place] > at[thread] as usize);
    }

    fn step(&self, state: &State, thread: usize) -> Option<&'a ModelStep> {
        self.model.threads[thread].steps.get(state.at[thread] as usize)
    }

    /// All states that a thread may make of this one, each with whether it takes something wrong.
    fn steps(&self, state: &State, thread: usize, sight: Sight) -> Vec<Next> {
        let Some(step) = self.step(state, thread) else { return Vec::new() };
        let after = |memory: WeakMemory, is_wrong: bool| {
            let mut next = State { at: state.at.clone(), memory };
            next.at[thread] += 1;
            (next, thread, is_wrong)
        };
        match &step.action {
            Action::Kernel => {
                let threads = &self.model.threads;
                let is_same = |other: &Thread| !other.is_host && other.rank == threads[thread].rank;
                let all: Vec<usize> =
                    (0..threads.len()).filter(|other| is_same(&threads[*other])).collect();
                let is_there = |other: &usize| {
                    matches!(
                        self.step(state, *other),
                        Some(ModelStep { action: Action::Kernel, .. })
                    )
                };
                if all[0] != thread || !all.iter().all(is_there) {
                    return Vec::new();
                }
                let mut next = state.clone();
                next.memory.end_kernel(&all);
                all.iter().for_each(|other| next.at[*other] += 1);
                vec![(next, thread, false)]
            }
            Action::Store { stores, releases } => {
                let memories = self.stored(&state.memory, thread, stores, *releases);
                memories.into_iter().map(|memory| after(memory, false)).collect()
            }
            Action::Fence => unreachable!("made at once"),
            Action::Look { places, acquires, judge } => {
                let found = state.memory.load(thread, places, *acquires, sight);
                let judged = found.into_iter().filter_map(|(memory, words)| {
                    let words: Vec<MemoryWord> =
                        words.iter().map(|word| self.words[*word as usize]).collect();
                    match judge(&words) {
                        Answer::Missing => None,
                        answer => Some(after(memory, answer == Answer::Wrong)),
                    }
                });
                judged.collect()
            }
            Action::Arrive { counter, of, then } => {
                let count = self.words[state.memory.last(*counter) as usize].0;
                let mut memory = state.memory.clone();
                let counted = self.numbers.get(&(count + 1, 0));
                let Some(counted) = counted else { return vec![after(memory, true)] };
                memory.change(thread, *counter, |_| *counted);
                if count + 1 != *of {
                    return vec![after(memory, false)];
                }
                let memories = self.stored(&memory, thread, then, false);
                memories.into_iter().map(|memory| after(memory, false)).collect()
            }
            Action::Meet { number } => {
                let has_come = |other: usize| {
                    let at = state.at[other] as usize;
                    let meets = |step: &ModelStep| matches!(&step.action, Action::Meet { number: theirs } if theirs == number);
                    let steps = &self.model.threads[other].steps;
                    steps.iter().position(meets).is_none_or(|meeting| meeting <= at)
                };
                let is_met = (0..state.at.len()).all(has_come);
                let met = is_met.then(|| after(state.memory.clone(), false));
                met.into_iter().collect()
            }
            Action::Settle => {
                let mut memory = state.memory.clone();
                memory.settle();
                vec![after(memory, false)]
            }
        }
    }

    fn stored(
        &self,
        memory: &WeakMemory,
        thread: usize,
        stores: &[(MemoryPlace, MemoryWord)],
        releases: bool,
    ) -> Vec<WeakMemory> {
        let mut memories = vec![memory.clone()];
        for (place, word) in stores {
            let number = self.numbers[word];
            let each = |memory: WeakMemory| memory.store(thread, *place, number, releases);
            memories = memories.into_iter().flat_map(each).collect();
        }
        memories
    }

    fn all_steps(&self, state: &State, sight: Sight) -> Vec<Next> {
        (0..state.at.len()).flat_map(|thread| self.steps(state, thread, sight)).collect()
    }

    fn is_done(&self, state: &State) -> bool {
        (0..state.at.len()).all(|thread| self.step(state, thread).is_none())
    }

    fn says(&self, before: &State, thread: usize) -> String {
        let Thread { rank, name, .. } = &self.model.threads[thread];
        let says = self.step(before, thread).map_or("", |step| &step.says);
        format!("rank {rank}'s {name} {says}")
    }

    /// Steps at which threads wait.
    fn waits(&self, state: &State) -> String {
        let waiting = (0..state.at.len()).filter(|thread| self.step(state, *thread).is_some());
        let says: Vec<String> = waiting.map(|thread| self.says(state, thread)).collect();
        format!("nobody goes on: {}", says.join("; "))
    }

    fn run(&self) -> Result<usize, Violation> {
        let first = self.begin();
        let mut seen = BTreeSet::from([key(&first)]);
        let mut stack = vec![(first.clone(), self.all_steps(&first, Sight::Any))];
        let mut path: Vec<String> = Vec::new();
        while let Some((state, next)) = stack.last_mut() {
            let Some((mut next, thread, is_wrong)) = next.pop() else {
                stack.pop();
                path.pop();
                continue;
            };
            path.push(self.says(state, thread));
            if is_wrong {
                return Err(Violation { why: "it takes something wrong".to_owned(), path });
            }
            self.settle(&mut next);
            if !seen.insert(key(&next)) {
                path.pop();
                continue;
            }
            if !self.is_done(&next) && self.all_steps(&next, Sight::Newest).is_empty() {
                return Err(Violation { why: self.waits(&next), path });
            }
            let steps = self.all_steps(&next, Sight::Any);
            stack.push((next, steps));
        }
        Ok(seen.len())
    }
}

fn key(state: &State) -> Vec<u8> {
    let mut bytes = state.at.clone();
    state.memory.write(&mut bytes);
    bytes
}

/// How many states a model has; or how its threads come to one in which they must not be.
pub(super) fn search(model: &KernelModel) -> Result<usize, Violation> {
    ModelSearch::new(model).run()
}

/// Proves models: in no interleaving does a thread take something wrong, or wait for ever; and with each of the faults
/// that happens in some model. Both are panics otherwise.
pub(super) fn prove(mutants: &[&'static str], models: impl Fn() -> Vec<KernelModel>) {
    let begin = Instant::now();
    let (mut count, mut states) = (0, 0);
    for model in models() {
        count += 1;
        states += search(&model).unwrap_or_else(|Violation { why, path }| {
            panic!("model {count}: {why}, after\n{}", path.join("\n"));
        });
    }
    assert!(states > count, "{states} states");
    eprintln!("{count} models, {states} states, {:.1} s", begin.elapsed().as_secs_f64());
    for name in mutants {
        let find = || models().iter().find_map(|model| search(model).err());
        let Some(Violation { why, path }) = with_fault(Some(name), find) else {
            panic!("the models hold with the fault {name}");
        };
        let last = path.last().map_or("", |step| step);
        eprintln!("{name} is noticed after {} steps: {last}; {why}", path.len());
    }
    eprintln!("all in {:.1} s", begin.elapsed().as_secs_f64());
}
