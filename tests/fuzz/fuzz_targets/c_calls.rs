//! The target `c_calls` as a program: of a fuzzer, or one that tries files again.

#![cfg_attr(fuzzing, no_main)]

#[cfg(fuzzing)]
libfuzzer_sys::fuzz_target!(|data: &[u8]| (symmpool_fuzz::target("c_calls").run)(data));

#[cfg(not(fuzzing))]
fn main() {
    symmpool_fuzz::replay("c_calls");
}
