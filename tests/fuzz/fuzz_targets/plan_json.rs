//! The target `plan_json` as a program: of a fuzzer, or one that tries files again.

#![cfg_attr(fuzzing, no_main)]

#[cfg(fuzzing)]
libfuzzer_sys::fuzz_target!(|data: &[u8]| (symmpool_fuzz::target("plan_json").run)(data));

#[cfg(not(fuzzing))]
fn main() {
    symmpool_fuzz::replay("plan_json");
}
