//! Which algorithm serves an all-reduce on a device: the requested one, else the one that was measured to be
//! fastest on devices of this kind (`table`), else the one of a rule that works well on any device.

use symmpool_allocator::{Error, Result};

use super::table::MeasuredTable;
use crate::AllReduceAlgorithm as Algorithm;
use crate::cuda::all_reduce::ALL_REDUCE;
use crate::cuda::all_reduce::constraints::{AllReduceShape, fits_lamport};
use crate::cuda::all_reduce::row::AllReduce;
use crate::cuda::layout::params::ControlLayout;
use crate::cuda::layout::piece_slots::{SLOTS_OF_BOTH, pays_off};

/// Way in which an algorithm was chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cuda) enum ChosenBy {
    Request,
    Table,
    Rule,
    BesideCompute,
}

impl ChosenBy {
    pub(in crate::cuda) fn name(self) -> &'static str {
        match self {
            Self::Request => "requested",
            Self::Table => "measured on such devices",
            Self::Rule => "rule",
            Self::BesideCompute => "beside compute",
        }
    }
}

/// All-reduces of at least this many bytes go in stages where calls may run beside compute. With 29 SMs of two H100s, 64 MiB take 236
/// us in stages, 254 by pushes and 355 through inboxes, and 4 MiB take 25, 38 and 24 us.
const BESIDE_COMPUTE_BYTES: u64 = 24 << 20;
/// All-reduces of two ranks of at least this many bytes go by copy engines in pieces beside compute. A step of matrix products of two H200s beside
/// 64 MiB takes 0.98 to 1.01 of what it takes beside NCCL's, and 1.05 beside stages; beside 256 MiB 0.95 and 1.00. With four,
/// DDP's steps make 0.86 of NCCL's tokens a second so: 1 GiB takes 6.6 ms, and 4.8 in stages.
const IN_PIECES_BYTES: u64 = 48 << 20;
/// Bytes that an H200 sends to its peers in the time that one more hop takes: about 2 us at 350 GB/s.
/// Two shots send fewer bytes; one shot needs one hop less.
const HOP_BYTES: u64 = 700 << 10;
/// Between two ranks one shot and two shots send the same bytes. Up to this many bytes, one shot is faster as it needs
/// one hop less; above, two shots are, as they reduce less and use less memory of inboxes.
const PAIR_HOP_BYTES: u64 = 4 << 20;
/// Above this many bytes, results are written into outputs directly: inboxes cause more writes to the device's own
/// memory, which no longer fit its cache.
const DIRECT_BYTES: u64 = 24 << 20;
/// Above this many bytes, copy engines are faster than kernels.
const COPY_BYTES: u64 = 128 << 20;
/// Up to this many bytes, LL is as fast as Lamport, and leaves no inbox to restore.
const LL_BYTES: u64 = 4 << 10;
/// Bytes of all ranks together that an LL inbox takes before it matters that half of what is sent are flags.
/// Above, LL128 is faster.
const LL_ALL_RANKS_BYTES: u64 = 128 << 10;
/// The bytes of a hop where the choice is between LL128 and algorithms that begin and end with flags among peer
/// blocks, which cost more hops.
const LL128_HOP_BYTES: u64 = HOP_BYTES / 4 * 9;
/// Up to this many bytes between all pairs of ranks, a rank reads its share of all inputs faster than the others
/// write it: 12 MiB for two ranks, 3 MiB for four.
const PULL_BYTES: u64 = 48 << 20;

