//! Reduce-scatter on a device: checks of a call, and which algorithm of `reduce_scatter` serves it.

#![allow(unsafe_code)] // passes on the caller's promises about raw buffers

use symmpool_allocator::{Result, Stream};

use crate::DType;
use crate::algorithm::AUTO;
use crate::call::{Arguments, StandardCall};
use crate::cuda::all_reduce::constraints::fits_lamport;
use crate::cuda::all_reduce::two_shot::part_launch;
use crate::cuda::engine::CudaEngine;
use crate::cuda::kernel::reduction_call::ReductionCall;
use crate::cuda::reduce_scatter::row::ReduceScatter;
use crate::cuda::reduce_scatter::scatter_shape::ScatterShape;

impl CudaEngine {
    fn scatter_shape(&self, part: u64, dtype: DType, input_window: bool) -> ScatterShape {
        let (world, lamport) = (self.world(), fits_lamport(dtype));
        ScatterShape {
            part,
            world,
            lamport,
            input_window,
            nvlinked: self.nvlinked,
            beside_compute: self.beside_compute,
            in_pieces: self.pieces_pay_off(),
            launch: part_launch(&self.control, world, lamport),
            room: self.control.scratch_room(world),
        }
    }

    /// Reduces part `r` of every rank's `input` into rank `r`'s `output`; `count` elements a part.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`CudaEngine::all_reduce`], for an input of `world` parts.
    pub(crate) unsafe fn reduce_scatter(
        &mut self,
        call: &StandardCall,
        stream: Stream,
    ) -> Result<()> {
        self.begin(stream)?;
        let StandardCall { algorithm, arguments, .. } = *call;
        let Arguments { input, output, count, dtype, op, .. } = arguments;
        self.check_reducible("reduce_scatter", dtype, stream)?;
        let part = self.byte_count("reduce_scatter", count, dtype, stream)?;
        let whole = self.bytes_of_parts("reduce_scatter", part, stream)?;
        let (from, to) = (self.address(input), self.address(output));
        let in_place = to == from + u64::from(self.rank()) * part;
        // Outputs are no part of the description, as no peer writes into them.
        let call = call.describe().algorithm(algorithm).input(input).in_place(in_place);
        if !in_place {
            self.check_disjoint("reduce_scatter", (from, whole), (to, part), stream)?;
        }
        let (bytes, stride) = (part, part);
        let work = ReductionCall {
            call,
            input: from,
            output: to,
            bytes,
            stride,
            dtype,
            op,
            root: 0,
            stream,
        };
        if part == 0 {
            return self.handshake_only(call, stream);
        }
        if self.world() == 1 {
            // SAFETY: the caller promised that `input` is readable for all parts and `output` writable for one, until
            // the stream has done the call; a single rank has one part.
            return unsafe { self.copy_alone(call, &arguments, stream) };
        }
        let chosen = match algorithm {
            AUTO => self.scatter_shape(part, dtype, input.is_window()).choose(),
            named => named,
        };
        let row = match ReduceScatter::named(chosen, dtype, input.is_window()) {
            Ok(row) => row,
            Err(error) => return Err(self.decline(error, stream)),
        };
        let max_sms = self.max_sms();
        tracing::debug!(part, %call, algorithm = row.name(), max_sms, "reduce_scatter");
        self.note_algorithm(row.name(), None);
        // SAFETY: the caller promised that `input` is readable for all parts and `output` writable for one, until the
        // stream has done the call; `work` has their addresses and the bytes of a part.
        unsafe { (row.launch)(self, &work) }
    }
}
