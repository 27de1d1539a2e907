//! Fuzz targets without a fuzzer: every kept seed, then random changes of them. They are the same in each run, unless
//! `SYMMPOOL_FUZZ` says otherwise: `SECONDS,SEED` has every target run for so long, with other changes.
//!
//! No input may make a target panic, run for longer than its limit, or take more memory than its limit.

mod bounded;

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use symmpool_fuzz::mutate::Mutator;
use symmpool_fuzz::{FuzzTarget, TARGETS, target};

/// Time that one input may take, on a machine that is busy with other tests.
const PATIENCE: Duration = Duration::from_secs(60);

fn seeds_of(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("seeds").join(name)
}

/// The kept inputs of a target, in the order of their names.
fn kept(name: &str) -> Vec<Vec<u8>> {
    let folder = seeds_of(name);
    let entries =
        fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.expect("an entry").path()).collect();
    paths.sort();
    paths.iter().map(|path| fs::read(path).expect("a seed")).collect()
}

/// How long to run, and the seed of the changes, if `SYMMPOOL_FUZZ` says so.
fn asked() -> Option<(Duration, u64)> {
    let value = std::env::var("SYMMPOOL_FUZZ").ok()?;
    let (seconds, seed) = value.split_once(',').expect("SYMMPOOL_FUZZ=SECONDS,SEED");
    let seconds = seconds.parse().expect("a number of seconds");
    Some((Duration::from_secs(seconds), seed.parse().expect("a seed")))
}

/// Runs one input. Returns what is wrong with it.
fn wrong_with(target: &FuzzTarget, input: &[u8]) -> Option<String> {
    let before = bounded::begin();
    let ran = catch_unwind(AssertUnwindSafe(|| (target.run)(input)));
    let peak = bounded::peak_since(before);
    if let Err(panic) = ran {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        return Some(format!("it panicked: {}", text.unwrap_or("with no text")));
    }
    (peak > target.max_memory)
        .then(|| format!("it took {peak} bytes of memory, of {}", target.max_memory))
}

fn report(target: &FuzzTarget, input: &[u8], what: &str) -> ! {
    let name = format!("symmpool-{}-{:08x}", target.name, fnv(input));
    let path = std::env::temp_dir().join(name);
    let written = fs::write(&path, input);
    panic!("{}: {what}; the input is in {} ({written:?})", target.name, path.display());
}

fn fnv(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0x811c_9dc5, |hash, byte| (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193))
}

fn run(name: &str) {
    let target = target(name);
    let kept = kept(name);
    assert!(!kept.is_empty(), "{name} has no seeds");
    let (time, seed) = asked().unwrap_or((Duration::from_secs(3600), 7));
    let count = if asked().is_some() { u32::MAX } else { target.quick };
    // Inputs run on another thread, which this one can give up.
    let (to_run, inputs) = channel::<Vec<u8>>();
    let (done, results) = channel();
    thread::spawn(move || {
        for input in inputs {
            if done.send(wrong_with(&target, &input)).is_err() {
                break;
            }
        }
    });
    let begun = Instant::now();
    let mut mutator = Mutator::new(seed, target.words, target.max_input);
    let changed = (0..count).map(|_| mutator.next(&kept));
    let mut ran = 0_u32;
    for input in kept.iter().cloned().chain(changed) {
        if begun.elapsed() > time {
            break;
        }
        to_run.send(input.clone()).expect("the thread that runs inputs");
        match results.recv_timeout(PATIENCE) {
            Ok(None) => ran += 1,
            Ok(Some(what)) => report(&target, &input, &what),
            Err(RecvTimeoutError::Timeout) => report(&target, &input, "it does not end"),
            Err(RecvTimeoutError::Disconnected) => report(&target, &input, "its thread ended"),
        }
    }
    println!("{name}: {ran} inputs in {:.1} s", begun.elapsed().as_secs_f64());
}

/// All targets have a test below, and seeds.
#[test]
fn every_target_has_seeds() {
    for target in TARGETS {
        let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz_targets");
        let program = fs::read_to_string(program.join(format!("{}.rs", target.name)));
        assert!(program.expect("a program of a fuzzer").contains(target.name));
        assert!(kept(target.name).len() >= 4, "{} has too few seeds", target.name);
    }
    let folders = fs::read_dir(seeds_of("")).expect("the folder of seeds").count();
    assert_eq!(folders, TARGETS.len(), "each folder of seeds belongs to a target");
}

// One test each. They take turns, as memory is counted for the process.
macro_rules! targets {
    ($($name:ident)*) => {$(
        #[test]
        fn $name() {
            let _turn = bounded::turn();
            run(stringify!($name));
        }
    )*};
}

targets! {
    store_frames mesh_messages plan_json traces tables c_calls pool_programs collective_programs
}
