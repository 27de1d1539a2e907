//! The built-in algorithms of devices: what fits each, and how it is launched.
//!
//! `ALL_REDUCE` has one entry for each all-reduce. The collectives that exchange or scatter data share their kernels,
//! and their entries say how these are used.

#![allow(unsafe_code)] // names functions that launch kernels on the caller's promises

use symmpool_allocator::{Error, Result, Stream};

use super::constraints::{AllReduceShape, MIN_COPY_BYTES, fits_lamport};
use crate::algorithm::{
    AUTO, COPY, CallShape, DIRECT, LAMPORT, LL, RING, STAGES, StandardCollective, name_of,
};
use crate::cuda::engine::CudaEngine;
use crate::cuda::kernel::mode::TwoShotCollective;
use crate::cuda::kernel::spec::KernelSpec;
use crate::cuda::layout::params::{Control, LL128_PAYLOAD};
use crate::cuda::ops::all_reduce::Work;
use crate::jit::sources::{ONE_SHOT, ONE_SHOT_LL128, ONE_SHOT_PULL, TWO_SHOT_COPY, TWO_SHOT_PUSH};
use crate::{AllReduceAlgorithm as Name, DType, ReduceOp};

/// Bytes of a longer call, of all ranks' shares together, that scratch must hold at once for copy engines to
/// be worth their start-up time in every round. From `cuda_collectives bench` on 4 H200s.
const COPY_ROUND_BYTES: u64 = 256 << 20;
/// Launches of `two_shot_push` of at least so many bytes lose little where a call takes several: 1.4% of 128 MiB, as
/// 256 MiB in one launch take 746 us on two H100s, and two of 128 MiB 755 us (`h100x2_tune.json`).
const PUSH_LAUNCH_BYTES: u64 = 128 << 20;
/// The same for algorithms through inboxes: 16 MiB in two launches of 8 MiB take 52 us instead of 50.
const INBOX_LAUNCH_BYTES: u64 = 8 << 20;
/// Shorter launches through inboxes are as fast as any other way where a call takes no more than so many: 4 MiB in
/// four launches of 1 MiB take 22 us there, as long as by loads from peers, which only windows have.
const INBOX_LAUNCHES: u64 = 4;

/// A reduction's element type and operation.
type Reduction = (DType, ReduceOp);

/// An all-reduce algorithm.
pub(in crate::cuda) struct AllReduce {
    pub(in crate::cuda) name: Name,
    /// The name that stands for the first of several algorithms that fits, if this is one of those.
    pub(in crate::cuda) one_of: Option<Name>,
    /// Whether it can serve a call.
    pub(in crate::cuda) fits: fn(&AllReduceShape, &Control) -> bool,
    /// Whether it is about as fast with the memory there is as it was when it was measured: it is if the call goes in
    /// one round or launch, or in long ones.
    pub(in crate::cuda) pays_off: fn(&AllReduceShape, &Control) -> bool,
    /// Most bytes of a launch.
    pub(in crate::cuda) most_bytes: fn(&AllReduceShape, &Control) -> u64,
    /// Its kernel on so many ranks, for launches of at most so many bytes.
    pub(in crate::cuda) kernel: fn(u32, Reduction, u64) -> KernelSpec,
    /// Launches it, into an output that is a window or not. The caller promises what it does of
    /// [`CudaEngine::all_reduce`].
    pub(in crate::cuda) launch: unsafe fn(&mut CudaEngine, &Self, &Work, bool) -> Result<()>,
}

