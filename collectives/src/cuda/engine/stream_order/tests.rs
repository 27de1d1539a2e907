//! The order of calls on streams that only know what they have waited for.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;

use symmpool_allocator::models::{deeper, with_fault};
use symmpool_allocator::testing::SplitMix64;
use symmpool_allocator::{Result, Stream};

use super::{CudaHandle, Events, StreamId, StreamOrder};

type Work = BTreeSet<u32>;
/// Key of a stream: its handle and the thread that it is of.
type StreamKey = (u64, u64);

#[derive(Debug, Default)]
struct State {
    behind: BTreeMap<StreamKey, Work>,
    events: Vec<(Work, Option<u64>)>,
    captures: BTreeMap<StreamKey, u64>,
    records: usize,
    next: u32,
}

/// A device that notes which work each stream comes behind.
#[derive(Debug, Default)]
struct Model(Mutex<State>);

fn key(stream: Stream) -> StreamKey {
    let id = StreamId::of(stream);
    (id.stream.raw(), id.thread)
}

impl Model {
    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.lock().expect("no test panics with it")
    }

    /// Puts work on a stream, and returns its number.
    fn put(&self, stream: Stream) -> u32 {
        let mut state = self.state();
        state.next += 1;
        let number = state.next;
        state.behind.entry(key(stream)).or_default().insert(number);
        number
    }

    fn behind(&self, stream: Stream) -> Work {
        self.state().behind.get(&key(stream)).cloned().unwrap_or_default()
    }

    fn records(&self) -> usize {
        self.state().records
    }
}

impl Events for Model {
    fn event(&self) -> Result<CudaHandle> {
        let mut state = self.state();
        state.events.push((Work::new(), None));
        Ok(state.events.len() - 1)
    }

    fn record(&self, event: CudaHandle, stream: Stream) -> Result<()> {
        let mut state = self.state();
        let capture = state.captures.get(&key(stream)).copied();
        let behind = state.behind.get(&key(stream)).cloned().unwrap_or_default();
        state.events[event] = (behind, capture);
        state.records += 1;
        Ok(())
    }

    fn wait(&self, event: CudaHandle, stream: Stream) -> Result<()> {
        let mut state = self.state();
        let (work, capture) = state.events[event].clone();
        assert_eq!(
            capture,
            state.captures.get(&key(stream)).copied(),
            "an event of another capture, or of none, which CUDA does not wait for"
        );
        state.behind.entry(key(stream)).or_default().extend(work);
        Ok(())
    }

    fn check(&self, _stream: Stream) -> Result<()> {
        Ok(())
    }

    fn is_capturing(&self, stream: Stream) -> bool {
        self.capture_of(stream).is_some()
    }

    fn capture_of(&self, stream: Stream) -> Option<u64> {
        self.state().captures.get(&key(stream)).copied()
    }
}

/// A program of random calls, and what each of them has to come behind.
struct RandomCalls {
    model: Model,
    order: StreamOrder,
    concurrent: bool,
    /// The streams that are captured together, if any are.
    capture: Option<(u64, BTreeSet<u64>)>,
    captures: u64,
    /// Work that the captured streams came behind before.
    outside: Vec<(StreamKey, Work)>,
    /// Work that the next call outside graphs comes behind, and the next one of the capture.
    eager: Work,
    in_graph: Work,
    /// Waits for peers behind the last call's end on its stream, outside graphs and in the capture: calls on other streams
    /// must not wait for them.
    late: [Work; 2],
}

impl RandomCalls {
    fn new(concurrent: bool) -> Self {
        Self {
            model: Model::default(),
            order: StreamOrder::default(),
            concurrent,
            capture: None,
            captures: 0,
            outside: Vec::new(),
            eager: Work::new(),
            in_graph: Work::new(),
            late: [Work::new(), Work::new()],
        }
    }

    fn is_captured(&self, stream: Stream) -> bool {
        self.capture.as_ref().is_some_and(|(_, streams)| streams.contains(&stream.raw()))
    }

    fn needed(&mut self, captured: bool) -> &mut Work {
        if captured { &mut self.in_graph } else { &mut self.eager }
    }

