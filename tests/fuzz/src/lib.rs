//! Fuzz targets: functions that take any bytes and panic where symmpool does something that it must not do.
//!
//! | module | holds |
//! | --- | --- |
//! | `store_frames` | clients of a store's server, beside a naive store |
//! | `mesh_messages` | a rank whose peer sends what it wants |
//! | `plan_json` | plans of collectives in files, and their check |
//! | `traces` | traces of allocations, and their replay |
//! | `tables` | tables of the fastest algorithms |
//! | `c_calls` | sequences of calls of the C API, beside a naive allocator |
//! | `pool_programs` | programs of two ranks on a pool, beside a naive memory |
//! | `collective_programs` | programs of several ranks on communicators, beside naive arithmetic |
//! | `mutate` | changes to inputs, where no fuzzer makes them |

mod c_calls;
mod collective_programs;
mod mesh_messages;
pub mod mutate;
mod plan_json;
mod pool_programs;
mod store_frames;
mod tables;
mod traces;

use arbitrary::{Arbitrary, Unstructured};

/// A function that takes any bytes.
#[derive(Clone, Copy, Debug)]
pub struct FuzzTarget {
    /// Its name, and that of the folder of its seeds.
    pub name: &'static str,
    /// Runs it. It panics where it finds a fault.
    pub run: fn(&[u8]),
    /// Words that its inputs are made of, if these are texts.
    pub words: &'static [&'static str],
    /// How many inputs `make test` tries, in about five seconds of a core.
    pub quick: u32,
    /// The most bytes of memory that one input may take at a time.
    pub max_memory: usize,
    /// The longest input that a mutation makes, in bytes.
    pub max_input: usize,
}

/// All targets.
pub const TARGETS: [FuzzTarget; 8] = [
    store_frames::TARGET,
    mesh_messages::TARGET,
    plan_json::TARGET,
    traces::TARGET,
    tables::TARGET,
    c_calls::TARGET,
    pool_programs::TARGET,
    collective_programs::TARGET,
];

/// The target of this name.
///
/// # Panics
///
/// If there is none.
pub fn target(name: &str) -> FuzzTarget {
    let found = TARGETS.into_iter().find(|target| target.name == name);
    found.unwrap_or_else(|| panic!("no fuzz target is called {name}"))
}

/// Runs the target of this name on the files that the program is given: how a finding is tried again without a fuzzer.
///
/// # Panics
///
/// Where the target does, and if a file cannot be read.
pub fn replay(name: &str) {
    for path in std::env::args_os().skip(1) {
        let input = std::fs::read(&path).expect("a file that can be read");
        (target(name).run)(&input);
        println!("{name}: {} bytes of {} are fine", input.len(), path.display());
    }
}

/// The value that bytes stand for; `None` if they are too few.
fn value_of<'a, T: Arbitrary<'a>>(bytes: &'a [u8]) -> Option<T> {
    T::arbitrary_take_rest(Unstructured::new(bytes)).ok()
}
