//! The conformance suite of drivers, on this machine's device.

use serde_json::{Value, json};
use symmpool_allocator::Driver;
use symmpool_allocator::driver::conformance::conformance;

use super::{CheckOptions, CheckedDriver};

/// Runs the suite that all drivers must pass. It panics, with a message on standard error, at the first rule
/// that is broken.
pub(crate) fn run(options: &CheckOptions) -> Value {
    let make = || match options.driver {
        CheckedDriver::Cuda => Driver::cuda(0),
        CheckedDriver::Host => Driver::host(),
    };
    if let Err(error) = make() {
        return json!({ "ok": false, "error": error.to_string() });
    }
    let outcome = std::panic::catch_unwind(|| {
        conformance(|| make().expect("a driver that could be made a moment ago"));
    });
    let mut report = json!({
        "mode": "conformance",
        "driver": options.driver.name(),
        "ok": outcome.is_ok(),
    });
    if outcome.is_err() {
        report["error"] = json!("the driver does not conform; the message above says where");
    }
    report
}
