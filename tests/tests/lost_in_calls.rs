//! Ranks that die at every point of a call in host memory: collectives, experts, programs, messages and signals. All other
//! ranks get an error that names the dead one, in time, and no call that returned before has a wrong element.
//!
//! Without `SYMMPOOL_EVERY_STEP=1` a rank dies at the first, a middle and the last passage of each point in a round of
//! calls; with it, at every passage, and each rank does.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use symmpool_allocator::{Block, Driver, Error, Pool, Result, Stream};
use symmpool_collectives::plan::Plan;
use symmpool_collectives::{
    Algorithm, CallStep, CombineAt, Communicator, CommunicatorOptions, DType, DispatchAt,
    ExpertBuffer, ExpertLayout, ExpertQuantization, ExpertShape, ReduceOp, Request,
    StandardCollective, watch_call_steps,
};
use symmpool_tests::launch::{Job, RankReport};
use symmpool_tests::leftovers::ProcessResources;
use symmpool_tests::rank_process::RankProcess;

const STREAM: &Stream = &Stream::DEFAULT;
const WORLD: u32 = 3;
/// Deadline of every call.
const LIMIT: Duration = Duration::from_secs(20);
/// How soon others must notice that a process is gone, which is long before the deadline.
const SOON: Duration = Duration::from_secs(5);
/// How many jobs run at a time. Most of their time is waiting.
const AT_A_TIME: usize = 3;
/// Elements of calls: one that goes in one hop, and one that passes through scratch in several pieces.
const FEW: usize = 300;
const MANY: usize = 40_000;

const STEPS: usize = CallStep::ALL.len();

/// How often this rank has passed each point.
static PASSED: [AtomicU64; STEPS] = [const { AtomicU64::new(0) }; STEPS];

/// The test function that every rank runs.
#[test]
fn rank() {
    let Some(process) = RankProcess::from_env() else { return };
    let before = ProcessResources::now();
    live_through(&process);
    let left = ProcessResources::now().leaks_since(&before);
    process.report("left", left.unwrap_or_else(|| "nothing".into()));
}

/// Makes rounds of calls until one fails. The second round counts: "count", or "STEP PASSAGE" of the rank that dies.
fn live_through(process: &RankProcess) {
    let member = process.join();
    let driver = Driver::host().unwrap();
    let pool = Pool::builder(member.group.clone()).driver(driver).stride(1 << 30).build().unwrap();
    let options = CommunicatorOptions {
        timeout: LIMIT,
        scratch_bytes: 64 << 10,
        ..CommunicatorOptions::default()
    };
    let comm = Communicator::with_options(&pool, &options).unwrap();
    let calls = Calls::new(&pool, &comm);
    calls.round(1).unwrap_or_else(|(_, call, error)| panic!("{call}: {error}"));
    let mut words = process.scenario.split(' ');
    let (victim, step) = (words.next().unwrap(), words.next());
    let dies_at = step.filter(|_| victim.parse() == Ok(process.rank)).map(|step| {
        let passage: u64 = words.next().unwrap().parse().unwrap();
        (CallStep::ALL[step.parse::<usize>().unwrap()], passage)
    });
    assert!(watch_call_steps(move |step| {
        let passed = PASSED[step as usize].fetch_add(1, Ordering::Relaxed) + 1;
        if dies_at == Some((step, passed)) {
            let this = rustix::process::getpid();
            rustix::process::kill_process(this, rustix::process::Signal::KILL).unwrap();
        }
    }));
    for round in 2..4 {
        match calls.round(round) {
            Ok(()) if victim == "count" => {
                let passed = PASSED.each_ref().map(|count| count.load(Ordering::Relaxed));
                return process.report("passed", format!("{passed:?}"));
            }
            Ok(()) => {}
            Err((took, call, error)) => {
                process.report("call", call);
                process.report("error", describe(&error, took));
                let began = Instant::now();
                let again = comm.barrier(STREAM).unwrap_err();
                return process.report("again", describe(&again, began.elapsed()));
            }
        }
    }
}

