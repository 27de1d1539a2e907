//! Which algorithm serves an all-reduce on a device: what was asked for, else what was measured on
//! devices of this kind (`table`), else a rule that is safe on all.

use symmpool_allocator::{Error, Result};

use super::constraints::{Algorithm, Shape, fits_lamport};
use super::params::Control;
use super::table::Rows;
use crate::AllReduceAlgorithm;
use crate::algorithm::{RequestedAlgorithm, VARIABLE};

/// What an algorithm was chosen by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Why {
    Options,
    Environment,
    Table,
    Rule,
}

impl Why {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Options => "asked for by the options",
            Self::Environment => VARIABLE,
            Self::Table => "measured on such devices",
            Self::Rule => "rule",
        }
    }
}

/// Bytes that an H200 sends to its peers in the time that a further hop takes: about 2 us at
/// 350 GB/s. Two shots save bytes, one shot saves a hop.
const HOP_BYTES: u64 = 700 << 10;
/// Between two ranks both ways send the same bytes. Up to here one shot spares a hop; above, what two
/// shots spare in reductions and in the memory of inboxes is more.
const PAIR_HOP_BYTES: u64 = 4 << 20;
/// Above this, results go straight into outputs: what inboxes need beyond the link's bytes, in
/// writes to the device's own memory, no longer fits its cache.
const STRAIGHT_BYTES: u64 = 24 << 20;
/// Above this, copy engines carry more than a device's processors.
const COPY_BYTES: u64 = 128 << 20;
/// Up to here LL is as fast as Lamport, and leaves no inbox to restore.
const PACKET_BYTES: u64 = 4 << 10;
/// Bytes that all ranks together put into an LL inbox. Up to here it does not matter that half of them are
/// flags; from here on LL128 is faster.
const FLAGGED_BYTES: u64 = 128 << 10;
/// A hop's bytes where LL128 is the choice, next to ways that begin and end with flags among peers.
const LINE_HOP_BYTES: u64 = HOP_BYTES / 4 * 9;
/// Up to here, of what all pairs of ranks have for each other, a rank reads its part of all inputs faster than
/// the others bring it: 12 MiB of two ranks, 3 of four.
const PULL_BYTES: u64 = 48 << 20;

impl Shape {
    /// What should be best on any device: the ways to go in the order in which they are tried.
    fn rule(&self, control: &Control) -> Algorithm {
        use Algorithm as A;
        let ranks = u64::from(self.world);
        let spares = |hop_bytes: u64| {
            if ranks > 2 {
                // What two shots spare a rank, of what one shot sends.
                self.bytes.saturating_mul((ranks - 1) * (ranks - 2)) / ranks <= hop_bytes
            } else {
                self.bytes <= PAIR_HOP_BYTES
            }
        };
        let hop = spares(HOP_BYTES);
        let flagged = self.bytes.saturating_mul(ranks) <= FLAGGED_BYTES;
        let order: &[A] = if fits_lamport(self.dtype) {
            match self.bytes {
                bytes if hop && bytes <= PACKET_BYTES => &[A::OneShotLl],
                _ if hop => &[A::OneShotLamport, A::TwoShotLamport],
                bytes if bytes <= STRAIGHT_BYTES => &[A::TwoShotLamport],
                bytes if bytes <= COPY_BYTES => &[A::TwoShotPush, A::TwoShotLamport],
                _ => &[A::TwoShotCopy, A::TwoShotPush, A::TwoShotLamport],
            }
        } else {
            match self.bytes {
                _ if hop && (flagged || !self.direct) => &[A::OneShotLl],
                _ if spares(LINE_HOP_BYTES) => &[A::OneShotLl128, A::TwoShotPull, A::OneShotPull],
                _ if self.bytes.saturating_mul(ranks * ranks) <= PULL_BYTES => {
                    &[A::TwoShotPull, A::TwoShotPush, A::OneShotPull]
                }
                bytes if bytes <= COPY_BYTES => &[A::TwoShotPush, A::OneShotPull],
                _ => &[A::TwoShotCopy, A::TwoShotPush],
            }
        };
        let fits = |one: &A| self.fits(*one, control) && self.pays(*one, control);
        let fallback = [A::TwoShotPush, A::TwoShotLl];
        order.iter().chain(&fallback).copied().find(fits).unwrap_or(A::TwoShotLl)
    }

