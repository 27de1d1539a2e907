//! The class `ExpertBufferCore`, on which `symmpool.experts.ExpertBuffer` stands.

#![allow(unsafe_code)] // passes on addresses that tensors gave

use std::sync::Arc;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use symmpool_collectives::{
    CombineAt, DType, DispatchAt, ExpertLayout, ExpertQuantization, ExpertShape,
};

use crate::arguments::{Argument, CommunicatorCalls};
use crate::block::Block;
use crate::communicator::Communicator;
use crate::convert::{self, long_name};
use crate::errors::{OrRaise, invalid};
use crate::fork_guarded::ForkGuarded;
use crate::memory::UnorderedBlock;
use crate::name::Name;
use crate::number::Number;
use crate::reading::{Refusal, Tensor};
use crate::{site, stream};

type SharedExpertBuffer =
    symmpool_collectives::ExpertBuffer<Arc<symmpool_collectives::Communicator>>;

/// The memory and the calls behind `symmpool.experts.ExpertBuffer`, which documents them. Handles, and all that calls
/// write to, are tensors of the caller's.
#[pyclass(frozen, weakref, module = "symmpool")]
pub(crate) struct ExpertBufferCore {
    buffer: ForkGuarded<SharedExpertBuffer>,
    calls: Arc<CommunicatorCalls>,
    memory: Arc<UnorderedBlock>,
}

/// A tensor of two dimensions.
#[derive(Clone, Copy)]
struct TokenMatrix {
    tensor: Tensor,
    rows: usize,
    columns: usize,
}

impl ExpertBufferCore {
    /// Reads a matrix whose rows have `columns` elements, if that is given.
    fn matrix(
        &self,
        name: &'static str,
        object: Argument<'_, '_>,
        columns: Option<usize>,
        write: bool,
    ) -> Result<TokenMatrix, Refusal> {
        let tensor = self.calls.read(name, object, write)?;
        let shape: Vec<usize> = object.getattr(intern!(object.py(), "shape"))?.extract()?;
        let expected = columns.map_or_else(|| "n".to_owned(), |columns| columns.to_string());
        match shape[..] {
            [rows, found] if columns.is_none_or(|columns| columns == found) => {
                Ok(TokenMatrix { tensor, rows, columns: found })
            }
            _ => Err(Refusal::Invalid(format!(
                "{name}: of shape {shape:?}, where [rows, {expected}] is needed"
            ))),
        }
    }

    /// Reads a tensor of an element type that has as many rows as there are tokens.
    fn of_tokens(
        &self,
        name: &'static str,
        object: Argument<'_, '_>,
        (tokens, columns): (usize, Option<usize>),
        dtypes: &[DType],
    ) -> Result<TokenMatrix, Refusal> {
        let found = self.matrix(name, object, columns, false)?;
        has_type(name, found.tensor.dtype, dtypes)?;
        if found.rows != tokens {
            return Err(Refusal::Invalid(format!(
                "{name}: {} rows, where there are {tokens} tokens",
                found.rows
            )));
        }
        Ok(found)
    }

    fn handle(&self, object: Argument<'_, '_>) -> Result<*mut u8, Refusal> {
        let found = self.calls.read("handle", object, true)?;
        let (needed, bytes) = (self.buffer.handle_parts().bytes, found.count * found.dtype.size());
        if found.dtype != DType::I32 || bytes < needed {
            return Err(Refusal::Invalid(format!(
                "handle: {bytes} bytes of {}, where {needed} of int32 are needed",
                long_name(found.dtype)
            )));
        }
        Ok(found.to())
    }

    /// Where rows by expert are written, and their scales: tensors of as many rows each. With `expert_rows` each expert
    /// has a part of so many of them.
    fn by_expert(
        &self,
        (output, output_scales): (Argument<'_, '_>, Option<Argument<'_, '_>>),
        dtype: DType,
        scale_bytes: usize,
        (alignment, expert_rows): (Number<u32>, Number<u32>),
    ) -> Result<ExpertLayout, Refusal> {
        let alignment = alignment.or_refuse("alignment")?;
        let expert_rows = expert_rows.or_refuse("expert_rows")? as usize;
        let rows = self.matrix("out", output, Some(self.buffer.shape().hidden), true)?;
        has_type("out", rows.tensor.dtype, &[dtype])?;
        let mut scales = std::ptr::null_mut();
        if scale_bytes > 0 {
            let Some(object) = output_scales else {
                return Err(Refusal::Invalid("out_scales: it is missing".to_owned()));
            };
            let found = self.matrix("out_scales", object, None, true)?;
            let bytes = found.columns * found.tensor.dtype.size();
            if bytes != scale_bytes || found.rows != rows.rows {
                return Err(Refusal::Invalid(format!(
                    "out_scales: {} rows of {bytes} bytes, where {} rows of {scale_bytes} bytes are needed",
                    found.rows, rows.rows
                )));
            }
            scales = found.tensor.to();
        }
        if expert_rows > 0 {
            let local = self.buffer.shape().experts / self.buffer.communicator().world();
            let needed = (local as usize).saturating_mul(expert_rows);
            if rows.rows != needed {
                return Err(Refusal::Invalid(format!(
                    "out: {} rows, where {local} experts have {expert_rows} each",
                    rows.rows
                )));
            }
            return Ok(ExpertLayout::Packed {
                output: rows.tensor.to(),
                scales,
                rows: expert_rows,
            });
        }
        Ok(ExpertLayout::ByExpert {
            output: rows.tensor.to(),
            scales,
            capacity: rows.rows,
            alignment,
        })
    }
}