impl AllReduceShape {
    /// The algorithm that should be best on any device: the first of an order that can serve the call.
    fn rule(&self, control: &ControlLayout) -> Algorithm {
        use Algorithm as A;
        let ranks = u64::from(self.world);
        let one_shot_is_faster = |hop_bytes: u64| {
            if ranks > 2 {
                // Bytes that two shots save a rank, compared with one shot.
                self.bytes.saturating_mul((ranks - 1) * (ranks - 2)) / ranks <= hop_bytes
            } else {
                self.bytes <= PAIR_HOP_BYTES
            }
        };
        let hop = one_shot_is_faster(HOP_BYTES);
        let few = self.bytes.saturating_mul(ranks) <= LL_ALL_RANKS_BYTES;
        let order: &[A] = if fits_lamport(self.dtype) {
            match self.bytes {
                bytes if hop && bytes <= LL_BYTES => &[A::OneShotLl],
                _ if hop => &[A::OneShotLamport, A::TwoShotLamport],
                bytes if bytes <= DIRECT_BYTES => &[A::TwoShotLamport],
                bytes if bytes <= COPY_BYTES => &[A::TwoShotPush, A::TwoShotLamport],
                _ => &[A::TwoShotCopy, A::TwoShotPush, A::TwoShotLamport],
            }
        } else {
            match self.bytes {
                _ if hop && (few || !self.nvlinked) => &[A::OneShotLl],
                _ if one_shot_is_faster(LL128_HOP_BYTES) => {
                    &[A::OneShotLl128, A::TwoShotPull, A::OneShotPull]
                }
                _ if self.bytes.saturating_mul(ranks * ranks) <= PULL_BYTES => {
                    &[A::TwoShotPull, A::TwoShotPush, A::OneShotPull]
                }
                bytes if bytes <= COPY_BYTES => &[A::TwoShotPush, A::OneShotPull],
                _ => &[A::TwoShotCopy, A::TwoShotPush],
            }
        };
        let fits = |one: &A| self.can_serve(*one, control) && self.pays_off(*one, control);
        let fallback = [A::TwoShotPush, A::TwoShotPipeline];
        order.iter().chain(&fallback).copied().find(fits).unwrap_or(A::TwoShotLl)
    }

    /// The row of the algorithm that [`Self::choose`] finds, and by what it was chosen.
    pub(in crate::cuda) fn entry(
        &self,
        requested: Algorithm,
        control: &ControlLayout,
        measured: &MeasuredTable,
    ) -> Result<(&'static AllReduce, ChosenBy)> {
        let (name, why) = self.choose(requested, control, measured)?;
        let entry = AllReduce::named(name).ok_or_else(|| {
            Error::unsupported(format!("the all-reduce algorithm {} on devices", name.name()))
        })?;
        Ok((entry, why))
    }

    /// The requested algorithm, or the best that is known.
    pub(in crate::cuda) fn choose(
        &self,
        requested: Algorithm,
        control: &ControlLayout,
        measured: &MeasuredTable,
    ) -> Result<(Algorithm, ChosenBy)> {
        if requested == Algorithm::Auto {
            if let Some(chosen) = self.beside_compute(control) {
                return Ok((chosen, ChosenBy::BesideCompute));
            }
            let algorithm = measured
                .find(self)
                .map(|best| match self.pays_off(best, control) {
                    true => best,
                    false => self.through_scratch(control),
                })
                .filter(|algorithm| self.can_serve(*algorithm, control));
            return Ok(match algorithm {
                Some(algorithm) => (algorithm, ChosenBy::Table),
                None => (self.rule(control), ChosenBy::Rule),
            });
        }
        Ok((self.resolve(requested, control)?, ChosenBy::Request))
    }

    /// The algorithm of a large call where calls may run beside compute.
    fn beside_compute(&self, control: &ControlLayout) -> Option<Algorithm> {
        let least = |algorithm| match algorithm {
            Algorithm::TwoShotCopy => IN_PIECES_BYTES,
            _ => BESIDE_COMPUTE_BYTES,
        };
        let fits = |one: &Algorithm| self.bytes >= least(*one) && self.can_serve(*one, control);
        let order = [Algorithm::TwoShotCopy, Algorithm::TwoShotPipeline];
        let in_pieces = self.streams_may_wait && pays_off(control, self.world, SLOTS_OF_BOTH);
        let order = &order[usize::from(!in_pieces)..];
        self.beside_compute.then(|| order.iter().copied().find(fits)).flatten()
    }

