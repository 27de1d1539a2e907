//! A communicator's algorithms: which there are, calls by name, and who chooses where a call names none.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use symmpool_allocator::topology::Topology;
use symmpool_allocator::{Block, Error, Pool, Result, Stream};
use symmpool_collectives::{
    Algorithm, AlgorithmOrigin, AllReduceAlgorithm, CallShape, Communicator, CommunicatorOptions,
    DType, ReduceOp, Request, Selector, StandardCollective,
};

use super::programs;
use crate::pool_ranks::ranks;

const STREAM: &Stream = &Stream::DEFAULT;

/// Whole numbers, whose sums are exact in any order.
fn block(pool: &Pool, count: usize) -> Block<f32> {
    let block = pool.alloc::<f32>(count).unwrap();
    let values: Vec<f32> =
        (0..count).map(|i| (i * 7 % 100) as f32 * (pool.rank() + 1) as f32).collect();
    block.write(&values).unwrap();
    block
}

fn bits(block: &Block<f32>) -> Vec<u32> {
    block.read().unwrap().iter().map(|x| x.to_bits()).collect()
}

fn named(mut plan: symmpool_collectives::plan::Plan, name: &str) -> Algorithm {
    name.clone_into(&mut plan.name);
    Algorithm::from_plan(plan).unwrap()
}

/// The elements of input and output of a collective for parts of so many elements.
fn lengths(collective: StandardCollective, world: usize, part: usize) -> (usize, usize) {
    match collective {
        StandardCollective::AllReduce | StandardCollective::Broadcast => (part, part),
        StandardCollective::ReduceScatter => (world * part, part),
        StandardCollective::AllGather => (part, world * part),
        StandardCollective::AllToAll => (world * part, world * part),
    }
}

#[test]
fn every_algorithm_is_listed_and_runs_by_name_with_the_same_bits() {
    // S7
    ranks(3, |pool| {
        let comm = Communicator::new(pool).unwrap();
        for plan in programs::all(3) {
            // Names that built-in ones do not have.
            let name = format!("plan_{}", plan.name);
            comm.register(named(plan, &name)).unwrap();
        }
        let all = comm.algorithms();
        for collective in StandardCollective::ALL {
            let of: Vec<&Algorithm> =
                all.iter().filter(|each| each.collective() == collective.name()).collect();
            let by = |origin| of.iter().filter(|each| each.origin() == origin).count();
            assert!(by(AlgorithmOrigin::BuiltIn) >= 2, "{of:?}");
            assert!(by(AlgorithmOrigin::Plan) >= 1, "{of:?}");
            for part in [300, 30_000] {
                let (inputs, outputs) = lengths(collective, 3, part);
                let mut results = Vec::new();
                for algorithm in &of {
                    let (input, out) = (block(pool, inputs), block(pool, outputs));
                    let is_broadcast = collective == StandardCollective::Broadcast;
                    let input = if is_broadcast { &out } else { &input };
                    comm.call(&Request::new(*algorithm, &out, input), STREAM).unwrap();
                    results.push(bits(&out));
                    // The algorithm is called by name, on addresses.
                    let again = block(pool, outputs);
                    let from = if is_broadcast { &again } else { input };
                    let (to, from) = (again.as_ptr().cast(), from.as_ptr().cast());
                    let name = Some(algorithm.name());
                    // SAFETY: both are blocks of these lengths.
                    unsafe {
                        comm.call(
                            &Request::at(collective, to, from, part, DType::F32).algorithm(name),
                            STREAM,
                        )
                    }
                    .unwrap();
                    results.push(bits(&again));
                }
                assert!(
                    results.windows(2).all(|pair| pair[0] == pair[1]),
                    "{collective} {part} {of:?}"
                );
            }
        }
    });
}