/// Whether it is an error of a lost rank that came soon, the ranks that it names, and its text.
fn describe(error: &Error, took: Duration) -> String {
    format!("{} {} {:?} after {took:?}: {error}", error.is_peer_lost(), took < SOON, error.ranks())
}

/// Everything that calls of a round need.
struct Calls<'a> {
    comm: &'a Communicator,
    rank: usize,
    few: Block<i32>,
    many: [Block<i32>; 2],
    parts: [Block<i32>; 2],
    message: [Block<i32>; 2],
    program: Algorithm,
    experts: ExpertBuffer<&'a Communicator>,
    handle: Block<u8>,
    tokens: [Block<f32>; 2],
    ids: Block<i32>,
}

type Call<'a> = (&'static str, &'a dyn Fn(i32) -> Result<()>);

/// Tokens of a rank, one for each expert, and their channels.
const TOKENS: usize = 2 * WORLD as usize;
const HIDDEN: usize = 64;

impl<'a> Calls<'a> {
    fn new(pool: &Pool, comm: &'a Communicator) -> Self {
        let block = |count| pool.alloc::<i32>(count).unwrap();
        let shape = ExpertShape {
            hidden: HIDDEN,
            experts: TOKENS as u32,
            top_k: 1,
            max_tokens: TOKENS,
            dtype: DType::F32,
            capacity: None,
        };
        let experts = ExpertBuffer::new(comm, shape, None).unwrap();
        let handle = pool.alloc::<u8>(experts.handle_parts().bytes).unwrap();
        let tokens = [(); 2].map(|()| pool.alloc::<f32>(TOKENS * HIDDEN).unwrap());
        let ids = block(TOKENS);
        ids.write(&std::array::from_fn::<i32, TOKENS, _>(|token| token as i32)).unwrap();
        Self {
            comm,
            rank: pool.rank() as usize,
            few: block(FEW),
            many: [block(MANY), block(MANY)],
            parts: [block(FEW), block(FEW * WORLD as usize)],
            message: [block(MANY), block(MANY)],
            program: rotation(),
            experts,
            handle,
            tokens,
            ids,
        }
    }

