//! Further cases: a part of the output for each expert, quantised rows, ids that are no experts, too little room, graphs.

use std::time::Duration;

use symmpool_allocator::Result;
use symmpool_collectives::{
    CombineAt, Communicator, CommunicatorOptions, DType, DispatchAt, ExpertBuffer, ExpertLayout,
    ExpertQuantization, ExpertShape,
};

use super::model::{TokenRouting, as_quantized, channel, encode};
use super::{BorrowedBuffer, Check, POISON};
use crate::cuda::{CallGraph, download, upload};
use crate::oracle::random;

impl Check<'_> {
    /// A part of the output for each expert, once with room for all rows and once for fewer.
    pub(super) fn packed(&mut self, buffer: &BorrowedBuffer<'_>, seed: u64) -> Result<()> {
        let (shape, rank) = (buffer.shape(), self.pool.rank());
        let routing = TokenRouting::random(seed, self.pool.world(), &shape);
        let (offsets, rows) = routing.by_expert(rank, 1);
        let counts: Vec<usize> =
            offsets.windows(2).map(|pair| (pair[1] - pair[0]) as usize).collect();
        let most = counts.iter().copied().max().unwrap_or(0);
        let quantizes = shape.hidden.is_multiple_of(128) && random(seed, 8).is_multiple_of(2);
        let quantize = if quantizes { ExpertQuantization::Fp8 } else { ExpertQuantization::None };
        let units = if quantizes { shape.hidden / 128 } else { 0 };
        let row_bytes = shape.hidden * if quantizes { 1 } else { shape.dtype.size() };
        for (all, room) in [(true, most + 1), (false, (most / 2).max(1))] {
            let what = format!("{shape:?} packed in {room} rows, {quantize:?}, seed {seed}");
            let mut wanted = vec![POISON; counts.len() * room * row_bytes + 64];
            let mut wanted_scales = vec![POISON; counts.len() * room * units * 4 + 64];
            let mut back = vec![POISON; counts.len() * room * row_bytes];
            upload(self.pool, self.output.address(), &wanted)?;
            upload(self.pool, self.scales.address(), &wanted_scales)?;
            for &(at, source, token, expert) in &rows {
                let of = expert;
                let within = at - offsets[of] as usize;
                if within >= room {
                    continue;
                }
                let place = of * room + within;
                let values: Vec<f32> =
                    (0..shape.hidden).map(|each| channel(seed, source, token, each)).collect();
                if !quantizes {
                    let row = encode(shape.dtype, values.iter().copied());
                    wanted[place * row_bytes..][..row_bytes].copy_from_slice(&row);
                    let answer = values.iter().map(|value| value + (expert % 3) as f32);
                    back[place * row_bytes..][..row_bytes]
                        .copy_from_slice(&encode(shape.dtype, answer));
                    continue;
                }
                let (row, scales) = as_quantized(&values, quantize);
                wanted[place * row_bytes..][..row_bytes].copy_from_slice(&row);
                for (unit, scale) in scales.chunks(4).enumerate() {
                    let at = (of * units + unit) * room + within;
                    wanted_scales[4 * at..][..4].copy_from_slice(scale);
                }
            }
            let (output, scales) = (self.output.as_ptr().cast(), self.scales.as_ptr().cast());
            let layout = ExpertLayout::Packed { output, scales, rows: room };
            let call = DispatchAt { layout, quantize, ..self.put(&routing, &shape, seed)? };
            let sizes = routing.sizes(rank, counts.len() * room);
            let sent = self.dispatch_new(buffer, 1, (&call, &sizes), seed, &what);
            // Rows are there after that, whatever the call said.
            let settled = self.settle(buffer);
            let result = sent.and(settled);
            let good = match result {
                Ok(()) => room >= most,
                Err(error) => room < most && error.is_overflow() && error.ranks() == [rank],
            };
            self.judge(&format!("whether there was room, {what}"), &[good], &[true]);
            let got = download(self.pool, self.output.address(), wanted.len())?;
            self.judge(&format!("rows, {what}"), &got, &wanted);
            let got = download(self.pool, self.scales.address(), wanted_scales.len())?;
            self.judge(&format!("scales, {what}"), &got, &wanted_scales);
            if all && !quantizes {
                upload(self.pool, self.rows.address(), &back)?;
                self.back(buffer, (1, true), &routing, seed, &what)?;
            }
        }
        Ok(())
    }

    pub(super) fn quantized(&mut self, buffer: &BorrowedBuffer<'_>, seed: u64) -> Result<()> {
        let (shape, rank) = (buffer.shape(), self.pool.rank());
        let routing = TokenRouting::random(seed, self.pool.world(), &shape);
        let quantize = [
            ExpertQuantization::Fp8,
            ExpertQuantization::Fp8PowerOfTwo,
            ExpertQuantization::Fp8Ue8m0,
        ];
        let quantize = quantize[(random(seed, 6) % 3) as usize];
        let what = format!("{shape:?} {quantize:?}, seed {seed}");
        let call = DispatchAt { quantize, ..self.put(&routing, &shape, seed)? };
        self.dispatch(buffer, 0, &call)?;
        self.settle(buffer)?;
        let (mut rows, mut scales) = (Vec::new(), Vec::new());
        for (source, token) in routing.received(rank) {
            let values: Vec<f32> =
                (0..shape.hidden).map(|at| channel(seed, source, token, at)).collect();
            let (row, of_row) = as_quantized(&values, quantize);
            rows.extend(row);
            scales.extend(of_row);
        }
        let at = buffer.received();
        let got = download(self.pool, at.rows as u64, rows.len())?;
        self.judge(&format!("rows, {what}"), &got, &rows);
        let got = download(self.pool, at.scales as u64, scales.len())?;
        self.judge(&format!("scales, {what}"), &got, &scales);
        // Rows that are quantised already, with their scales. Some words are what inboxes hold where nothing has arrived,
        // or stand for it there.
        let (bytes, of_scales) = (shape.hidden, 4 * (shape.hidden / 128));
        let word = |source: usize, at: usize| match random(seed ^ source as u64, at as u64) {
            number if number % 64 < 3 => 0xc35a_96e8 | u32::from(number % 64 == 0),
            number => number as u32,
        };
        let row_of = |source: usize, token: usize| {
            (0..bytes / 4).flat_map(move |at| word(source, token * bytes / 4 + at).to_le_bytes())
        };
        let scales_of = |source: usize, token: usize| {
            (0..of_scales).map(move |at| (token * of_scales + at) as u8 ^ source as u8)
        };
        let mine = || 0..routing.ids[rank as usize].len();
        let own: Vec<u8> = mine().flat_map(|token| row_of(rank as usize, token)).collect();
        let own_scales: Vec<u8> =
            mine().flat_map(|token| scales_of(rank as usize, token)).collect();
        let raw = self.put(&routing, &shape, seed)?;
        upload(self.pool, self.input.address(), &own)?;
        upload(self.pool, self.scales.address(), &own_scales)?;
        let scales = self.scales.as_ptr().cast_const().cast();
        let call = DispatchAt { quantized: true, scales, scale_bytes: of_scales, ..raw };
        self.dispatch(buffer, 0, &call)?;
        self.settle(buffer)?;
        let received = || routing.received(rank).into_iter();
        let rows: Vec<u8> = received().flat_map(|(source, token)| row_of(source, token)).collect();
        let scales: Vec<u8> =
            received().flat_map(|(source, token)| scales_of(source, token)).collect();
        let got = download(self.pool, at.rows as u64, rows.len())?;
        self.judge(&format!("rows quantised already, {what}"), &got, &rows);
        let got = download(self.pool, at.scales as u64, scales.len())?;
        self.judge(&format!("their scales, {what}"), &got, &scales);
        Ok(())
    }

    /// Error of a dispatch: from the call itself if it is exact, or from waiting for the stream.
    fn outcome(&self, buffer: &BorrowedBuffer<'_>, call: &DispatchAt, exact: bool) -> Result<()> {
        if !exact {
            self.dispatch(buffer, 0, call)?;
            return self.settle(buffer);
        }
        let found = self.dispatch_exact(buffer, 0, call).map(drop);
        let settled = self.settle(buffer);
        found.and(settled)
    }

    /// S5, S6: a dispatch that waits for sizes says itself that ranks differ, or that one does not come.
    pub(super) fn exact_faults(&mut self, options: &CommunicatorOptions) -> Result<()> {
        let (rank, world) = (self.pool.rank(), self.pool.world());
        let shape = ExpertShape {
            hidden: 64,
            experts: 2 * world,
            top_k: 2,
            max_tokens: 300,
            dtype: DType::F32,
            capacity: None,
        };
        for tokens in [3, 300] {
            let counts = vec![tokens; world as usize];
            let routing = TokenRouting::of(5, world, &shape, &counts);
            let comm = Communicator::with_options(self.pool, options)?;
            let buffer = ExpertBuffer::new(&comm, shape, None)?;
            let mut call = DispatchAt { ids_dtype: DType::I64, ..self.put(&routing, &shape, 0)? };
            self.put_ids(&routing)?;
            if rank == world - 1 {
                call.layout = ExpertLayout::ByExpert {
                    output: self.output.as_ptr().cast(),
                    scales: std::ptr::null_mut(),
                    capacity: buffer.capacity(true, 1),
                    alignment: 1,
                };
            }
            let found = self.dispatch_exact(&buffer, 0, &call);
            let good = found.as_ref().is_err_and(symmpool_allocator::Error::is_diverged);
            self.judge(
                &format!("exact sizes of {tokens} tokens where ranks differ: {found:?}"),
                &[good],
                &[true],
            );
        }
        let timeout = Duration::from_secs(4);
        let comm = CommunicatorOptions { timeout, ..options.clone() };
        let comm = Communicator::with_options(self.pool, &comm)?;
        let buffer = ExpertBuffer::new(&comm, shape, None)?;
        let routing = TokenRouting::of(5, world, &shape, &vec![3; world as usize]);
        let call = DispatchAt { ids_dtype: DType::I64, ..self.put(&routing, &shape, 0)? };
        self.put_ids(&routing)?;
        if rank != world - 1 {
            let found = self.dispatch_exact(&buffer, 0, &call);
            let late = [world - 1];
            let good =
                found.as_ref().is_err_and(|error| error.is_timeout() && error.ranks() == late);
            self.judge(
                &format!("exact sizes where a rank does not come: {found:?}"),
                &[good],
                &[true],
            );
        }
        Ok(())
    }

    /// Puts this rank's ids into memory, with 64 bits.
    pub(super) fn put_ids(&self, routing: &TokenRouting) -> Result<()> {
        let ids = routing.ids[self.pool.rank() as usize].iter().flatten();
        let ids: Vec<u8> = ids.flat_map(|id| id.to_le_bytes()).collect();
        upload(self.pool, self.ids.address(), &ids)
    }

    /// An id that is no expert is named on all ranks, and counts as none.
    pub(super) fn bad_ids(
        &mut self,
        buffer: &BorrowedBuffer<'_>,
        seed: u64,
        exact: bool,
    ) -> Result<()> {
        let shape = buffer.shape();
        let mut routing = TokenRouting::random(seed, self.pool.world(), &shape);
        let bad = self.pool.world() as usize - 1;
        routing.ids[bad].resize(4, vec![0; shape.top_k as usize]);
        routing.weights[bad].resize(4, vec![1.0; shape.top_k as usize]);
        routing.ids[bad][2][1] = i64::from(shape.experts);
        let call = self.put(&routing, &shape, seed)?;
        let result = self.outcome(buffer, &call, exact);
        let named = format!("token 2 of rank {bad} has the id {}", shape.experts);
        let good = result
            .is_err_and(|error| error.is_invalid_argument() && error.to_string().contains(&named));
        self.judge("a bad id is named", &[good], &[true]);
        routing.ids[bad][2][1] = -1;
        let wanted = self.received(&routing, &shape, seed);
        let got = download(self.pool, buffer.received().rows as u64, wanted.len())?;
        self.judge("rows of a call with a bad id", &got, &wanted);
        Ok(())
    }

    /// Checks that rows for which a buffer has no room are not written, and that all ranks hear of it.
    pub(super) fn overflow(&mut self, comm: &Communicator, seed: u64, exact: bool) -> Result<()> {
        let world = self.pool.world();
        let (hidden, max_tokens, dtype) = (64, 32, DType::F32);
        let capacity = Some(10);
        let shape = ExpertShape { hidden, experts: world, top_k: 1, max_tokens, dtype, capacity };
        let buffer = ExpertBuffer::new(comm, shape, None)?;
        let ids = vec![vec![vec![0]; 20]; world as usize];
        let weights = vec![vec![vec![1.0]; 20]; world as usize];
        let routing = TokenRouting { ids, weights, experts: world };
        let call = self.put(&routing, &shape, seed)?;
        let result = self.outcome(&buffer, &call, exact);
        let good = result.is_err_and(|error| error.is_overflow() && error.ranks() == [0]);
        self.judge("rows that do not fit", &[good], &[true]);
        let rows = if self.pool.rank() == 0 { 10 } else { 0 };
        let wanted = &self.received(&routing, &shape, seed)[..rows * hidden * 4];
        let got = download(self.pool, buffer.received().rows as u64, wanted.len())?;
        self.judge("rows that fit", &got, wanted);
        upload(self.pool, self.rows.address(), wanted)?;
        upload(self.pool, self.result.address(), &vec![POISON; 20 * hidden * 4])?;
        let (input, output) = (self.rows.as_ptr().cast_const().cast(), self.result.as_ptr().cast());
        let weights = std::ptr::null();
        self.combine(
            &buffer,
            0,
            &CombineAt {
                input,
                input_rows: usize::MAX,
                output,
                tokens: 20,
                weights,
                by_expert: false,
                more: 0,
            },
        )?;
        self.settle(&buffer)?;
        let came = |token: usize| self.pool.rank() == 0 && token < 10;
        let rank = self.pool.rank() as usize;
        let wanted = (0..20).flat_map(|token| {
            (0..hidden)
                .map(move |at| if came(token) { channel(seed, rank, token, at) } else { 0.0 })
        });
        let wanted = encode(dtype, wanted.collect::<Vec<f32>>());
        let got = download(self.pool, self.result.address(), wanted.len())?;
        self.judge("sums of rows that fit", &got, &wanted);
        Ok(())
    }

    /// S2, S8: a dispatch and a combine are captured once, and replayed with other ids and tokens in memory.
    pub(super) fn graphs(&mut self, buffer: &BorrowedBuffer<'_>, seed: u64) -> Result<()> {
        let (shape, rank) = (buffer.shape(), self.pool.rank());
        let tokens = 100;
        let routed = |seed: u64| {
            TokenRouting::of(
                seed,
                self.pool.world(),
                &shape,
                &vec![tokens; self.pool.world() as usize],
            )
        };
        let call = self.put(&routed(0), &shape, 0)?;
        let call = DispatchAt { ids_dtype: DType::I64, ..call };
        // The host cannot wait for what a graph only captures.
        let mut refused = false;
        let graph = CallGraph::capture(self.pool, self.stream, || {
            let found = self.dispatch_exact(buffer, 0, &call);
            refused = found.is_err_and(|error| error.is_invalid_state());
            Ok(())
        });
        // A call that is declined ends the capture.
        let outcome = [refused, graph.is_err()];
        self.judge("exact sizes while a graph is captured", &outcome, &[true, true]);
        // The other ranks learn of that before the next capture.
        self.settle(buffer)?;
        let graph = CallGraph::capture(self.pool, self.stream, || {
            self.dispatch(buffer, 0, &call)?;
            let input = buffer.received().rows.cast_const();
            let (output, weights) = (self.result.as_ptr().cast(), std::ptr::null());
            self.combine(
                buffer,
                0,
                &CombineAt {
                    input,
                    input_rows: usize::MAX,
                    output,
                    tokens,
                    weights,
                    by_expert: false,
                    more: 0,
                },
            )
        })?;
        for round in 0..20 {
            let seed = random(seed, 500 + round);
            let routing = routed(seed);
            self.put(&routing, &shape, seed)?;
            self.put_ids(&routing)?;
            graph.launch(self.pool, self.stream)?;
            self.settle(buffer)?;
            let wanted = encode(shape.dtype, routing.combined(rank, seed, shape.hidden, false));
            let got = download(self.pool, self.result.address(), wanted.len())?;
            self.judge(&format!("replay {round}"), &got, &wanted);
        }
        graph.destroy(self.pool)
    }
}