/// Arguments on their way to a thread without the interpreter's lock.
struct Ready<T>(*mut u8, T);

// SAFETY: the addresses are used by the one call that they were read for, while the caller's frame holds the tensors.
unsafe impl<T> Send for Ready<T> {}

fn has_type(name: &str, found: DType, expected: &[DType]) -> Result<(), Refusal> {
    if expected.contains(&found) {
        return Ok(());
    }
    let expected: Vec<_> = expected.iter().map(|dtype| long_name(*dtype)).collect();
    Err(Refusal::Invalid(format!(
        "{name}: elements of {}, where {} is needed",
        long_name(found),
        expected.join(" or ")
    )))
}

type MadeFor<'a, 'py> =
    (Number<u64>, Number<u32>, Number<u32>, Number<u64>, Argument<'a, 'py>, Option<Number<u64>>);

/// The options of a buffer: its shape, and the most SMs of its kernels.
fn shape_of(
    py: Python<'_>,
    (hidden, experts, top_k, max_tokens, dtype, capacity): MadeFor<'_, '_>,
    num_sms: Option<Number<u32>>,
) -> PyResult<(ExpertShape, Option<u32>)> {
    let shape = ExpertShape {
        hidden: hidden.or_raise(py, "hidden")? as usize,
        experts: experts.or_raise(py, "experts")?,
        top_k: top_k.or_raise(py, "top_k")?,
        max_tokens: max_tokens.or_raise(py, "max_tokens")? as usize,
        dtype: convert::dtype(dtype)?,
        capacity: capacity
            .map(|capacity| capacity.or_raise(py, "capacity"))
            .transpose()?
            .map(|capacity| capacity as usize),
    };
    Ok((shape, num_sms.map(|num_sms| num_sms.or_raise(py, "num_sms")).transpose()?))
}

fn quantization(name: Option<&str>) -> Result<ExpertQuantization, Refusal> {
    match name {
        None => Ok(ExpertQuantization::None),
        Some("fp8") => Ok(ExpertQuantization::Fp8),
        Some("fp8_pow2") => Ok(ExpertQuantization::Fp8PowerOfTwo),
        Some("fp8_ue8m0") => Ok(ExpertQuantization::Fp8Ue8m0),
        Some(other) => Err(Refusal::Invalid(format!(
            "quantize: {other:?} is none of None, \"fp8\", \"fp8_pow2\" and \"fp8_ue8m0\""
        ))),
    }
}