    /// Whether the order of calls takes a stream now: a call outside graphs cannot follow one whose stream is captured.
    fn switch(&mut self, stream: Stream) -> bool {
        let captured = self.is_captured(stream);
        let before = self.model.behind(stream);
        if let Err(error) = self.order.switch_to(&self.model, stream) {
            assert!(error.is_invalid_state() && !captured && self.capture.is_some(), "{error}");
            return false;
        }
        let now = self.model.behind(stream);
        let gained: Work = now.difference(&before).copied().collect();
        assert!(
            gained.is_disjoint(&self.late[usize::from(captured)]),
            "waits for a wait: {gained:?}"
        );
        let needed = self.needed(captured).clone();
        assert!(needed.is_subset(&now), "{:?} is not waited for", needed.difference(&now));
        true
    }

    fn call(&mut self, stream: Stream) {
        if !self.switch(stream) {
            return;
        }
        let captured = self.is_captured(stream);
        let work = self.model.put(stream);
        self.order.after_call(&self.model, stream, self.concurrent).unwrap();
        *self.needed(captured) = Work::from([work]);
        self.late[usize::from(captured)].clear();
    }

    /// Work that belongs to the last call.
    fn extend(&mut self, stream: Stream) {
        let captured = self.is_captured(stream);
        let work = self.model.put(stream);
        if self.order.extend(&self.model, stream).is_ok() {
            self.needed(captured).insert(work);
            self.late[usize::from(captured)].clear();
        }
    }

    /// A wait for a peer that is no part of a call.
    fn wait(&mut self, stream: Stream) {
        let captured = self.is_captured(stream);
        self.order.before_wait(&self.model, stream).unwrap();
        let work = self.model.put(stream);
        self.late[usize::from(captured)].insert(work);
    }

    fn forget(&mut self, stream: Stream) {
        let captured = self.is_captured(stream);
        if let Err(error) = self.order.forget(&self.model, stream) {
            assert!(error.is_invalid_state() && captured, "{error}");
        }
    }

    fn begin_capture(&mut self, streams: &[Stream]) {
        self.captures += 1;
        for stream in streams {
            let key = key(*stream);
            let mut state = self.model.state();
            state.captures.insert(key, self.captures);
            let before = state.behind.insert(key, Work::new()).unwrap_or_default();
            self.outside.push((key, before));
        }
        self.capture = Some((self.captures, streams.iter().map(|stream| stream.raw()).collect()));
        self.in_graph.clear();
        self.late[1].clear();
    }

    fn end_capture(&mut self) {
        self.capture = None;
        let mut state = self.model.state();
        state.captures.clear();
        state.behind.extend(self.outside.drain(..));
    }
}

/// A stream of a device.
#[allow(unsafe_code)] // a handle that nothing follows
fn stream(number: u64) -> Stream {
    // SAFETY: the model uses it as a number alone.
    unsafe { Stream::from_raw(number) }
}

#[test]
fn calls_come_behind_what_belongs_to_the_call_before_and_behind_no_wait_that_follows_it() {
    let streams = [stream(0), stream(16), stream(32), stream(48)];
    for seed in 0..3000 {
        let mut random = SplitMix64::new(seed);
        let mut program = RandomCalls::new(seed % 2 == 0);
        for _ in 0..60 {
            let stream = streams[(random.next() % 4) as usize];
            match random.next() % 12 {
                0..5 => program.call(stream),
                5..7 => program.extend(stream),
                7..9 => program.wait(stream),
                9 if program.capture.is_none() => {
                    let count = 1 + (random.next() % 3) as usize;
                    let first = 1 + (random.next() % 3) as usize;
                    let all = [1, 2, 3].map(|at| streams[1 + (first + at) % 3]);
                    program.begin_capture(&all[..count]);
                }
                9 => program.end_capture(),
                10 => program.forget(stream),
                _ => program.concurrent = !program.concurrent,
            }
        }
    }
}

/// Kinds of steps of a program on two streams.
const STEPS: usize = 12;