/// All-reduces, in the order in which names that stand for several try them.
pub(in crate::cuda) static ALL_REDUCE: [AllReduce; 10] = [
    AllReduce {
        name: Name::OneShotLamport,
        one_of: Some(Name::OneShot),
        fits: |shape, control| {
            fits_lamport(shape.dtype) && shape.one_shot_vectors() <= control.lamport_vectors()
        },
        pays_off: always,
        most_bytes: |_, _| u64::MAX,
        kernel: |_, of, _| KernelSpec { lamport: true, ..KernelSpec::reduces(&ONE_SHOT, of) },
        launch: CudaEngine::one_shot,
    },
    AllReduce {
        name: Name::OneShotLl128,
        one_of: Some(Name::OneShot),
        // A line of 128 bytes has one flag, so it must arrive whole; buses other than NVLink may tear it.
        fits: |shape, control| {
            let lines = u64::from(shape.world) * shape.bytes.div_ceil(LL128_PAYLOAD);
            shape.direct && lines <= control.ll128_lines()
        },
        pays_off: always,
        most_bytes: |_, _| u64::MAX,
        kernel: |_, of, _| KernelSpec::reduces(&ONE_SHOT_LL128, of),
        launch: CudaEngine::one_shot_ll128,
    },
    AllReduce {
        name: Name::OneShotLl,
        one_of: Some(Name::OneShot),
        fits: |shape, control| shape.one_shot_vectors() <= control.ll_vectors(),
        pays_off: always,
        most_bytes: |_, _| u64::MAX,
        kernel: |_, of, _| KernelSpec::reduces(&ONE_SHOT, of),
        launch: CudaEngine::one_shot,
    },
    AllReduce {
        name: Name::OneShotPull,
        one_of: Some(Name::OneShot),
        fits: |shape, control| shape.bytes.next_multiple_of(16) <= control.scratch_bytes,
        pays_off: always,
        most_bytes: |_, _| u64::MAX,
        kernel: |_, of, _| KernelSpec::reduces(&ONE_SHOT_PULL, of),
        launch: CudaEngine::one_shot_pull,
    },
    AllReduce {
        name: Name::TwoShotLamport,
        one_of: Some(Name::TwoShot),
        fits: |shape, _| fits_lamport(shape.dtype),
        pays_off: |shape, control| pays_off_in_inboxes(shape, control, true),
        most_bytes: |shape, control| inbox_launch(shape, control, true),
        kernel: |world, of, bytes| {
            KernelSpec::two_shot(world, of, TwoShotCollective::AllReduce, true, bytes)
        },
        launch: CudaEngine::two_shot_lamport,
    },
    AllReduce {
        name: Name::TwoShotPush,
        one_of: Some(Name::TwoShot),
        fits: |shape, _| shape.output_window,
        pays_off: |shape, control| at_once(shape, control) >= shape.bytes.min(PUSH_LAUNCH_BYTES),
        most_bytes: |_, _| u64::MAX,
        kernel: |_, of, _| KernelSpec::reduces(&TWO_SHOT_PUSH, of),
        launch: CudaEngine::two_shot_push,
    },
    AllReduce {
        name: Name::TwoShotLl,
        one_of: Some(Name::TwoShot),
        fits: |_, _| true,
        pays_off: |shape, control| pays_off_in_inboxes(shape, control, false),
        most_bytes: |shape, control| inbox_launch(shape, control, false),
        kernel: |world, of, bytes| {
            KernelSpec::two_shot(world, of, TwoShotCollective::AllReduce, false, bytes)
        },
        launch: CudaEngine::two_shot_ll,
    },
    AllReduce {
        name: Name::TwoShotPull,
        one_of: None,
        fits: |shape, _| shape.input_window && shape.output_window,
        pays_off: always,
        most_bytes: |_, _| u64::MAX,
        kernel: |_, of, _| KernelSpec::two_shot_pull(of, TwoShotCollective::AllReduce),
        launch: CudaEngine::two_shot_pull,
    },
    AllReduce {
        // In pieces, as into ordinary memory, it pays off for calls during compute only.
        name: Name::TwoShotCopy,
        one_of: None,
        fits: |shape, _| {
            let served = shape.output_window || shape.streams_may_wait;
            shape.world > 1 && shape.bytes >= MIN_COPY_BYTES && served
        },
        pays_off: |shape, control| {
            shape.output_window && at_once(shape, control) >= shape.bytes.min(COPY_ROUND_BYTES)
        },
        most_bytes: |_, _| u64::MAX,
        kernel: |_, of, _| KernelSpec::reduces(&TWO_SHOT_COPY, of),
        launch: CudaEngine::two_shot_copy,
    },
    AllReduce {
        name: Name::TwoShotStages,
        one_of: None,
        fits: |shape, _| shape.world > 1,
        pays_off: always,
        most_bytes: |_, _| u64::MAX,
        kernel: |_, of, _| KernelSpec::two_shot_stages(of, TwoShotCollective::AllReduce),
        launch: CudaEngine::two_shot_stages,
    },
];

fn always(_: &AllReduceShape, _: &Control) -> bool {
    true
}

/// Bytes of a call that scratch holds at once.
fn at_once(shape: &AllReduceShape, control: &Control) -> u64 {
    control.scratch_room(shape.world) * u64::from(shape.world)
}

fn pays_off_in_inboxes(shape: &AllReduceShape, control: &Control, lamport: bool) -> bool {
    let at_once = inbox_launch(shape, control, lamport);
    at_once >= INBOX_LAUNCH_BYTES || shape.bytes <= INBOX_LAUNCHES * at_once
}