    /// The algorithm that was asked for, or the best that is known.
    pub(super) fn choose(
        &self,
        asked: RequestedAlgorithm,
        control: &Control,
        rows: &Rows,
    ) -> Result<(Algorithm, Why)> {
        if asked.algorithm == AllReduceAlgorithm::Auto {
            let measured = rows
                .find(self)
                .map(|best| if self.pays(best, control) { best } else { Algorithm::TwoShotPush })
                .filter(|algorithm| self.fits(*algorithm, control));
            return Ok(match measured {
                Some(algorithm) => (algorithm, Why::Table),
                None => (self.rule(control), Why::Rule),
            });
        }
        let why = if asked.by_environment { Why::Environment } else { Why::Options };
        match self.serve(asked.algorithm, control) {
            Ok(algorithm) => Ok((algorithm, why)),
            Err(error) => Err(asked.blame(error)),
        }
    }

    fn serve(&self, asked: AllReduceAlgorithm, control: &Control) -> Result<Algorithm> {
        let one_of = |order: &[Algorithm]| {
            order.iter().copied().find(|algorithm| self.fits(*algorithm, control)).ok_or_else(|| {
                Error::unsupported(format!(
                    "the all-reduce algorithm {} for {} bytes of {} from {} to {}: lamport carries \
                     floats of up to 32 bits, ll128 needs NVLink between all devices, pull and push need \
                     windows, one shot needs room for all inputs ({} bytes of inbox here)",
                    asked.name(),
                    self.bytes,
                    self.dtype.name(),
                    if self.input_window { "a window" } else { "ordinary memory" },
                    if self.output_window { "a window" } else { "ordinary memory" },
                    control.sentinel_bytes / 3,
                ))
            })
        };
        match asked {
            AllReduceAlgorithm::OneShot => one_of(&[
                Algorithm::OneShotLamport,
                Algorithm::OneShotLl128,
                Algorithm::OneShotLl,
                Algorithm::OneShotPull,
            ]),
            AllReduceAlgorithm::TwoShot => {
                one_of(&[Algorithm::TwoShotLamport, Algorithm::TwoShotPush, Algorithm::TwoShotLl])
            }
            AllReduceAlgorithm::CubeMesh => Err(Error::unsupported(
                "the all-reduce algorithm cube_mesh: it runs in host memory only; devices have \
                 one_shot and two_shot in several forms, which need links between all of them",
            )),
            one => Algorithm::of(one).map_or(Ok(self.rule(control)), |one| one_of(&[one])),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::fs;
    use std::path::Path;

    use super::*;
    use crate::DType;

    fn shape(bytes: u64, world: u32) -> Shape {
        let (dtype, input_window, output_window) = (DType::Bf16, true, true);
        Shape { bytes, dtype, world, input_window, output_window, direct: true }
    }

    fn control(world: u32) -> Control {
        Control::new(world, 32 << 20, 192 << 20).expect("valid")
    }

    fn best(shape: Shape) -> Algorithm {
        shape.rule(&control(shape.world))
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
        let ordinary = Shape { input_window: false, output_window: false, ..shape(64 << 20, 4) };
        assert_eq!(best(ordinary), Algorithm::TwoShotLamport);
        let integers = |bytes| Shape { dtype: DType::I32, ..shape(bytes, 4) };
        assert_eq!(best(integers(64 << 10)), Algorithm::OneShotLl128);
        assert_eq!(best(integers(4 << 20)), Algorithm::TwoShotPush);
        assert_eq!(best(integers(32 << 10)), Algorithm::OneShotLl);
        let over_a_bus = Shape { direct: false, ..integers(64 << 10) };
        assert_eq!(best(over_a_bus), Algorithm::OneShotLl);
        let both = Shape { dtype: DType::F64, ..ordinary };
        assert_eq!(best(both), Algorithm::OneShotPull);
    }

    /// What `cuda_collectives tune` printed: microseconds of every algorithm, by size.
    #[derive(serde::Deserialize)]
    struct Tuned {
        world: u32,
        groups: Vec<Group>,
    }

    #[derive(serde::Deserialize)]
    struct Group {
        lamport: bool,
        windows: bool,
        times: BTreeMap<u64, BTreeMap<String, f64>>,
    }

    /// How much longer than the best algorithm the rule's may take, on a device that it does not know.
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
            for Group { lamport, windows, times } in &tuned.groups {
                for (&bytes, row) in times {
                    let dtype = if *lamport { DType::Bf16 } else { DType::I32 };
                    let window = *windows;
                    let shape = Shape {
                        dtype,
                        input_window: window,
                        output_window: window,
                        ..shape(bytes, tuned.world)
                    };
                    let name = AllReduceAlgorithm::ALL
                        .into_iter()
                        .find(|one| Algorithm::of(*one) == Some(best(shape)))
                        .expect("an algorithm with a name")
                        .name();
                    let least = row.values().copied().fold(f64::INFINITY, f64::min);
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
    fn what_was_asked_for_is_done_or_refused() {
        let control = control(4);
        let integers = Shape { dtype: DType::I64, ..shape(4 << 10, 4) };
        let refused = integers.serve(AllReduceAlgorithm::OneShotLamport, &control);
        let text = refused.expect_err("integers have no NaN").to_string();
        assert!(text.contains("one_shot_lamport") && text.contains("i64"), "{text}");
        let chosen = shape(4 << 10, 4).serve(AllReduceAlgorithm::TwoShotPull, &control);
        assert_eq!(chosen.expect("windows"), Algorithm::TwoShotPull);
        let ordinary = Shape { output_window: false, ..shape(4 << 10, 4) };
        assert!(ordinary.serve(AllReduceAlgorithm::TwoShotPush, &control).is_err());
        assert!(shape(1 << 30, 4).serve(AllReduceAlgorithm::OneShot, &control).is_err());
        let over_a_bus = Shape { direct: false, ..shape(4 << 10, 4) };
        let refused = over_a_bus.serve(AllReduceAlgorithm::OneShotLl128, &control);
        let text = refused.expect_err("lines of 128 bytes may be torn").to_string();
        assert!(text.contains("ll128 needs NVLink between all devices"), "{text}");
        let mesh = shape(4 << 10, 8).serve(AllReduceAlgorithm::CubeMesh, &control);
        assert!(mesh.is_err_and(|error| error.is_unsupported()));
    }

    #[test]
    fn options_come_before_the_environment_the_table_and_the_rule() {
        let control = control(4);
        let rows = Rows::of(&["NVIDIA H200"; 4]);
        let asked = |algorithm, by_environment| RequestedAlgorithm { algorithm, by_environment };
        let chosen = |shape: Shape, asked, rows| shape.choose(asked, &control, rows).unwrap();
        let auto = asked(AllReduceAlgorithm::Auto, false);
        let shape = shape(20 << 20, 4);
        assert_eq!(chosen(shape, auto, &rows), (Algorithm::TwoShotPush, Why::Table));
        let unknown = Rows::of(&["a device"; 4]);
        assert_eq!(chosen(shape, auto, &unknown), (Algorithm::TwoShotLamport, Why::Rule));
        let ordinary = Shape { output_window: false, ..shape };
        assert_eq!(chosen(ordinary, auto, &rows), (Algorithm::TwoShotLamport, Why::Table));
        for (by_environment, why) in [(false, Why::Options), (true, Why::Environment)] {
            let asked = asked(AllReduceAlgorithm::TwoShotPull, by_environment);
            assert_eq!(chosen(shape, asked, &rows), (Algorithm::TwoShotPull, why));
            let error = ordinary.choose(asked, &control, &rows).unwrap_err();
            assert!(error.is_unsupported());
            assert_eq!(error.to_string().contains(VARIABLE), by_environment);
        }
        // Nor what was measured on NVLink, where devices of that name are on another bus.
        let over_a_bus = Shape { dtype: DType::I32, bytes: 256 << 10, direct: false, ..shape };
        assert_eq!(chosen(over_a_bus, auto, &rows), (Algorithm::OneShotLl, Why::Rule));
        // What was measured with more room than there is gives way.
        let little = Control::new(4, 1 << 20, 1 << 20).unwrap();
        let most = Shape { bytes: 256 << 10, ..shape };
        assert_eq!(most.choose(auto, &little, &rows).unwrap().1, Why::Table);
        let small = Shape { dtype: DType::I32, bytes: 32 << 10, ..shape };
        assert_eq!(small.choose(auto, &little, &rows).unwrap().0, Algorithm::OneShotLl);
        // Copy engines are for scratch that has room for much at once, or for all of a call.
        let (push, copy) = (Algorithm::TwoShotPush, Algorithm::TwoShotCopy);
        for (bytes, scratch, best) in [
            (1 << 30, 64, push),
            (1 << 30, 120, push),
            (1 << 30, 192, copy),
            (160 << 20, 64, push),
            (160 << 20, 119, push),
            (160 << 20, 121, copy),
        ] {
            let large = Shape { bytes, ..shape };
            let control = Control::new(4, 32 << 20, scratch << 20).unwrap();
            let chosen = large.choose(auto, &control, &rows).unwrap();
            assert_eq!(chosen, (best, Why::Table), "{bytes} with {scratch} MiB");
        }
    }
}