    /// The algorithm of a name, or the first that can serve the call of those that the name stands for.
    pub(in crate::cuda) fn resolve(
        &self,
        requested: Algorithm,
        control: &ControlLayout,
    ) -> Result<Algorithm> {
        let meant = |entry: &&AllReduce| entry.name == requested || entry.one_of == Some(requested);
        if !ALL_REDUCE.iter().any(|entry| meant(&entry)) {
            return Err(Error::unsupported(format!(
                "the all-reduce algorithm {}: it runs in host memory only; devices have one_shot and two_shot in \
                 several forms, which need links between all of them",
                requested.name()
            )));
        }
        let fits = |entry: &&AllReduce| (entry.fits)(self, control);
        let found = ALL_REDUCE.iter().filter(meant).find(fits).map(|entry| entry.name);
        found.ok_or_else(|| {
            Error::unsupported(format!(
                "the all-reduce algorithm {} for {} bytes of {} from {} to {}: lamport carries floats of up to 32 \
                 bits, ll128 needs NVLink between all devices, pull and push need windows, copy into ordinary \
                 memory needs several queues (CUDA_DEVICE_MAX_CONNECTIONS above 1) and a device for each rank, \
                 one shot needs room for all inputs (inboxes here: {} bytes of Lamport, {} of LL)",
                requested.name(),
                self.bytes,
                self.dtype.name(),
                if self.input_window { "a window" } else { "ordinary memory" },
                if self.output_window { "a window" } else { "ordinary memory" },
                control.lamport_bytes / 3,
                control.ll_bytes / 2,
            ))
        })
    }
}

#[cfg(test)]
mod tests {
    use crate::cuda::layout::params::Footprint;
    use std::collections::BTreeMap;
    use std::fs;
    use std::path::Path;

    use super::*;
    use crate::DType;

    fn shape(bytes: u64, world: u32) -> AllReduceShape {
        AllReduceShape::between_windows(bytes, DType::Bf16, world)
    }

    fn control(world: u32) -> ControlLayout {
        ControlLayout::new(world, Footprint::ample(32 << 20, 192 << 20)).expect("valid")
    }

    fn best(shape: AllReduceShape) -> Algorithm {
        shape.rule(&control(shape.world))
    }

    #[test]
    fn large_calls_go_in_stages_where_they_may_run_beside_compute() {
        let control = ControlLayout::new(2, Footprint::ample(8 << 20, 64 << 20)).expect("valid");
        let auto = Algorithm::Auto;
        let table = MeasuredTable::of(&["NVIDIA H100 80GB HBM3"; 2]);
        let chosen = |bytes, beside_compute| {
            let shape = AllReduceShape { beside_compute, ..shape(bytes, 2) };
            shape.choose(auto, &control, &table).expect("one serves")
        };
        assert_eq!(
            chosen(BESIDE_COMPUTE_BYTES, true),
            (Algorithm::TwoShotPipeline, ChosenBy::BesideCompute)
        );
        assert_ne!(chosen(BESIDE_COMPUTE_BYTES, false).1, ChosenBy::BesideCompute);
        assert_eq!(chosen(1 << 20, true), chosen(1 << 20, false));
        let in_pieces = |bytes, output_window| {
            let usual = shape(bytes, 2);
            let shape = AllReduceShape {
                beside_compute: true,
                streams_may_wait: true,
                output_window,
                ..usual
            };
            shape.choose(auto, &control, &table).expect("one serves").0
        };
        assert_eq!(in_pieces(BESIDE_COMPUTE_BYTES, true), Algorithm::TwoShotPipeline);
        for output_window in [true, false] {
            assert_eq!(in_pieces(IN_PIECES_BYTES, output_window), Algorithm::TwoShotCopy);
        }
    }

