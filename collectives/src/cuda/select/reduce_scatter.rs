//! The reduce-scatters of devices, and what each needs.

use symmpool_allocator::{Error, Result};

use super::not_here;
use crate::DType;
use crate::algorithm::{AlgorithmId, COPY, DIRECT, LAMPORT, LL, PIPELINE, StandardCollective};
use crate::cuda::all_reduce::constraints::fits_lamport;

/// How reduce-scatters are launched: `ops/reduce_scatter.rs` has a function for each.
#[derive(Clone, Copy, Debug)]
pub(in crate::cuda) enum ReduceScatterLaunch {
    Lamport,
    Ll,
    Pipeline,
    Copies,
    Direct,
}

/// A reduce-scatter algorithm.
pub(in crate::cuda) struct ReduceScatter {
    pub(in crate::cuda) id: AlgorithmId,
    /// Whether it can serve calls of a type, from a window or not; and what it needs.
    fits: fn(DType, bool) -> bool,
    needs: &'static str,
    /// How it is launched.
    pub(in crate::cuda) launch: ReduceScatterLaunch,
}

pub(in crate::cuda) static REDUCE_SCATTER: [ReduceScatter; 5] = [
    ReduceScatter {
        id: LAMPORT,
        fits: |dtype, _| fits_lamport(dtype),
        needs: "it carries floats of up to 32 bits",
        launch: ReduceScatterLaunch::Lamport,
    },
    ReduceScatter { id: LL, fits: |_, _| true, needs: "", launch: ReduceScatterLaunch::Ll },
    ReduceScatter {
        id: PIPELINE,
        fits: |_, _| true,
        needs: "",
        launch: ReduceScatterLaunch::Pipeline,
    },
    ReduceScatter { id: COPY, fits: |_, _| true, needs: "", launch: ReduceScatterLaunch::Copies },
    ReduceScatter {
        id: DIRECT,
        fits: |_, window| window,
        needs: "ranks read each other's inputs, which must be windows",
        launch: ReduceScatterLaunch::Direct,
    },
];

impl ReduceScatter {
    pub(in crate::cuda) fn name(&self) -> &'static str {
        self.id.label(StandardCollective::ReduceScatter)
    }

    /// The algorithm of this number, if it can reduce elements of this type from such an input.
    pub(in crate::cuda) fn named(
        id: AlgorithmId,
        dtype: DType,
        input_window: bool,
    ) -> Result<&'static Self> {
        let found = REDUCE_SCATTER.iter().find(|entry| entry.id == id);
        let entry = found.ok_or_else(|| {
            not_here(
                StandardCollective::ReduceScatter,
                id,
                REDUCE_SCATTER.iter().map(|entry| entry.id),
            )
        })?;
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
