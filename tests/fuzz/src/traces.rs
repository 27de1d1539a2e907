//! Traces of allocations: read, written again, and replayed where they are short.

use symmpool_allocator::trace::{ReplayOptions, Trace, TraceOp, replay};

use crate::FuzzTarget;

pub(crate) const TARGET: FuzzTarget = FuzzTarget {
    name: "traces",
    run,
    words: &[
        "op,id,bytes,stream\n",
        "alloc,7,1000,0\n",
        "alloc,9,24,1\n",
        "record,7,,1\n",
        "free,7,,\n",
        "free_unordered,9\n",
        "commit,,,\n",
        "trim\n",
        "alloc,1,18446744073709551615,63\n",
        ",",
        "\n",
    ],
    quick: 8_000,
    max_memory: 64 << 20,
    max_input: 4096,
};

fn run(bytes: &[u8]) {
    let trace = match Trace::read(bytes) {
        Ok(trace) => trace,
        Err(error) => return assert!(error.is_invalid_argument(), "{error}"),
    };
    let mut written = Vec::new();
    trace.write(&mut written).expect("memory takes everything");
    let again = Trace::read(&written[..]).expect("a trace that was written");
    assert_eq!(again.ops(), trace.ops());
    assert_eq!((again.slots(), again.peak_live()), (trace.slots(), trace.peak_live()));
    let most = |op: &TraceOp| !matches!(op, TraceOp::Alloc { bytes, .. } if *bytes > 1 << 20);
    if trace.ops().len() <= 64 && trace.ops().iter().all(most) {
        // Ranks may refuse what the trace asks for, but all of them alike.
        if let Ok(outcome) = replay(&trace, &ReplayOptions::new(2)) {
            assert!(outcome.error.is_none_or(|failure| failure.is_same_everywhere()));
        }
    }
}