    /// Makes every call once, and checks what it did. The first error, after how long it came, and the call.
    fn round(&self, round: i32) -> Result<(), (Duration, &'static str, Error)> {
        let (comm, world) = (self.comm, WORLD as usize);
        let (next, before) = ((self.rank + 1) % world, (self.rank + world - 1) % world);
        let of = move |rank: usize, element: usize| {
            round * 1000 + rank as i32 * 100 + element as i32 % 7
        };
        let mine = |count: usize| -> Vec<i32> { (0..count).map(|at| of(self.rank, at)).collect() };
        let sum = move |at| (0..world).map(|rank| of(rank, at)).sum::<i32>();
        let all = |block: &Block<i32>, wanted: &dyn Fn(usize) -> i32| {
            let found = block.read().unwrap();
            let wrong = found.iter().enumerate().find(|(at, found)| **found != wanted(*at));
            assert_eq!(wrong, None, "round {round}");
        };
        let [part, parts] = &self.parts;
        let [input, output] = &self.many;
        let standard = StandardCollective::AllReduce;
        let calls: [Call<'_>; 13] = [
            ("barrier", &|_| comm.barrier(STREAM)),
            ("all_reduce of few", &|_| {
                self.few.write(&mine(FEW))?;
                comm.all_reduce(&self.few, ReduceOp::Sum, STREAM)?;
                all(&self.few, &sum);
                Ok(())
            }),
            ("all_reduce of many", &|_| {
                input.write(&mine(MANY))?;
                comm.call(&Request::new(standard, output, input).algorithm("two_shot"), STREAM)?;
                all(output, &sum);
                Ok(())
            }),
            ("all_reduce of ordinary memory", &|_| {
                let mut data = mine(MANY);
                comm.call(&Request::on_slice(standard, &mut data), STREAM)?;
                assert!(data.iter().enumerate().all(|(at, found)| *found == sum(at)));
                Ok(())
            }),
            ("reduce_scatter", &|_| {
                parts.write(&mine(parts.len()))?;
                comm.reduce_scatter_into(part, parts, ReduceOp::Sum, STREAM)?;
                all(part, &|at| sum(self.rank * FEW + at));
                Ok(())
            }),
            ("all_gather", &|_| {
                part.write(&mine(FEW))?;
                comm.all_gather_into(parts, part, STREAM)?;
                all(parts, &|at| of(at / FEW, at % FEW));
                Ok(())
            }),
            ("broadcast", &|_| {
                input.write(&mine(MANY))?;
                comm.broadcast(input, 1, STREAM)?;
                all(input, &|at| of(1, at));
                Ok(())
            }),
            ("all_to_all_v", &|_| {
                // Rank r sends so many elements to each, and as many from there on.
                let sizes = |rank: usize| vec![1000 * (rank + 1); world];
                input.write(&mine(MANY))?;
                let received: Vec<usize> = (0..world).map(|rank| 1000 * (rank + 1)).collect();
                comm.all_to_all_v_into(output, input, &received, &sizes(self.rank), STREAM)?;
                let (found, mut begin) = (output.read()?, 0);
                for (sender, count) in received.into_iter().enumerate() {
                    let sent = (0..count).map(|at| of(sender, self.rank * count + at));
                    assert!(
                        found[begin..begin + count].iter().copied().eq(sent),
                        "from rank {sender}"
                    );
                    begin += count;
                }
                Ok(())
            }),
            ("program", &|_| {
                self.few.write(&mine(FEW))?;
                comm.call(&Request::new(&self.program, part, &self.few), STREAM)?;
                all(part, &|at| of(before, at));
                Ok(())
            }),
            ("dispatch and combine", &|round| self.visit_experts(round)),
            ("signal and wait", &|_| {
                comm.signal(next as u32, 3, STREAM)?;
                comm.wait(before as u32, 3, LIMIT, STREAM)
            }),
            ("send and recv", &|_| {
                let [sent, received] = &self.message;
                sent.write(&mine(MANY))?;
                thread::scope(|scope| {
                    let sends = scope.spawn(|| comm.send(sent, next as u32, STREAM));
                    comm.recv(received, before as u32, STREAM)?;
                    sends.join().unwrap()
                })?;
                all(received, &|at| of(before, at));
                Ok(())
            }),
            ("last barrier", &|_| comm.barrier(STREAM)),
        ];
        for (name, call) in calls {
            let began = Instant::now();
            call(round).map_err(|error| (began.elapsed(), name, error))?;
        }
        Ok(())
    }

    /// Sends a token to every expert and back, which changes nothing.
    fn visit_experts(&self, round: i32) -> Result<()> {
        let [input, output] = &self.tokens;
        let values: Vec<f32> = (0..input.len())
            .map(|at| (round as usize * 1000 + self.rank * 100 + at % 50) as f32)
            .collect();
        input.write(&values)?;
        let none = std::ptr::null();
        let dispatch = DispatchAt {
            input: input.as_ptr().cast(),
            quantized: false,
            scales: none,
            scale_bytes: 0,
            scale_dtype: DType::U8,
            tokens: TOKENS,
            ids: self.ids.as_ptr().cast(),
            ids_dtype: DType::I32,
            weights: none.cast(),
            quantize: ExpertQuantization::None,
            layout: ExpertLayout::ByRank,
            known: false,
            more: 0,
        };
        let handle = self.handle.as_ptr();
        // SAFETY: blocks have the lengths that the buffer's shape and its handle's parts say, and nobody else uses them.
        unsafe { self.experts.dispatch_at(handle, &dispatch, STREAM) }?;
        let combine = CombineAt {
            input: self.experts.received().rows,
            // Two experts of each rank, one token from each.
            input_rows: 2 * WORLD as usize,
            output: output.as_ptr().cast(),
            tokens: TOKENS,
            weights: none.cast(),
            by_expert: false,
            more: 0,
        };
        // SAFETY: the handle is the dispatch's, whose rows lie where it has put them; the output has room for all tokens, and
        // nobody else uses them.
        unsafe { self.experts.combine_at(handle, &combine, STREAM) }?;
        assert!(output.read()? == values, "round {round}");
        Ok(())
    }
}

