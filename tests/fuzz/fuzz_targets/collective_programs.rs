//! The target `collective_programs` as a program: of a fuzzer, or one that tries files again.

#![cfg_attr(fuzzing, no_main)]

#[cfg(fuzzing)]
libfuzzer_sys::fuzz_target!(|data: &[u8]| (symmpool_fuzz::target("collective_programs").run)(data));

#[cfg(not(fuzzing))]
fn main() {
    symmpool_fuzz::replay("collective_programs");
}