    #[test]
    fn the_rule_follows_size_ranks_and_type() {
        assert_eq!(best(shape(0, 4)), Algorithm::OneShotLl);
        assert_eq!(best(shape(4 << 10, 4)), Algorithm::OneShotLl);
        assert_eq!(best(shape(256 << 10, 4)), Algorithm::OneShotLamport);
        assert_eq!(best(shape(1 << 20, 4)), Algorithm::TwoShotLamport);
        assert_eq!(best(shape(64 << 20, 4)), Algorithm::TwoShotPush);
        assert_eq!(best(shape(4 << 20, 2)), Algorithm::OneShotLamport);
        assert_eq!(best(shape(8 << 20, 2)), Algorithm::TwoShotLamport);
        assert_eq!(best(shape(256 << 20, 2)), Algorithm::TwoShotCopy);
        assert_eq!(best(shape(256 << 10, 8)), Algorithm::TwoShotLamport);
        assert_eq!(best(shape(1 << 40, 1)), Algorithm::TwoShotPush);
        let ordinary =
            AllReduceShape { input_window: false, output_window: false, ..shape(64 << 20, 4) };
        assert_eq!(best(ordinary), Algorithm::TwoShotLamport);
        let integers = |bytes| AllReduceShape { dtype: DType::I32, ..shape(bytes, 4) };
        assert_eq!(best(integers(64 << 10)), Algorithm::OneShotLl128);
        assert_eq!(best(integers(4 << 20)), Algorithm::TwoShotPush);
        assert_eq!(best(integers(32 << 10)), Algorithm::OneShotLl);
        let over_a_bus = AllReduceShape { nvlinked: false, ..integers(64 << 10) };
        assert_eq!(best(over_a_bus), Algorithm::OneShotLl);
        let both = AllReduceShape { dtype: DType::F64, ..ordinary };
        assert_eq!(best(both), Algorithm::OneShotPull);
    }

    /// The output of `cuda_collectives tune`: microseconds of every algorithm, by size.
    #[derive(serde::Deserialize)]
    struct Tuned {
        world: u32,
        groups: Vec<TunedGroup>,
    }

    #[derive(serde::Deserialize)]
    struct TunedGroup {
        lamport: bool,
        windows: bool,
        times: BTreeMap<u64, BTreeMap<String, f64>>,
    }

    /// How many times as long as the best algorithm the rule's may take, as if the device were unknown.
    const BEHIND: f64 = 1.05;