impl RandomCalls {
    /// The step of that number; false if there is no such step now.
    fn step(&mut self, number: usize) -> bool {
        let streams = [stream(16), stream(32)];
        let stream = streams[number % 2];
        match number {
            0 | 1 => self.call(stream),
            2 | 3 => self.extend(stream),
            4 | 5 => self.wait(stream),
            6 | 7 => self.forget(stream),
            8 | 9 if self.capture.is_none() => self.begin_capture(&[stream]),
            10 if self.capture.is_none() => self.begin_capture(&streams),
            8 if self.capture.is_some() => self.end_capture(),
            11 => self.concurrent = !self.concurrent,
            _ => return false,
        }
        true
    }
}

/// Runs all programs of `steps` steps behind a call, and says how many there are. A program that goes wrong panics.
fn run_all(steps: usize) -> usize {
    let mut count = 0;
    for number in 0..STEPS.pow(steps as u32) {
        let mut program = RandomCalls::new(false);
        program.call(stream(16));
        let mut left = number;
        let is_whole = (0..steps).all(|_| {
            let step = left % STEPS;
            left /= STEPS;
            program.step(step)
        });
        count += usize::from(is_whole);
    }
    count
}

/// All short programs, where the ones above are long and random.
#[test]
fn explored_calls_come_behind_the_call_before() {
    let steps = 4 + deeper();
    eprintln!("{} programs", run_all(steps));
    for name in [
        "mutant_event_of_the_call_before",
        "mutant_end_not_moved",
        "mutant_wait_within_the_call",
        "mutant_forgotten_unrecorded",
        "mutant_captured_call_unnoticed",
    ] {
        let run = || catch_unwind(AssertUnwindSafe(|| run_all(steps)));
        assert!(with_fault(Some(name), run).is_err(), "{name}");
    }
}

#[test]
fn calls_on_one_stream_record_nothing() {
    let (model, mut order) = (Model::default(), StreamOrder::default());
    for _ in 0..100 {
        order.switch_to(&model, stream(16)).unwrap();
        model.put(stream(16));
        order.after_call(&model, stream(16), false).unwrap();
        order.extend(&model, stream(16)).unwrap();
    }
    assert_eq!(model.records(), 0);
}

#[test]
fn threads_that_take_turns_on_their_own_default_streams_are_in_order() {
    let model = Model::default();
    let order = Mutex::new(StreamOrder::default());
    let last = Mutex::new(RefCell::new(Work::new()));
    for turn in 0..20 {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let own = Stream::PER_THREAD;
                let mut order = order.lock().unwrap();
                order.switch_to(&model, own).unwrap();
                let last = last.lock().unwrap();
                assert!(last.borrow().is_subset(&model.behind(own)), "turn {turn}");
                let mut work = Work::from([model.put(own)]);
                order.after_call(&model, own, false).unwrap();
                if turn % 2 == 0 {
                    work.insert(model.put(own));
                    order.extend(&model, own).unwrap();
                }
                last.replace(work);
            });
        });
    }
    // A stream with a handle of its own comes behind them, and they behind it.
    let mut order = order.into_inner().unwrap();
    order.switch_to(&model, stream(16)).unwrap();
    let last = last.into_inner().unwrap();
    assert!(last.borrow().is_subset(&model.behind(stream(16))));
}

#[test]
fn the_legacy_stream_is_the_default_stream() {
    assert_eq!(stream(1), Stream::DEFAULT);
    assert!(!stream(1).is_per_thread() && !Stream::numbered(2).is_per_thread());
}

#[test]
fn only_a_capture_holds_a_report_back() {
    let (model, mut order) = (Model::default(), StreamOrder::default());
    assert!(!order.is_captured(&model));
    order.switch_to(&model, stream(16)).unwrap();
    order.after_call(&model, stream(16), false).unwrap();
    assert!(!order.is_captured(&model));
    model.state().captures.insert(key(stream(16)), 1);
    assert!(order.is_captured(&model));
    model.state().captures.clear();
    // A call that another thread alone could record an event behind holds no report back: that ends with no capture.
    order.switch_to(&model, Stream::PER_THREAD).unwrap();
    model.state().captures.insert(key(Stream::PER_THREAD), 2);
    assert!(order.is_captured(&model));
    let elsewhere = std::thread::scope(|scope| scope.spawn(|| order.is_captured(&model)).join());
    assert!(!elsewhere.unwrap());
}