#[test]
fn built_in_algorithms_say_what_they_serve() {
    ranks(3, |pool| {
        let links = Some(Topology::unknown(3));
        let options = CommunicatorOptions { links, ..CommunicatorOptions::default() };
        let comm = Communicator::with_options(pool, &options).unwrap();
        let found = |collective: &str, name: &str| comm.registered(collective, name).unwrap();
        let direct = found("all_gather", "direct").constraints().unwrap();
        assert!(direct.output_window && !direct.input_window && direct.in_place);
        assert_eq!((direct.world, direct.bytes), (3..=3, 0..=u64::MAX));
        let one_shot = found("all_reduce", "one_shot");
        assert_eq!(one_shot.constraints().unwrap().dtypes, DType::REDUCED);
        assert_eq!((one_shot.origin().name(), one_shot.scratch()), ("builtin", 0));
        assert_ne!(one_shot.hash(), found("all_reduce", "two_shot").hash());
        // The links of these ranks are not grouped in pairs, so no call fits.
        assert!(found("all_reduce", "cube_mesh").constraints().is_none());
        assert!(comm.algorithms().iter().all(|each| each.name() != "cube_mesh"));
        let error = comm.registered("all_reduce", "nonsense").unwrap_err();
        assert!(error.is_invalid_argument() && error.to_string().contains("two_shot"), "{error}");
        assert!(comm.registered("nothing", "nonsense").unwrap_err().is_invalid_argument());
        // Registering a built-in one changes nothing, and nothing takes its name, devices' names included.
        comm.register(one_shot).unwrap();
        for (plan, name) in [
            (programs::one_shot(3), "one_shot"),
            (programs::one_shot(3), "one_shot_ll128"),
            (programs::all_gather(3), "ring"),
            (programs::all_gather(3), "direct"),
        ] {
            let error = comm.register(named(plan, name)).unwrap_err();
            let text = error.to_string();
            assert!(error.is_invalid_argument() && text.contains("built-in algorithms"), "{text}");
        }
        // Another collective's name is free.
        comm.register(named(programs::one_shot(3), "scratch")).unwrap();
        assert_eq!(comm.registered_under("scratch").unwrap().origin(), AlgorithmOrigin::Plan);
        let error = comm.registered_under("one_shot").unwrap_err();
        assert!(error.to_string().contains("there are scratch"), "{error}");
        comm.register(named(programs::all_gather(3), "two_shot")).unwrap();
        comm.register(named(programs::reduce_scatter(3), "two_shot")).unwrap();
        let error = comm.registered_under("two_shot").unwrap_err();
        assert!(error.to_string().contains("all_gather, reduce_scatter"), "{error}");
        assert_eq!(found("all_reduce", "one_shot").origin(), AlgorithmOrigin::BuiltIn);
        let count = comm.algorithms().iter().filter(|each| each.name() == "one_shot").count();
        assert_eq!(count, 1);
        assert!(comm.register(named(programs::one_shot(3), "auto")).is_err());
    });
}

#[test]
fn unknown_and_unfit_names_are_errors_on_every_rank() {
    ranks(3, |pool| {
        let comm = Communicator::new(pool).unwrap();
        let x = block(pool, 100);
        let by_name = |name: &str| {
            let (collective, at) = (StandardCollective::AllReduce, x.as_ptr().cast::<u8>());
            // SAFETY: a block of this length.
            unsafe {
                comm.call(&Request::at(collective, at, at, 100, DType::F32).algorithm(name), STREAM)
            }
        };
        for (name, word) in [("one_shot_ll", "on devices only"), ("two_shot_copy", "one_shot")] {
            let error = by_name(name).unwrap_err();
            assert!(error.is_unsupported() && error.to_string().contains(word), "{error}");
        }
        // On one rank only: the other one is told.
        let error = by_name(if pool.rank() == 0 { "nonsense" } else { "one_shot" }).unwrap_err();
        if pool.rank() == 0 {
            assert!(error.is_invalid_argument(), "{error}");
        } else {
            assert!(error.is_diverged() && error.ranks() == [0], "{error}");
        }
        let error = by_name(if pool.rank() == 0 { "one_shot" } else { "two_shot" }).unwrap_err();
        let text = error.to_string();
        assert!(
            error.is_diverged() && text.contains("by one_shot") && text.contains("by two_shot")
        );
        by_name("two_shot").unwrap();
    });
}