    #[test]
    fn the_rule_is_nearly_as_fast_as_the_best_on_devices_that_were_measured() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../bench/results/gpu");
        let (mut compared, mut behind) = (0, Vec::new());
        for entry in fs::read_dir(folder).expect("the results") {
            let path = entry.expect("a file").path();
            if !path.to_string_lossy().ends_with("_tune.json") {
                continue;
            }
            let tuned: Tuned =
                serde_json::from_slice(&fs::read(&path).expect("readable")).expect("results");
            for TunedGroup { lamport, windows, times } in &tuned.groups {
                for (&bytes, row) in times {
                    let dtype = if *lamport { DType::Bf16 } else { DType::I32 };
                    let window = *windows;
                    let shape = AllReduceShape {
                        dtype,
                        input_window: window,
                        output_window: window,
                        ..shape(bytes, tuned.world)
                    };
                    let name = best(shape).name();
                    let least = row.values().copied().fold(f64::INFINITY, f64::min);
                    if name == "two_shot_pipeline" && !row.contains_key(name) {
                        // It is newer than some of the measurements.
                        continue;
                    }
                    let found = row.get(name).copied().unwrap_or(f64::INFINITY);
                    compared += 1;
                    if found > BEHIND * least {
                        behind.push(format!(
                            "{} {bytes} {dtype:?} {window}: {name} {found}, best {least}",
                            path.display()
                        ));
                    }
                }
            }
        }
        assert!(compared > 0, "nothing was measured");
        assert!(behind.is_empty(), "{behind:#?}");
    }

    #[test]
    fn requested_algorithms_are_used_or_refused() {
        let control = control(4);
        let integers = AllReduceShape { dtype: DType::I64, ..shape(4 << 10, 4) };
        let refused = integers.resolve(Algorithm::OneShotLamport, &control);
        let text = refused.expect_err("integers have no NaN").to_string();
        assert!(text.contains("one_shot_lamport") && text.contains("i64"), "{text}");
        let chosen = shape(4 << 10, 4).resolve(Algorithm::TwoShotPull, &control);
        assert_eq!(chosen.expect("windows"), Algorithm::TwoShotPull);
        let ordinary = AllReduceShape { output_window: false, ..shape(4 << 10, 4) };
        assert!(ordinary.resolve(Algorithm::TwoShotPush, &control).is_err());
        assert!(shape(1 << 30, 4).resolve(Algorithm::OneShot, &control).is_err());
        let over_a_bus = AllReduceShape { nvlinked: false, ..shape(4 << 10, 4) };
        let refused = over_a_bus.resolve(Algorithm::OneShotLl128, &control);
        let text = refused.expect_err("lines of 128 bytes may be torn").to_string();
        assert!(text.contains("ll128 needs NVLink between all devices"), "{text}");
        let mesh = shape(4 << 10, 8).resolve(Algorithm::CubeMesh, &control);
        assert!(mesh.is_err_and(|error| error.is_unsupported()));
    }

    #[test]
    fn what_is_requested_comes_before_the_table_and_the_rule() {
        let control = control(4);
        let measured = MeasuredTable::of(&["NVIDIA H200"; 4]);
        let chosen = |shape: AllReduceShape, requested, measured| {
            shape.choose(requested, &control, measured).unwrap()
        };
        let auto = Algorithm::Auto;
        let shape = shape(20 << 20, 4);
        assert_eq!(chosen(shape, auto, &measured), (Algorithm::TwoShotPush, ChosenBy::Table));
        let unknown = MeasuredTable::of(&["a device"; 4]);
        assert_eq!(chosen(shape, auto, &unknown), (Algorithm::TwoShotLamport, ChosenBy::Rule));
        let ordinary = AllReduceShape { output_window: false, ..shape };
        assert_eq!(chosen(ordinary, auto, &measured), (Algorithm::TwoShotLamport, ChosenBy::Table));
        let pull = Algorithm::TwoShotPull;
        assert_eq!(chosen(shape, pull, &measured), (pull, ChosenBy::Request));
        assert!(ordinary.choose(pull, &control, &measured).unwrap_err().is_unsupported());
        // A table that was measured over NVLink does not hold where devices of that name are on another bus.
        let over_a_bus =
            AllReduceShape { dtype: DType::I32, bytes: 256 << 10, nvlinked: false, ..shape };
        assert_eq!(chosen(over_a_bus, auto, &measured), (Algorithm::OneShotLl, ChosenBy::Rule));
        // An algorithm that was measured with larger inboxes is not used where it does not fit.
        let little = ControlLayout::new(4, Footprint::ample(1 << 20, 1 << 20)).unwrap();
        let most = AllReduceShape { bytes: 256 << 10, ..shape };
        assert_eq!(most.choose(auto, &little, &measured).unwrap().1, ChosenBy::Table);
        let small = AllReduceShape { dtype: DType::I32, bytes: 32 << 10, ..shape };
        assert_eq!(small.choose(auto, &little, &measured).unwrap().0, Algorithm::OneShotLl128);
        // Copy engines are used where scratch holds a whole call, or much of it at once; and long launches of stores.
        let (push, copy) = (Algorithm::TwoShotPush, Algorithm::TwoShotCopy);
        let pipeline = Algorithm::TwoShotPipeline;
        for (bytes, scratch, best) in [
            (1 << 30, 64, pipeline),
            (1 << 30, 120, push),
            (1 << 30, 192, copy),
            (160 << 20, 64, pipeline),
            (160 << 20, 119, push),
            (160 << 20, 121, copy),
        ] {
            let large = AllReduceShape { bytes, ..shape };
            let control = ControlLayout::new(4, Footprint::ample(32 << 20, scratch << 20)).unwrap();
            let chosen = large.choose(auto, &control, &measured).unwrap();
            assert_eq!(chosen, (best, ChosenBy::Table), "{bytes} with {scratch} MiB");
        }
    }
}