/// Most bytes of a launch of two shots through inboxes.
fn inbox_launch(shape: &AllReduceShape, control: &Control, lamport: bool) -> u64 {
    KernelSpec::two_shot_launch(control, shape.world, shape.dtype, lamport, shape.bytes)
}

impl AllReduce {
    /// The algorithm of this name; `None` if the name leaves something open, or is of host memory.
    pub(in crate::cuda) fn named(name: Name) -> Option<&'static Self> {
        ALL_REDUCE.iter().find(|entry| entry.name == name)
    }
}

/// Where an exchange uses something that not all of its algorithms use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cuda) enum Use {
    Never,
    WhereFaster,
    /// As far as it can serve the call.
    Always,
}

/// An algorithm of the collectives that exchange data: how it uses the kernels that all of them share. What it does not
/// use goes into outputs directly.
#[derive(Debug)]
pub(in crate::cuda) struct Exchange {
    pub(in crate::cuda) code: u8,
    collectives: &'static [StandardCollective],
    /// One shot of the LL protocol.
    pub(in crate::cuda) ll: Use,
    /// Lamport inboxes.
    pub(in crate::cuda) inboxes: Use,
    /// Copy engines, for equal parts.
    pub(in crate::cuda) copies: Use,
    /// Stages that peers pass on, for broadcasts.
    pub(in crate::cuda) stages: Use,
    /// Whether a rank sends to one peer after the other, whatever the sizes.
    pub(in crate::cuda) ring: bool,
}

const GATHERS: &[StandardCollective] =
    &[StandardCollective::AllGather, StandardCollective::Broadcast];
const PARTS: &[StandardCollective] = &[StandardCollective::AllToAll, StandardCollective::AllGather];
const BROADCAST: &[StandardCollective] = &[StandardCollective::Broadcast];
const EXCHANGES: &[StandardCollective] =
    &[StandardCollective::AllToAll, StandardCollective::AllGather, StandardCollective::Broadcast];

const DIRECTLY: Exchange = Exchange {
    code: DIRECT,
    collectives: EXCHANGES,
    ll: Use::Never,
    inboxes: Use::Never,
    copies: Use::Never,
    stages: Use::Never,
    ring: false,
};

static EXCHANGE: [Exchange; 6] = [
    DIRECTLY,
    Exchange { code: LAMPORT, inboxes: Use::Always, ..DIRECTLY },
    Exchange { code: LL, collectives: GATHERS, ll: Use::Always, ..DIRECTLY },
    Exchange { code: COPY, collectives: PARTS, copies: Use::Always, ..DIRECTLY },
    Exchange { code: RING, ring: true, ..DIRECTLY },
    Exchange { code: STAGES, collectives: BROADCAST, stages: Use::Always, ..DIRECTLY },
];

/// What is used where no algorithm is requested: whatever is faster.
static FASTEST: Exchange = Exchange {
    code: AUTO,
    ll: Use::WhereFaster,
    inboxes: Use::WhereFaster,
    copies: Use::WhereFaster,
    stages: Use::WhereFaster,
    ..DIRECTLY
};

impl Exchange {
    /// The algorithm of this number.
    pub(in crate::cuda) fn of(code: u8) -> &'static Self {
        EXCHANGE.iter().find(|entry| entry.code == code).unwrap_or(&FASTEST)
    }

    pub(in crate::cuda) fn name(&self) -> &'static str {
        name_of(StandardCollective::AllToAll, self.code).unwrap_or("?")
    }

    /// The name of the way in which a kernel moves data, into outputs directly or through inboxes.
    pub(in crate::cuda) fn way(&self, direct: bool) -> &'static str {
        let code = match (self.ring, direct) {
            (true, _) => RING,
            (false, true) => DIRECT,
            (false, false) => LAMPORT,
        };
        name_of(StandardCollective::AllToAll, code).unwrap_or("?")
    }
}

/// A reduce-scatter algorithm.
pub(in crate::cuda) struct Scatter {
    pub(in crate::cuda) code: u8,
    /// Whether it can serve calls of a type, from a window or not; and what it needs.
    fits: fn(DType, bool) -> bool,
    needs: &'static str,
    /// Launches it. The caller promises what it does of [`CudaEngine::reduce_scatter`].
    pub(in crate::cuda) launch: unsafe fn(&mut CudaEngine, &Work) -> Result<()>,
}