#[test]
fn options_request_names_that_are_registered_later() {
    ranks(2, |pool| {
        let mut options = CommunicatorOptions::default();
        options.algorithms.insert(StandardCollective::AllReduce, "mine".to_owned());
        options.algorithms.insert(StandardCollective::AllGather, "scratch".to_owned());
        let comm = Communicator::with_options(pool, &options).unwrap();
        let (x, out) = (block(pool, 100), block(pool, 200));
        let error = comm.all_reduce(&x, ReduceOp::Sum, STREAM).unwrap_err();
        assert!(error.is_invalid_argument() && error.to_string().contains("\"mine\""), "{error}");
        comm.register(named(programs::two_shot(2), "mine")).unwrap();
        comm.all_reduce(&x, ReduceOp::Sum, STREAM).unwrap();
        comm.all_gather_into(&out, &x, STREAM).unwrap();
        assert_eq!(out.read().unwrap()[..100], out.read().unwrap()[100..]);
        // Requested of one rank only.
        let algorithm = [AllReduceAlgorithm::OneShot, AllReduceAlgorithm::Auto];
        let algorithm = algorithm[pool.rank() as usize];
        let options = CommunicatorOptions { algorithm, ..CommunicatorOptions::default() };
        let comm = Communicator::with_options(pool, &options).unwrap();
        assert!(comm.all_reduce(&x, ReduceOp::Sum, STREAM).unwrap_err().is_diverged());
    });
}

/// Chooses as a function does, and counts warnings.
struct Counting<F> {
    choose: F,
    warnings: Arc<Mutex<Vec<String>>>,
}

impl<F: Fn(&CallShape) -> Result<Option<String>> + Send + Sync> Selector for Counting<F> {
    fn select(&self, call: &CallShape) -> Result<Option<String>> {
        (self.choose)(call)
    }

    fn warn(&self, why: &Error) {
        self.warnings.lock().unwrap().push(why.to_string());
    }
}

#[test]
fn selectors_choose_by_what_a_call_looks_like() {
    ranks(2, |pool| {
        let comm = Communicator::new(pool).unwrap();
        comm.register(named(programs::two_shot(2), "mine")).unwrap();
        let calls = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&calls);
        let selector = move |call: &CallShape| {
            counted.fetch_add(1, Relaxed);
            assert_eq!((call.world, call.dtype, call.op), (2, DType::F32, Some(ReduceOp::Max)));
            assert!(call.input_window && call.output_window);
            assert_eq!(call.part(), call.bytes);
            Ok((call.bytes > 1000).then(|| "mine".to_owned()))
        };
        comm.select(StandardCollective::AllReduce, Some(Arc::new(selector)));
        for count in [100, 1000] {
            let x = block(pool, count);
            comm.all_reduce(&x, ReduceOp::Max, STREAM).unwrap();
        }
        assert_eq!(calls.load(Relaxed), 2);
        comm.select(StandardCollective::AllReduce, None);
        comm.all_reduce(&block(pool, 100), ReduceOp::Max, STREAM).unwrap();
        assert_eq!(calls.load(Relaxed), 2);
        // One rank chooses otherwise.
        let rank = pool.rank();
        let selector = move |_: &CallShape| Ok((rank == 1).then(|| "mine".to_owned()));
        comm.select(StandardCollective::AllReduce, Some(Arc::new(selector)));
        let error = comm.all_reduce(&block(pool, 100), ReduceOp::Max, STREAM).unwrap_err();
        assert!(error.is_diverged() && error.ranks() == [1], "{error}");
        assert!(error.to_string().contains("registered algorithm"), "{error}");
    });
}

type Choose = fn(&CallShape) -> Result<Option<String>>;