#[pymethods]
impl ExpertBufferCore {
    /// A buffer on a communicator, by a collective call, which waits for all ranks: they make it together, or none
    /// does. It commits the pool; none is made while a graph is captured.
    #[new]
    #[pyo3(signature = (
        comm, *, hidden, experts, top_k, max_tokens, dtype, capacity = None, num_sms = None, any_layout = false
    ))]
    #[allow(clippy::too_many_arguments)] // options, with names
    fn new(
        py: Python<'_>,
        comm: &Bound<'_, Communicator>,
        hidden: Number<u64>,
        experts: Number<u32>,
        top_k: Number<u32>,
        max_tokens: Number<u64>,
        dtype: &Bound<'_, PyAny>,
        capacity: Option<Number<u64>>,
        num_sms: Option<Number<u32>>,
        any_layout: bool,
    ) -> PyResult<Self> {
        let calls = Arc::clone(&comm.get().calls);
        calls.comm.check("a communicator").or_raise(py)?;
        let made_for = (hidden, experts, top_k, max_tokens, dtype, capacity);
        let (shape, num_sms) = shape_of(py, made_for, num_sms)?;
        let stream = stream::resolve(py, calls.device, None)?;
        let make = || {
            // SAFETY: this object keeps the block, and its memory is used by nobody else before the device has done
            // what calls gave it.
            unsafe {
                SharedExpertBuffer::together(calls.core(), shape, num_sms, any_layout, &stream)
            }
        };
        let (block, buffer) = site::detach(py, make).or_raise(py)?;
        let memory = UnorderedBlock::for_calls(block, calls.comm.pool(), calls.device, stream);
        Ok(Self { buffer: ForkGuarded::new(buffer), calls, memory })
    }

    /// Raises what is wrong with the options of a buffer on a communicator. Makes nothing.
    #[staticmethod]
    #[pyo3(signature = (comm, *, hidden, experts, top_k, max_tokens, dtype, capacity = None, num_sms = None))]
    #[allow(clippy::too_many_arguments)] // options, with names
    fn check(
        py: Python<'_>,
        comm: &Bound<'_, Communicator>,
        hidden: Number<u64>,
        experts: Number<u32>,
        top_k: Number<u32>,
        max_tokens: Number<u64>,
        dtype: &Bound<'_, PyAny>,
        capacity: Option<Number<u64>>,
        num_sms: Option<Number<u32>>,
    ) -> PyResult<()> {
        let calls = &comm.get().calls;
        let made_for = (hidden, experts, top_k, max_tokens, dtype, capacity);
        let (shape, num_sms) = shape_of(py, made_for, num_sms)?;
        SharedExpertBuffer::region_bytes(shape, calls.rank, calls.world).or_raise(py)?;
        SharedExpertBuffer::check_sms(calls.rank, num_sms).or_raise(py)
    }

    /// The int32 elements of a handle, and where each part of it begins among them.
    fn handle_parts<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let parts = self.buffer.handle_parts();
        let all = PyDict::new(py);
        for (name, at) in [
            ("head", parts.head),
            ("source_offsets", parts.source_offsets),
            ("expert_counts", parts.expert_counts),
            ("expert_offsets", parts.expert_offsets),
            ("places", parts.places),
            ("weights", parts.weights),
            ("tokens", parts.tokens),
            ("elements", parts.bytes),
        ] {
            all.set_item(name, at / 4)?;
        }
        Ok(all)
    }

    /// A part of the memory in which received rows lie, "rows", "scales", "ids" or "weights", with a shape and an
    /// element type; without a copy.
    fn received(
        &self,
        py: Python<'_>,
        part: &str,
        shape: Vec<i64>,
        dtype: &Bound<'_, PyAny>,
    ) -> PyResult<Block> {
        let (parts, made_for) = (self.buffer.received(), self.buffer.shape());
        let rows = self.capacity(false, Number::of(1), py)?;
        let (at, row) = match part {
            "rows" => (parts.rows as usize, made_for.hidden * made_for.dtype.size()),
            "scales" => (parts.scales as usize, made_for.most_scale_bytes()),
            "ids" => (parts.ids as usize, 4 * made_for.top_k as usize),
            "weights" => (parts.weights as usize, 4 * made_for.top_k as usize),
            _ => return Err(invalid(py, format!("part: there is no {part:?}"))),
        };
        let dtype = convert::dtype(dtype)?;
        let elements = shape.iter().try_fold(1_usize, |product, length| {
            usize::try_from(*length).ok().and_then(|length| product.checked_mul(length))
        });
        let bytes = elements.and_then(|elements| elements.checked_mul(dtype.size()));
        if bytes.is_none_or(|bytes| bytes > rows * row) {
            return Err(invalid(py, format!("shape: {shape:?} is more than the part holds")));
        }
        let begin = at - self.memory.block().as_ptr() as usize;
        Ok(Block::part(self.memory.clone(), begin, shape, dtype))
    }

    /// The most rows that this rank can receive, with `by_expert` those that have a row for each of their experts.
    fn capacity(&self, by_expert: bool, alignment: Number<u32>, py: Python<'_>) -> PyResult<usize> {
        let alignment = alignment.or_raise(py, "alignment")?.max(1);
        Ok(self.buffer.capacity(by_expert, alignment))
    }

    /// The bytes of symmetric memory, by part.
    fn memory<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let all = PyDict::new(py);
        for (name, bytes) in self.buffer.memory() {
            all.set_item(name, bytes)?;
        }
        Ok(all)
    }

    /// The bytes of symmetric memory that a buffer has among `world` ranks.
    #[staticmethod]
    #[pyo3(signature = (*, world, hidden, experts, top_k, max_tokens, dtype))]
    fn bytes_for(
        py: Python<'_>,
        world: Number<u32>,
        hidden: Number<u64>,
        experts: Number<u32>,
        top_k: Number<u32>,
        max_tokens: Number<u64>,
        dtype: &Bound<'_, PyAny>,
    ) -> PyResult<usize> {
        let shape = ExpertShape {
            hidden: hidden.or_raise(py, "hidden")? as usize,
            experts: experts.or_raise(py, "experts")?,
            top_k: top_k.or_raise(py, "top_k")?,
            max_tokens: max_tokens.or_raise(py, "max_tokens")? as usize,
            dtype: convert::dtype(dtype)?,
            capacity: None,
        };
        let world = world.or_raise(py, "world")?;
        if world == 0 {
            return Err(invalid(py, "world: there is one rank or more".to_owned()));
        }
        SharedExpertBuffer::region_bytes(shape, 0, world).or_raise(py)
    }

    /// Has kernels of later calls take at most so many SMs, or what is best.
    #[pyo3(signature = (num_sms))]
    fn set_num_sms(&self, py: Python<'_>, num_sms: Option<Number<u32>>) -> PyResult<()> {
        let num_sms = num_sms.map(|num_sms| num_sms.or_raise(py, "num_sms")).transpose()?;
        self.buffer.set_num_sms(num_sms).or_raise(py)
    }

    /// Sends tokens. Without `topk_ids` the routing is that of the handle; with `out` rows lie by expert, and with
    /// `expert_rows` each expert has a part of so many rows, and scales are column-major in each part. With `exact` it
    /// waits until it is known how many rows arrive, and returns that: the rows, or the rows by expert if these lie so,
    /// and a list of those of each expert of this rank. `more` is how many calls follow that belong to this one.
    #[pyo3(signature = (
        handle, x, topk_ids, topk_weights = None, scales = None, quantize = None, out = None, out_scales = None,
        alignment = Number::of(1), stream = None, expert_rows = Number::of(0), exact = false, more = 0
    ), text_signature = "(handle, x, topk_ids, topk_weights=None, scales=None, quantize=None, out=None, \
                         out_scales=None, alignment=1, stream=None, expert_rows=0, exact=False, more=0)")]
    #[allow(clippy::too_many_arguments)] // options, with names
    fn dispatch(
        &self,
        py: Python<'_>,
        handle: Argument<'_, '_>,
        x: Argument<'_, '_>,
        topk_ids: Option<Argument<'_, '_>>,
        topk_weights: Option<Argument<'_, '_>>,
        scales: Option<Argument<'_, '_>>,
        quantize: Option<Name<'_>>,
        out: Option<Argument<'_, '_>>,
        out_scales: Option<Argument<'_, '_>>,
        alignment: Number<u32>,
        stream: Option<Argument<'_, '_>>,
        expert_rows: Number<u32>,
        exact: bool,
        more: u32,
    ) -> PyResult<Option<(usize, Vec<usize>)>> {
        let calls = &*self.calls;
        let stream = calls.stream(py, stream)?;
        let shape = self.buffer.shape();
        let arguments = || {
            let rows = self.matrix("x", x, Some(shape.hidden), false)?;
            has_type("x", rows.tensor.dtype, &[shape.dtype, DType::F8E4m3])?;
            let quantize = quantize.map(|name| name.or_refuse("quantize")).transpose()?;
            let (tokens, quantize) = (rows.rows, quantization(quantize)?);
            let read = |name, object: Option<_>, columns, dtypes: &[DType]| {
                let read = |object| self.of_tokens(name, object, (tokens, columns), dtypes);
                object.map(read).transpose()
            };
            let chosen = Some(shape.top_k as usize);
            let ids = read("topk_ids", topk_ids, chosen, &[DType::I32, DType::I64])?;
            let weights = read("topk_weights", topk_weights, chosen, &[DType::F32])?;
            let given = scales.map(|scales| self.matrix("scales", scales, None, false));
            let given = given.transpose()?;
            if let Some(found) = given.filter(|found| found.rows != tokens) {
                return Err(Refusal::Invalid(format!(
                    "scales: {} rows, where there are {tokens} tokens",
                    found.rows
                )));
            }
            let given_bytes = given.map_or(0, |it| it.columns * it.tensor.dtype.size());
            let scale_bytes = shape.scale_bytes(quantize, given_bytes);
            let travels = match quantize {
                ExpertQuantization::None => rows.tensor.dtype,
                _ => DType::F8E4m3,
            };
            let layout = match out {
                None => ExpertLayout::ByRank,
                Some(out) => {
                    let lie = (alignment, expert_rows);
                    self.by_expert((out, out_scales), travels, scale_bytes, lie)?
                }
            };
            let at = |matrix: Option<TokenMatrix>| {
                matrix.map_or(std::ptr::null(), |it| it.tensor.from())
            };
            let dispatch = DispatchAt {
                input: rows.tensor.from(),
                quantized: rows.tensor.dtype == DType::F8E4m3,
                scales: at(given),
                scale_bytes: given_bytes,
                scale_dtype: given.map_or(DType::U8, |it| it.tensor.dtype),
                tokens,
                ids: at(ids),
                ids_dtype: ids.map_or(DType::I32, |ids| ids.tensor.dtype),
                weights: at(weights).cast(),
                quantize,
                layout,
                known: topk_ids.is_none(),
                more,
            };
            Ok(Ready(self.handle(handle)?, dispatch))
        };
        let ready = calls.or_decline(py, stream, arguments())?;
        calls.run(py, || {
            let Ready(handle, dispatch) = { ready };
            if !exact {
                // SAFETY: the tensors have these shapes, contiguous, on the pool's device, and the caller's frame keeps
                // them alive for the length of the call. How long work on a stream needs them, and that the handle is
                // one of this buffer, `symmpool.experts.ExpertBuffer` sees to.
                return unsafe { self.buffer.dispatch_at(handle, &dispatch, &stream) }
                    .map(|()| None);
            }
            // SAFETY: the tensors have these shapes, contiguous, on the pool's device, and the caller's frame keeps
            // them alive for the length of the call; `symmpool.experts.ExpertBuffer` sees to it that the handle is one
            // of this buffer.
            let sizes = unsafe { self.buffer.dispatch_exact_at(handle, &dispatch, &stream) }?;
            let by_expert = !matches!(dispatch.layout, ExpertLayout::ByRank);
            let rows = if by_expert { sizes.rows_by_expert } else { sizes.rows };
            Ok(Some((rows, sizes.expert_counts)))
        })
    }

    /// Sends rows back and sums them up. `rows` is how many rows the input has at least, as the dispatch had them.
    #[pyo3(signature = (handle, out, input, rows, weights = None, by_expert = false, stream = None, more = 0))]
    #[allow(clippy::too_many_arguments)] // options, with names
    fn combine(
        &self,
        py: Python<'_>,
        handle: Argument<'_, '_>,
        out: Argument<'_, '_>,
        input: Argument<'_, '_>,
        rows: Number<usize>,
        weights: Option<Argument<'_, '_>>,
        by_expert: bool,
        stream: Option<Argument<'_, '_>>,
        more: u32,
    ) -> PyResult<()> {
        let calls = &*self.calls;
        let stream = calls.stream(py, stream)?;
        let shape = self.buffer.shape();
        let arguments = || {
            let from = self.matrix("expert_output", input, Some(shape.hidden), false)?;
            has_type("expert_output", from.tensor.dtype, &[shape.dtype])?;
            let rows = rows.or_refuse("rows")?;
            if from.rows < rows {
                return Err(Refusal::Invalid(format!(
                    "expert_output: {} rows, where the dispatch had {rows}",
                    from.rows
                )));
            }
            let to = self.matrix("out", out, Some(shape.hidden), true)?;
            has_type("out", to.tensor.dtype, &[shape.dtype])?;
            let bytes = |matrix: &TokenMatrix| matrix.tensor.count * shape.dtype.size();
            let (a, b) = (from.tensor.address, to.tensor.address);
            if a < b + bytes(&to) && b < a + bytes(&from) {
                return Err(Refusal::Invalid("out: it overlaps expert_output".to_owned()));
            }
            let chosen = (to.rows, Some(shape.top_k as usize));
            let weights = weights
                .map(|weights| self.of_tokens("weights", weights, chosen, &[DType::F32]))
                .transpose()?;
            let combine = CombineAt {
                input: from.tensor.from(),
                input_rows: from.rows,
                output: to.tensor.to(),
                tokens: to.rows,
                // Where there are no tokens, torch gives an address of 0; that there are weights is said all the same.
                weights: weights.map_or(0, |it| it.tensor.address.max(align_of::<f32>()))
                    as *const f32,
                by_expert,
                more,
            };
            Ok(Ready(self.handle(handle)?, combine))
        };
        let ready = calls.or_decline(py, stream, arguments())?;
        calls.run(py, || {
            let Ready(handle, combine) = { ready };
            // SAFETY: the tensors have these shapes, contiguous, on the pool's device, and the caller's frame keeps
            // them alive for the length of the call; `symmpool.experts.ExpertBuffer` sees to it that a dispatch of this
            // buffer wrote the handle.
            unsafe { self.buffer.combine_at(handle, &combine, &stream) }
        })
    }
}