static REDUCE_SCATTER: [Scatter; 5] = [
    Scatter {
        code: LAMPORT,
        fits: |dtype, _| fits_lamport(dtype),
        needs: "it carries floats of up to 32 bits",
        launch: CudaEngine::scatter_lamport,
    },
    Scatter { code: LL, fits: |_, _| true, needs: "", launch: CudaEngine::scatter_ll },
    Scatter { code: STAGES, fits: |_, _| true, needs: "", launch: CudaEngine::scatter_in_stages },
    Scatter { code: COPY, fits: |_, _| true, needs: "", launch: CudaEngine::scatter_by_copies },
    Scatter {
        code: DIRECT,
        fits: |_, window| window,
        needs: "ranks read each other's inputs, which must be windows",
        launch: CudaEngine::scatter_directly,
    },
];

impl Scatter {
    pub(in crate::cuda) fn name(&self) -> &'static str {
        name_of(StandardCollective::ReduceScatter, self.code).unwrap_or("?")
    }

    /// The algorithm of this number, if it can reduce elements of this type from such an input.
    pub(in crate::cuda) fn named(
        code: u8,
        dtype: DType,
        input_window: bool,
    ) -> Result<&'static Self> {
        let found = REDUCE_SCATTER.iter().find(|entry| entry.code == code);
        let entry = found.ok_or_else(|| not_here(StandardCollective::ReduceScatter, code))?;
        if (entry.fits)(dtype, input_window) {
            return Ok(entry);
        }
        Err(Error::unsupported(format!(
            "the reduce-scatter algorithm {} for {} from {}: {}",
            entry.name(),
            dtype.name(),
            if input_window { "a window" } else { "ordinary memory" },
            entry.needs
        )))
    }
}

#[cold]
fn not_here(collective: StandardCollective, code: u8) -> Error {
    let name = |code: u8| name_of(collective, code).unwrap_or("?");
    let all: Vec<&str> = CudaEngine::algorithms(collective).into_iter().map(name).collect();
    Error::unsupported(format!(
        "the {} algorithm {}: it runs in host memory only; on devices there are {}",
        collective.in_words(),
        name(code),
        all.join(", ")
    ))
}

impl CudaEngine {
    /// The numbers of a collective's algorithms.
    pub(crate) fn algorithms(collective: StandardCollective) -> Vec<u8> {
        match collective {
            StandardCollective::AllReduce => {
                ALL_REDUCE.iter().map(|entry| entry.name as u8).collect()
            }
            StandardCollective::ReduceScatter => {
                REDUCE_SCATTER.iter().map(|entry| entry.code).collect()
            }
            _ => {
                let of = |entry: &&Exchange| entry.collectives.contains(&collective);
                EXCHANGE.iter().filter(of).map(|entry| entry.code).collect()
            }
        }
    }

    /// Refuses an algorithm that is not of devices, or cannot serve a call.
    pub(crate) fn check_fit(&self, code: u8, shape: &CallShape) -> Result<()> {
        self.check_fit_in(code, shape, &self.control)
    }

    /// Whether an algorithm can serve a call with all memory that the communicator may have.
    pub(crate) fn may_fit(&self, code: u8, shape: &CallShape) -> bool {
        let layouts = self.layouts();
        layouts.last().is_some_and(|largest| self.check_fit_in(code, shape, largest).is_ok())
    }

    fn check_fit_in(&self, code: u8, shape: &CallShape, layout: &Control) -> Result<()> {
        let collective = shape.collective;
        match collective {
            StandardCollective::AllReduce => self.check_all_reduce(code, shape, layout),
            StandardCollective::ReduceScatter => {
                Scatter::named(code, shape.dtype, shape.input_window).map(drop)
            }
            _ if Self::algorithms(collective).contains(&code) => Ok(()),
            _ => Err(not_here(collective, code)),
        }
    }

    /// Runs an exchange with the algorithm of this number, if it is not [`AUTO`].
    pub(crate) fn exchanging(
        &mut self,
        code: u8,
        collective: StandardCollective,
        stream: Stream,
        run: impl FnOnce(&mut Self) -> Result<()>,
    ) -> Result<()> {
        if code == AUTO {
            return run(self);
        }
        if !Self::algorithms(collective).contains(&code) {
            self.ready()?;
            return Err(self.decline(not_here(collective, code), stream));
        }
        let usual = std::mem::replace(&mut self.exchange, Exchange::of(code));
        let result = run(self);
        self.exchange = usual;
        result
    }
}