/// A program by which every rank gets the input of the rank before it.
fn rotation() -> Algorithm {
    let world = WORLD as usize;
    let rank = |rank: usize| {
        let (next, before) = ((rank + 1) % world, (rank + world - 1) % world);
        let put = format!(
            r#"{{"op": "put", "dst": {{"buffer": "output", "index": 0, "rank": {next}}}, "src": {{"buffer": "input", "index": 0}}, "group": 0}}"#
        );
        let signals = format!(
            r#"{{"op": "signal", "peer": {next}, "channel": 1}}, {{"op": "wait", "peer": {before}, "channel": 1}}"#
        );
        let enter = format!(
            r#"{{"op": "signal", "peer": {before}, "channel": 0}}, {{"op": "wait", "peer": {next}, "channel": 0}}"#
        );
        format!("[{enter}, {put}, {signals}]")
    };
    let programs: Vec<String> = (0..world).map(rank).collect();
    let outputs: Vec<String> =
        (0..world).map(|rank| format!("[[[{}, 0]]]", (rank + world - 1) % world)).collect();
    let (programs, outputs) = (programs.join(", "), outputs.join(", "));
    let text = format!(
        r#"{{"symmpool_plan": 1, "name": "ring", "collective": {{"name": "rotate", "outputs": [{outputs}]}}, "world": {world}, "chunks": 1, "scratch": 1, "protocol": "simple", "blocks": 2, "source": "a.py", "programs": [{programs}]}}"#
    );
    Algorithm::from_plan(Plan::from_json(&text).unwrap()).unwrap()
}

/// How often a rank passes each point in a round.
fn passages(rank: u32) -> Vec<u64> {
    let reports = Job::new("rank", "count", WORLD).run();
    let report = &reports[rank as usize];
    assert!(report.status.success() && report.value("left") == "nothing", "{report:?}");
    let list = report.value("passed").trim_matches(['[', ']']).split(", ");
    list.map(|count| count.parse().unwrap()).collect()
}

fn check(job: &Job, victim: u32, reports: &[RankReport]) {
    for report in reports {
        let context = || format!("{}, rank {}: {:#?}", job.scenario, report.rank, report.values);
        if report.rank == victim {
            assert!(report.was_killed(), "{:?} {}", report.status, context());
            continue;
        }
        assert!(report.status.success(), "{:?} {}", report.status, context());
        for key in ["error", "again"] {
            let wanted = format!("true true [{victim}] ");
            assert!(report.value(key).starts_with(&wanted), "{key}: {}", context());
        }
        assert_eq!(report.value("left"), "nothing", "{}", context());
    }
}

#[test]
fn a_rank_that_dies_at_any_point_of_a_call_is_named_by_all_others() {
    if RankProcess::from_env().is_some() {
        return;
    }
    let every = std::env::var("SYMMPOOL_EVERY_STEP").is_ok_and(|value| value == "1");
    let victims = if every { 0..WORLD } else { 1..2 };
    let mut jobs = Vec::new();
    for victim in victims {
        for (step, count) in passages(victim).into_iter().enumerate() {
            assert!(count > 0, "no call passes {:?}", CallStep::ALL[step]);
            let mut at: Vec<u64> =
                if every { (1..=count).collect() } else { vec![1, count.div_ceil(2), count] };
            at.dedup();
            let scenario = |passage| format!("{victim} {step} {passage}");
            jobs.extend(at.into_iter().map(|at| (victim, Job::new("rank", scenario(at), WORLD))));
        }
    }
    let next = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..AT_A_TIME {
            scope.spawn(|| {
                while let Some((victim, job)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    check(job, *victim, &job.run());
                }
            });
        }
    });
    println!("a rank has died at {} places", jobs.len());
}
