//! Models: loom tries every interleaving of code as it is shipped, and must notice each fault that is put into it.
//!
//! A crate takes its atomics and locks from its module `sync`. They are std's, but in unit tests those of this module:
//! std's too, until [`prove`] runs a model, in which loom watches them. Threads of a model are started by
//! [`thread::spawn`](thread::spawn).
//!
//! A *mutant* is code with one fault. Its name begins with `mutant_`; code asks by [`mutant`] or [`weakened`] whether it
//! runs with that fault, which is a constant outside of unit tests.
//!
//! | file | holds |
//! | --- | --- |
//! | `atomics` | atomics and fences |
//! | `locks` | mutexes, condition variables, and cells that are set once |
//! | `thread` | threads |
//! | `watched` | memory whose accesses must be ordered |

mod atomics;
mod locks;
pub mod thread;
mod watched;

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

pub use atomics::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, fence};
pub use locks::{Condvar, Mutex, MutexGuard, OnceLock};
pub use watched::Watched;

// Loom runs all threads of a model on the thread that asked for it.
thread_local! {
    static RUNS: Cell<bool> = const { Cell::new(false) };
    static MUTANT: Cell<Option<&'static str>> = const { Cell::new(None) };
}

/// Bound of a model whose threads are preempted anywhere.
pub const ALL: usize = 255;

/// Adds to the bounds of all models.
pub(crate) const DEEPER: &str = "SYMMPOOL_DEEPER_MODELS";

/// How much is added to the bounds of all models.
pub fn deeper() -> usize {
    std::env::var(DEEPER).ok().map_or(0, |more| more.parse().expect(DEEPER))
}

/// Whether loom watches this thread. It does not while a model that failed is taken down, as no thread is its turn then.
fn is_running() -> bool {
    RUNS.get() && !std::thread::panicking()
}

/// Whether a model runs with the fault of this name.
pub fn mutant(name: &str) -> bool {
    MUTANT.get() == Some(name)
}

/// Runs code on this thread with the fault of this name, outside of models.
pub fn with_fault<T>(name: Option<&'static str>, run: impl FnOnce() -> T) -> T {
    let before = MUTANT.replace(name);
    let done = run();
    MUTANT.set(before);
    done
}

/// `order`, which the fault of this name makes relaxed.
pub fn weakened(name: &str, order: Ordering) -> Ordering {
    if mutant(name) { Ordering::Relaxed } else { order }
}

/// Proves a model: it holds in every interleaving in which a thread is preempted at most `preemptions` times, and in
/// some interleaving it fails with each of the faults. Both are panics otherwise.
///
/// The model is run once for each interleaving, in a thread with a stack as other threads have it. It fails by a panic,
/// a deadlock, or an access to [`Watched`] memory that is not ordered after another one.
pub fn prove(preemptions: usize, mutants: &[&'static str], model: fn()) {
    let preemptions = (preemptions + deeper()).min(ALL);
    let begin = Instant::now();
    let tried = run(None, preemptions, model).unwrap_or_else(|(tried, text)| {
        panic!("in interleaving {tried}: {text}");
    });
    eprintln!("{tried} interleavings, {:.1} s", begin.elapsed().as_secs_f64());
    for name in mutants {
        assert!(name.starts_with("mutant_"), "{name} is no name of a mutant");
        match run(Some(name), preemptions, model) {
            Ok(tried) => panic!("the model holds with the fault {name}, in {tried} interleavings"),
            Err((tried, text)) => eprintln!("{name} fails in interleaving {tried}: {text}"),
        }
    }
}

/// Runs what comes before the interleavings of a model begin, also on several threads: loom tries one order of it.
pub fn before<T>(prepare: impl FnOnce() -> T) -> T {
    loom::stop_exploring();
    let prepared = prepare();
    loom::explore();
    prepared
}

/// Returns how many interleavings were tried, with the message of the one that failed.
fn run(
    mutant: Option<&'static str>,
    preemptions: usize,
    model: fn(),
) -> Result<usize, (usize, String)> {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.max_branches = 100_000;
    let tried = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let count = tried.clone();
    MUTANT.set(mutant);
    RUNS.set(true);
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        builder.check(move || {
            count.fetch_add(1, Ordering::Relaxed);
            thread::spawn(model).join().expect("it would be a panic here");
        });
    }));
    RUNS.set(false);
    MUTANT.set(None);
    let tried = tried.load(Ordering::Relaxed);
    match outcome {
        Ok(()) => Ok(tried),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
            Err((tried, text.unwrap_or_else(|| "a panic".to_owned())))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    /// A lock is let go between a read and the write that follows from it.
    fn two_threads_count() {
        let count = Arc::new(Mutex::new(0));
        let add = |count: &Mutex<u32>| {
            let mut held = count.lock().unwrap();
            let before = *held;
            if mutant("mutant_released_early") {
                drop(held);
                held = count.lock().unwrap();
            }
            *held = before + 1;
        };
        let theirs = count.clone();
        let other = thread::spawn(move || add(&theirs));
        add(&count);
        other.join().unwrap();
        assert_eq!(*count.lock().unwrap(), 2);
    }

    fn data_comes_with_its_flag() {
        let shared = Arc::new((AtomicBool::new(false), Watched::new(0)));
        let theirs = shared.clone();
        let writer = thread::spawn(move || {
            theirs.1.set(7);
            theirs.0.store(true, weakened("mutant_relaxed_store", Ordering::Release));
        });
        if shared.0.load(Ordering::Acquire) {
            assert_eq!(shared.1.get(), 7);
        }
        writer.join().unwrap();
    }

    fn a_waiter_is_woken() {
        let shared = Arc::new((Mutex::new(false), Condvar::new()));
        let theirs = shared.clone();
        let waker = thread::spawn(move || {
            *theirs.0.lock().unwrap() = true;
            if !mutant("mutant_not_woken") {
                theirs.1.notify_all();
            }
        });
        let mut held = shared.0.lock().unwrap();
        while !*held {
            held = shared.1.wait(held).unwrap();
        }
        drop(held);
        waker.join().unwrap();
    }

    #[test]
    fn loom_models_notice_faults() {
        prove(2, &["mutant_released_early"], two_threads_count);
        prove(2, &["mutant_relaxed_store"], data_comes_with_its_flag);
        prove(2, &["mutant_not_woken"], a_waiter_is_woken);
    }

    #[test]
    fn a_fault_that_is_not_noticed_and_a_model_that_fails_are_panics() {
        let unnoticed = catch_unwind(|| prove(1, &["mutant_unknown"], a_waiter_is_woken));
        assert!(unnoticed.is_err());
        assert!(catch_unwind(|| prove(1, &[], || panic!("it fails"))).is_err());
        assert!(!is_running() && !mutant("mutant_unknown"));
    }
}