#[test]
fn selectors_that_fail_are_warned_of_once_and_the_rule_chooses() {
    ranks(2, |pool| {
        let comm = Communicator::new(pool).unwrap();
        comm.register(named(programs::all_gather(2), "needs_windows")).unwrap();
        let plain = pool.lane("own").unwrap();
        let (input, out) = (plain.alloc::<f32>(10).unwrap(), plain.alloc::<f32>(20).unwrap());
        input.write(&[pool.rank() as f32; 10]).unwrap();
        let failing: [(Choose, &str); 4] = [
            (|_| Err(Error::invalid_state("it is broken")), "it is broken"),
            (|_| Ok(Some("nonsense".to_owned())), "\"nonsense\""),
            (|_| Ok(Some("needs_windows".to_owned())), "window"),
            (|_| panic!("on purpose"), "it panicked"),
        ];
        for (choose, word) in failing {
            let warnings = Arc::new(Mutex::new(Vec::new()));
            let selector = Counting { choose, warnings: Arc::clone(&warnings) };
            comm.select(StandardCollective::AllGather, Some(Arc::new(selector)));
            for _ in 0..3 {
                comm.all_gather_into(&out, &input, STREAM).unwrap();
                assert_eq!(out.read().unwrap()[..10], [0.0; 10]);
                assert_eq!(out.read().unwrap()[10..], [1.0; 10]);
            }
            let warnings = warnings.lock().unwrap();
            assert_eq!(warnings.len(), 1, "{warnings:?}");
            assert!(
                warnings[0].contains(word) && warnings[0].contains("all_gather"),
                "{warnings:?}"
            );
        }
    });
}

#[test]
fn tables_choose_where_nothing_is_requested() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("table.json");
    let rows = r#"{"symmpool_tables":1,"devices":["cpu"],"rows":[
        {"world":2,"windows":true,"up_to":400,"algorithm":"mine","blocks":3},
        {"world":2,"windows":true,"up_to":8000,"algorithm":"two_shot"},
        {"world":2,"windows":true,"up_to":null,"algorithm":"unknown"},
        {"collective":"all_gather","world":2,"up_to":null,"algorithm":"direct"},
        {"collective":"broadcast","world":3,"up_to":null,"algorithm":"direct"}]}"#;
    std::fs::write(&path, rows).unwrap();
    let wrong = folder.path().join("wrong.json");
    std::fs::write(&wrong, rows.replace("\"world\":3", "\"world\":\"all\"")).unwrap();
    ranks(2, |pool| {
        let tables = vec![path.clone()];
        let options = CommunicatorOptions { tables, ..CommunicatorOptions::default() };
        let comm = Communicator::with_options(pool, &options).unwrap();
        comm.register(named(programs::two_shot(2), "mine")).unwrap();
        // The other rank has no table: what this one chose is in the error.
        let chosen = |count: usize| {
            let other = Communicator::new(pool).unwrap();
            let comm = if pool.rank() == 0 {
                other.register(named(programs::two_shot(2), "mine")).unwrap();
                other.load_tables(&path).unwrap();
                other
            } else {
                other
            };
            let found = comm.all_reduce(&block(pool, count), ReduceOp::Sum, STREAM);
            found.err().map(|error| error.to_string()).unwrap_or_default()
        };
        let texts = [100, 1000, 10_000].map(chosen);
        assert!(texts[0].contains("registered algorithm"), "{texts:?}");
        assert!(texts[1].contains("by two_shot"), "{texts:?}");
        assert_eq!(texts[2], "", "an unknown name leaves it to the rule");
        for count in [100, 1000, 10_000] {
            let (x, out) = (block(pool, count), block(pool, 2 * count));
            comm.all_reduce(&x, ReduceOp::Sum, STREAM).unwrap();
            comm.all_gather_into(&out, &x, STREAM).unwrap();
        }
        // Ordinary memory, which `direct` cannot serve.
        let mut out = [0_f32; 4];
        comm.all_gather_slice(&mut out, &[1.0, 2.0], STREAM).unwrap();
        let error = comm.load_tables(&wrong).unwrap_err();
        let text = error.to_string();
        assert!(error.is_invalid_argument() && text.contains("wrong.json"), "{text}");
        assert!(text.contains("rows[4].world"), "{text}");
        let options =
            CommunicatorOptions { tables: vec![wrong.clone()], ..CommunicatorOptions::default() };
        assert!(Communicator::with_options(pool, &options).unwrap_err().is_invalid_argument());
        pool.resync().unwrap();
    });
}
