//! Runs the program that checks collectives on the devices of this machine: results against the CPU's, bit by bit (S7),
//! graphs (S2, S8), and ranks that make different calls or none (S5, S6).

use std::process::Command;

use symmpool_allocator::driver::CudaDriver;

/// The number of ranks: one for each device, but at least two, which share a device if there is only one.
fn ranks() -> Option<u32> {
    match CudaDriver::device_count() {
        Ok(devices) => Some(devices.clamp(2, 4)),
        Err(error) => {
            assert!(error.is_unsupported(), "{error}");
            eprintln!("skipped: no CUDA device: {error}");
            None
        }
    }
}

fn run(mode: &str, more: &[&str]) {
    let Some(ranks) = ranks() else { return };
    let output = Command::new(env!("CARGO_BIN_EXE_cuda_collectives"))
        .args([mode, "--ranks", &ranks.to_string()])
        .args(more)
        .output()
        .expect("the program");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("everything was right"), "{text}");
}

/// Rules S2 and S8, among others: calls are captured into graphs, which are replayed between calls that are not
/// captured (see `gpu/cuda_collectives/check.rs`).
#[test]
fn every_bit_is_as_the_cpu_computes_it() {
    run("check", &[]);
}

#[test]
fn ranks_that_make_different_calls_or_none_are_named_in_time() {
    run("faults", &[]);
}

#[test]
fn a_rank_that_is_killed_during_an_all_to_all_is_named_in_time() {
    run("killed", &[]);
}

#[test]
fn many_calls_in_a_row_are_right() {
    run("soak", &["--calls", "20000"]);
}
