//! The reduce-scatters of devices: a file for each way to reduce, with its rows of [`REDUCE_SCATTER`].
//!
//! Their kernels are those of all-reduces, of which a reduce-scatter is the first half: they lie in `all_reduce`.
//!
//! | file | holds |
//! | --- | --- |
//! | `inboxes` | through inboxes, in the Lamport or the LL protocol |
//! | `pipeline` | through scratch, in stages |
//! | `direct` | by loads from inputs that are windows |
//! | `copies` | by copy engines |
//! | `scatter_shape` | what an algorithm is chosen by |
//! | `row` | a row of the table |
//!
//! A row says which calls its algorithm can serve, for which it is taken by itself, which kernels it has, how it is launched and
//! which calls check it.

mod copies;
mod direct;
mod inboxes;
mod pipeline;
pub(in crate::cuda) mod row;
pub(in crate::cuda) mod scatter_shape;

use symmpool_allocator::{Error, Result};

use self::row::{ReduceScatter, ScatterCases};
use self::scatter_shape::ScatterShape;
use crate::algorithm::{
    AlgorithmId, COPY, DIRECT, LAMPORT, LL, StandardCollective, not_on_devices,
};
use crate::cuda::all_reduce::constraints::fits_lamport;
use crate::cuda::kernel::spec::KernelSpec;
use crate::{DType, ReduceOp};

/// Reduce-scatters, in the order in which programs see them.
pub(in crate::cuda) static REDUCE_SCATTER: [ReduceScatter; 5] =
    [inboxes::LAMPORT_ROW, inboxes::LL_ROW, pipeline::ROW, copies::ROW, direct::ROW];

/// Reduce-scatters in the order in which they are tried where none is requested. The last one serves every call.
static ORDER: [ReduceScatter; 5] =
    [direct::ROW, inboxes::LAMPORT_ROW, inboxes::LL_ROW, copies::ROW, pipeline::ROW];

/// The kernels of calls of one type and operation for which no algorithm is requested, whatever their sizes.
pub(in crate::cuda) fn scatter_kernels(
    world: u32,
    reduction: (DType, ReduceOp),
) -> impl Iterator<Item = KernelSpec> {
    let lamport = fits_lamport(reduction.0);
    // Loads and copies are for two ranks, and one of the protocols of inboxes is for each type.
    let is_used = move |row: &&ReduceScatter| match row.id {
        DIRECT | COPY => world == 2,
        LAMPORT => lamport,
        LL => !lamport,
        _ => true,
    };
    REDUCE_SCATTER.iter().filter(is_used).map(move |row| (row.kernel)(world, reduction))
}

/// The reduce-scatters of devices by name, with what their checks need to know.
#[doc(hidden)]
pub fn checked_reduce_scatters() -> impl Iterator<Item = (&'static str, ScatterCases)> {
    REDUCE_SCATTER.iter().map(|row| (row.name(), row.cases))
}

impl ScatterShape {
    /// Through inboxes while that is faster, else through scratch by stores. Between two ranks, loads from inputs that are
    /// windows and copy engines are faster than these.
    pub(in crate::cuda) fn choose(&self) -> AlgorithmId {
        let found = ORDER.iter().find(|row| (row.pays_off)(self));
        found.map_or(pipeline::ROW.id, |row| row.id)
    }
}

impl ReduceScatter {
    pub(in crate::cuda) fn name(&self) -> &'static str {
        self.id.label(StandardCollective::ReduceScatter)
    }

    /// The row of the algorithm with this number, if it can reduce elements of this type from such an input.
    pub(in crate::cuda) fn named(
        id: AlgorithmId,
        dtype: DType,
        input_window: bool,
    ) -> Result<&'static Self> {
        let found = REDUCE_SCATTER.iter().find(|row| row.id == id);
        let row = found.ok_or_else(|| {
            let all = REDUCE_SCATTER.iter().map(|row| row.id);
            not_on_devices(StandardCollective::ReduceScatter, id, all)
        })?;
        if (row.fits)(dtype, input_window) {
            return Ok(row);
        }
        Err(Error::unsupported(format!(
            "the reduce-scatter algorithm {} for {} from {}: {}",
            row.name(),
            dtype.name(),
            if input_window { "a window" } else { "ordinary memory" },
            row.needs
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::PIPELINE;

    #[test]
    fn the_choice_follows_length_ranks_memory_and_what_runs_beside() {
        let pair = ScatterShape {
            part: 0,
            world: 2,
            lamport: true,
            input_window: true,
            nvlinked: true,
            beside_compute: false,
            in_pieces: false,
            launch: 4 << 20,
            room: 90 << 20,
        };
        let of = |mib: u64| ScatterShape { part: mib << 20, ..pair };
        assert_eq!(
            [1, 8, 16, 96, 97, 1000].map(|mib| of(mib).choose()),
            [LAMPORT, LAMPORT, DIRECT, DIRECT, COPY, COPY]
        );
        let ordinary = |mib| ScatterShape { input_window: false, ..of(mib) };
        assert_eq!([16, 17, 48].map(|mib| ordinary(mib).choose()), [LAMPORT, PIPELINE, COPY]);
        let little = ScatterShape { room: 2 << 20, ..ordinary(500) };
        assert_eq!(little.choose(), PIPELINE);
        let over_a_bus = ScatterShape { nvlinked: false, ..of(32) };
        assert_eq!(over_a_bus.choose(), PIPELINE);
        let integers = ScatterShape { lamport: false, ..ordinary(1) };
        assert_eq!(integers.choose(), PIPELINE);
        assert_eq!(ScatterShape { part: 64 << 10, ..integers }.choose(), LL);
        let beside =
            |mib, in_pieces| ScatterShape { beside_compute: true, in_pieces, ..of(mib) }.choose();
        assert_eq!(
            [(16, true), (31, true), (32, true), (32, false)].map(|(mib, yes)| beside(mib, yes)),
            [LAMPORT, PIPELINE, COPY, PIPELINE]
        );
        for (world, most) in [(4, 16 << 20), (8, 4 << 20)] {
            let more = |part| ScatterShape { part, world, ..pair };
            assert_eq!(more(most).choose(), LAMPORT, "{world} ranks");
            assert_eq!(more(most + 16).choose(), PIPELINE, "{world} ranks");
        }
    }
}
