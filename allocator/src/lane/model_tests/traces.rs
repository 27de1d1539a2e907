//! How tightly real programs are packed.

use crate::driver::Stream;
use crate::lane::{AllocationRequest, LaneConfig, LaneState, LaneStats, NoBacking, WindowPolicy};
use crate::trace::{Trace, TraceOp};

const TRACES: [&str; 3] = ["train_gpt_small", "generate_llama", "serve_kv"];

fn replay(trace: &Trace, policy: WindowPolicy) -> LaneStats {
    let config = LaneConfig::symmetric("trace").window_policy(policy);
    let mut lane = LaneState::new(config, 1 << 40, 2 << 20).unwrap();
    let mut blocks = vec![None; trace.slots() as usize];
    for &op in trace.ops() {
        match op {
            TraceOp::Alloc { slot, bytes, stream } => {
                let stream = Stream::numbered(u64::from(stream));
                let request = AllocationRequest { bytes, align: 512, stream, site: None };
                blocks[slot as usize] = Some(lane.alloc(request, &mut NoBacking).unwrap().key);
            }
            TraceOp::Free { slot } | TraceOp::FreeUnordered { slot } => {
                lane.free(blocks[slot as usize].unwrap(), None, &mut NoBacking).unwrap();
            }
            TraceOp::Record { slot, stream } => {
                let stream = Stream::numbered(u64::from(stream));
                lane.record_stream(blocks[slot as usize].unwrap(), stream, None).unwrap();
            }
            TraceOp::Commit => drop(lane.take_retired()),
            TraceOp::Trim => drop(lane.trim(None)),
        }
    }
    lane.assert_sound();
    lane.stats()
}

/// Peak reserved bytes divided by peak live bytes, for each trace.
fn overheads(policy: WindowPolicy, most_segments: u64) -> Vec<f64> {
    let overhead = |name: &str| {
        let file = format!("{}/../tests/traces/{name}.csv.gz", env!("CARGO_MANIFEST_DIR"));
        let trace = Trace::open(file).unwrap();
        let stats = replay(&trace, policy);
        assert!(stats.segments <= most_segments, "{name}: {} segments", stats.segments);
        let overhead = stats.peak_reserved as f64 / trace.peak_live() as f64;
        assert!(overhead >= 1.0, "{name}: memory cannot be less than what is live");
        println!("{name}: {overhead:.4}, {} segments", stats.segments);
        overhead
    };
    TRACES.into_iter().map(overhead).collect()
}

#[test]
fn a_contiguous_lane_reserves_a_few_percent_more_than_is_live() {
    let overheads = overheads(WindowPolicy::Contiguous, 300);
    assert!(overheads.iter().all(|&overhead| overhead <= 1.08), "{overheads:?}");
    let mean = overheads.iter().sum::<f64>() / overheads.len() as f64;
    assert!(mean <= 1.05, "{mean}: {overheads:?}");
}

#[test]
fn separate_windows_reserve_at_most_a_quarter_more() {
    let overheads = overheads(WindowPolicy::PerSegment, 100);
    assert!(overheads.iter().all(|&overhead| overhead <= 1.25), "{overheads:?}");
}
