//! Mixtures of experts, in the C API: buffers, dispatch and combine.

use std::ffi::c_void;
use std::sync::Arc;

use symmpool_allocator::{Error, Result, Stream};
use symmpool_collectives::{
    CombineAt, Communicator, DType, DispatchAt, ExpertBuffer, ExpertLayout, ExpertQuantization,
    ExpertShape,
};

use super::comm::{self, dtype, symmpool_comm};
use super::{Handles, Out};
use crate::guard::{Status, status};
use crate::on;

/// A handle of a buffer for experts: what sends tokens to the ranks of their experts, and sums up what comes back. 0 is
/// never a valid handle.
#[allow(non_camel_case_types)] // the name in C
pub type symmpool_experts = u64;

type SharedBuffer = ExpertBuffer<Arc<Communicator>>;

static BUFFERS: Handles<SharedBuffer> = Handles::new("buffer for experts");

/// Shape of a buffer for experts. All but num_sms is the same on every rank.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ExpertsShape {
    /// Channels of a token; a row has a multiple of 16 bytes.
    pub hidden: usize,
    /// The most tokens that a rank has in a call.
    pub max_tokens: usize,
    /// The most tokens that a rank can receive; 0 for all that there may be, max_tokens of each rank.
    pub capacity: usize,
    /// Experts of all ranks together, a multiple of the number of ranks: expert e is on rank e / (experts / ranks).
    pub experts: u32,
    /// Experts that each token names.
    pub top_k: u32,
    /// A symmpool_dtype, of what experts return and of tokens that are not quantised: F32, F16 or BF16.
    pub dtype: u32,
    /// The most SMs that kernels take, 2 or more; 0 for what is best.
    pub num_sms: u32,
}

/// Bytes that a buffer for experts has on a rank.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ExpertsMemory {
    /// Received rows.
    pub received_rows: usize,
    /// Their scales.
    pub received_scales: usize,
    /// Which experts they are for, with weights, and where they go.
    pub routing: usize,
    /// Rows that come back.
    pub combined_rows: usize,
    /// All of these: the buffer's symmetric memory.
    pub total: usize,
    /// A handle, which is the caller's memory and not part of the total.
    pub handle: usize,
}

/// Where received rows lie that are ordered by rank, and what belongs to them: addresses on the pool's device, all with
/// room for `capacity` rows. The next dispatch of the buffer overwrites them.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ExpertsReceived {
    /// The rows, one behind the other.
    pub rows: *mut c_void,
    /// Their scales, as many bytes for each as were sent.
    pub scales: *mut c_void,
    /// For each row and each of its top_k ids the number of the expert among those of this rank, or -1.
    pub ids: *mut i32,
    /// The weights of these; 1 if none were sent.
    pub weights: *mut f32,
    /// The most rows that this rank can receive.
    pub capacity: usize,
}

/// Where things lie in a handle, in bytes. All are int32_t, but for the weights, which are float.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ExpertsHandle {
    /// Bytes of a handle, which begins at a multiple of 16.
    pub bytes: usize,
    /// How many rows were received, how many tokens this rank sent, and how many rows by expert there are, with padding.
    pub head: usize,
    /// Where the rows of each rank begin among those received, and the end: a number more than ranks.
    pub source_offsets: usize,
    /// For each received row which token of its rank it is: as many as the buffer's capacity.
    pub source_index: usize,
    /// How many rows each expert of this rank was sent.
    pub expert_counts: usize,
    /// Where the rows of each expert of this rank begin if they lie by expert, and the end: a number more than experts.
    pub expert_offsets: usize,
    /// For each received row and id its row by expert; -1 for none.
    pub places: usize,
    /// The weights of these.
    pub weights: usize,
}

/// How received rows lie, for the `layout` of symmpool_dispatch_info.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub enum Arrangement {
    /// A row for each received token, by rank and there in the order of tokens, where symmpool_experts_received says.
    ByRank = 0,
    /// A row for each received token and expert of it on this rank, in `output`: by expert, then by rank, then by token.
    /// Each expert's first row is a multiple of `alignment`; rows between experts are not written.
    ByExpert = 1,
    /// Rows by expert, of which each expert of this rank has `output_rows`: `output` is [experts of this rank,
    /// output_rows, hidden], and `output_scales` are [experts, scales of a row, output_rows].
    Packed = 2,
}

/// How tokens are made F8E4M3 when they are sent, for the `quantize` of symmpool_dispatch_info: each 128 channels have a
/// scale, their largest magnitude, but at least 1e-4, divided by 448.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub enum Quantize {
    /// Tokens travel as they are.
    None = 0,
    /// Scales are float.
    Fp8 = 1,
    /// Scales are float, rounded up to powers of two.
    Fp8Pow2 = 2,
    /// Scales are the exponents of these, a byte each.
    Fp8Ue8m0 = 3,
}

/// Arguments of symmpool_dispatch; those that are not needed are 0 or NULL. All addresses are on the pool's device.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DispatchInfo {
    /// The tokens, [tokens, hidden], of the buffer's type, or F8E4M3 if `quantized`. It begins at a multiple of 16.
    pub input: *const c_void,
    /// The scales of tokens that are quantised already, [tokens, scale_bytes].
    pub scales: *const c_void,
    /// For each token its top_k experts, [tokens, top_k]; -1 stands for none. Not needed if `known`.
    pub ids: *const c_void,
    /// The weights of these, or NULL for 1. They travel with the rows.
    pub weights: *const f32,
    /// Where rows by expert are written; it begins at a multiple of 16. Not needed in layout BY_RANK.
    pub output: *mut c_void,
    /// Where their scales are written.
    pub output_scales: *mut c_void,
    /// Rows that `output` and `output_scales` have room for; in layout PACKED those of each expert.
    pub output_rows: usize,
    /// How many tokens this rank has.
    pub tokens: usize,
    /// Bytes of the scales of a token that is quantised already: at most 4 for each 128 channels.
    pub scale_bytes: usize,
    /// A symmpool_dtype, I32 or I64.
    pub ids_dtype: u32,
    /// A symmpool_quantize.
    pub quantize: u32,
    /// A symmpool_experts_layout.
    pub layout: u32,
    /// Divisor of the number of each expert's first row in layout BY_EXPERT: 1 to 65536; 0 for 1.
    pub alignment: u32,
    /// Whether tokens are quantised already.
    pub quantized: bool,
    /// Whether tokens go where those of the handle's dispatch went, in the same layout. Ids and weights are not sent.
    pub known: bool,
}

/// How many rows a rank receives in a dispatch.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DispatchSizes {
    /// Tokens that it received and has room for: a row each in layout BY_RANK.
    pub rows: usize,
    /// Rows by expert, with padding between experts; 0 in layout BY_RANK.
    pub rows_by_expert: usize,
}

/// Arguments of symmpool_combine.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CombineInfo {
    /// Rows of experts, of the buffer's type, which lie as those of the dispatch did. It begins at a multiple of 16, and is
    /// not NULL even if there are none.
    pub input: *const c_void,
    /// Where the sums are written, [tokens, hidden]. It begins at a multiple of 16, and does not overlap `input`.
    pub output: *mut c_void,
    /// Factors of the rows in layouts by expert, [tokens, top_k], on the rank of the tokens; NULL for the weights of
    /// the dispatch.
    pub weights: *const f32,
    /// How many tokens this rank had in the dispatch.
    pub tokens: usize,
    /// The symmpool_experts_layout of the dispatch.
    pub layout: u32,
}

fn find(experts: symmpool_experts) -> Result<Arc<SharedBuffer>> {
    BUFFERS.get(experts)
}

fn invalid(why: impl Into<String>) -> Error {
    Error::invalid_argument(why.into())
}

/// Reads what a caller describes.
///
/// # Safety
///
/// `pointer` is NULL, which is refused, or can be read.
unsafe fn read<T: Copy>(pointer: *const T, name: &str) -> Result<T> {
    if pointer.is_null() || !pointer.is_aligned() {
        return Err(invalid(format!("{name} is {pointer:p}")));
    }
    // SAFETY: not NULL, so readable, which the caller promised.
    Ok(unsafe { pointer.read() })
}

impl ExpertsShape {
    fn parse(&self) -> Result<ExpertShape> {
        Ok(ExpertShape {
            hidden: self.hidden,
            experts: self.experts,
            top_k: self.top_k,
            max_tokens: self.max_tokens,
            dtype: dtype(self.dtype)?,
            capacity: (self.capacity > 0).then_some(self.capacity),
        })
    }
}

fn by_expert(layout: u32) -> Result<bool> {
    match layout {
        0 => Ok(false),
        1 | 2 => Ok(true),
        _ => Err(invalid(format!("layout: {layout} is no layout of rows"))),
    }
}

impl DispatchInfo {
    fn parse(&self) -> Result<DispatchAt> {
        let quantize = ExpertQuantization::ALL.get(self.quantize as usize).copied();
        let quantize = quantize
            .ok_or_else(|| invalid(format!("quantize: {} is none of those", self.quantize)))?;
        let scaled = quantize != ExpertQuantization::None || self.scale_bytes > 0;
        let (output, scales) = (self.output.cast::<u8>(), self.output_scales.cast::<u8>());
        if by_expert(self.layout)? && scaled && scales.is_null() && self.output_rows > 0 {
            return Err(invalid("output_scales is NULL, and rows have scales"));
        }
        let layout = match self.layout {
            0 => ExpertLayout::ByRank,
            1 => {
                let (capacity, alignment) = (self.output_rows, self.alignment.max(1));
                ExpertLayout::ByExpert { output, scales, capacity, alignment }
            }
            _ => ExpertLayout::Packed { output, scales, rows: self.output_rows },
        };
        Ok(DispatchAt {
            input: self.input.cast(),
            quantized: self.quantized,
            scales: self.scales.cast(),
            scale_bytes: self.scale_bytes,
            // Scales have the form that dispatch gives them: an exponent is a byte, and any other scale has four.
            scale_dtype: if self.scale_bytes.is_multiple_of(4) { DType::F32 } else { DType::U8 },
            tokens: self.tokens,
            ids: self.ids.cast(),
            // Ids that are not read have no type.
            ids_dtype: if self.known { DType::I32 } else { dtype(self.ids_dtype)? },
            weights: self.weights,
            quantize,
            layout,
            known: self.known,
            more: 0,
        })
    }
}

impl CombineInfo {
    fn parse(&self, shape: &ExpertShape) -> Result<CombineAt> {
        let (input, output) = (self.input as usize, self.output as usize);
        let bytes = self.tokens.saturating_mul(shape.hidden * shape.dtype.size());
        // How many rows the input has is on the device, so only its beginning can be compared.
        if bytes > 0 && (output..output.saturating_add(bytes)).contains(&input) {
            return Err(invalid("output overlaps input"));
        }
        if self.input.is_null() {
            return Err(invalid("input is NULL"));
        }
        Ok(CombineAt {
            input: self.input.cast(),
            // The caller promises that it has all rows that were received.
            input_rows: usize::MAX,
            output: self.output.cast(),
            tokens: self.tokens,
            weights: self.weights,
            by_expert: by_expert(self.layout)?,
            more: 0,
        })
    }
}

/// Makes a call. If this rank's arguments are refused, the other ranks get an error instead of waiting.
fn call<A>(
    experts: symmpool_experts,
    stream: *mut c_void,
    arguments: impl FnOnce(&SharedBuffer) -> Result<A>,
    run: impl FnOnce(&SharedBuffer, A, &Stream) -> Result<()>,
) -> Status {
    status(|| {
        let buffer = find(experts)?;
        // SAFETY: the caller of every call promises this.
        let stream = unsafe { on(stream) };
        match arguments(&buffer) {
            Ok(arguments) => run(&buffer, arguments, &stream),
            Err(why) => {
                let comm = buffer.communicator();
                let why = invalid(format!("experts on rank {}: {why}", comm.rank()));
                Err(comm.decline(why, &stream))
            }
        }
    })
}

/// The bytes of symmetric memory that a buffer for experts of this shape has on each of `world` ranks, before there is
/// one.
///
/// # Safety
///
/// `shape` is NULL (an error) or can be read, and `bytes` is NULL (an error) or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmpool_experts_bytes(
    shape: *const ExpertsShape,
    world: u32,
    bytes: *mut usize,
) -> Status {
    status(|| {
        // SAFETY: the caller promised that `shape` is NULL or can be read.
        let shape = unsafe { read(shape, "shape") }?.parse()?;
        // SAFETY: the caller promised that `bytes` is NULL or can be written to.
        let out = unsafe { Out::new(bytes, "bytes") }?;
        if world == 0 {
            return Err(invalid("world: there is one rank or more"));
        }
        out.put(SharedBuffer::region_bytes(shape, 0, world)?);
        Ok(())
    })
}

/// Creates a buffer for experts on a communicator (docs/experts.md). It allocates memory of the pool: every rank creates
/// its buffers, with the same shapes, at the same place of its sequence of allocations, and none while a graph is
/// captured. On CUDA it compiles kernels and waits for what runs; commit the pool before a capture. Errors:
/// INVALID_ARGUMENT for an impossible shape, which the text names, OUT_OF_MEMORY, UNSUPPORTED. They are this rank's
/// alone: ranks whose buffers differ get DIVERGED from their next call.
///
/// # Safety
///
/// `shape` is NULL (an error) or can be read, and `experts` is NULL (an error) or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmpool_experts_create(
    comm: symmpool_comm,
    shape: *const ExpertsShape,
    experts: *mut symmpool_experts,
) -> Status {
    status(|| {
        let comm = comm::find(comm)?;
        // SAFETY: the caller promised that `shape` is NULL or can be read.
        let shape = unsafe { read(shape, "shape") }?;
        // SAFETY: the caller promised that `experts` is NULL or can be written to.
        let out = unsafe { Out::new(experts, "experts") }?;
        let num_sms = (shape.num_sms > 0).then_some(shape.num_sms);
        out.put(BUFFERS.insert(SharedBuffer::new(comm, shape.parse()?, num_sms)?));
        Ok(())
    })
}

/// Destroys a buffer for experts. It waits for nothing: the commit by which its memory returns waits for the device. Graphs
/// that captured its calls must not run again. Ranks may do so at any time, without agreement.
#[unsafe(no_mangle)]
pub extern "C" fn symmpool_experts_destroy(experts: symmpool_experts) -> Status {
    status(|| BUFFERS.remove(experts))
}

/// Has kernels of later calls take at most so many SMs, 2 or more, or what is best if `num_sms` is 0. Captured calls keep
/// what they were captured with.
#[unsafe(no_mangle)]
pub extern "C" fn symmpool_experts_set_num_sms(experts: symmpool_experts, num_sms: u32) -> Status {
    status(|| find(experts)?.set_num_sms((num_sms > 0).then_some(num_sms)))
}

/// The bytes that a buffer for experts has on this rank, by part.
///
/// # Safety
///
/// `memory` is NULL (an error) or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmpool_experts_memory(
    experts: symmpool_experts,
    memory: *mut ExpertsMemory,
) -> Status {
    status(|| {
        let buffer = find(experts)?;
        // SAFETY: the caller promised that `memory` is NULL or can be written to.
        let out = unsafe { Out::new(memory, "memory") }?;
        let [received_rows, received_scales, routing, combined_rows] =
            buffer.memory().map(|(_, bytes)| bytes);
        out.put(ExpertsMemory {
            received_rows,
            received_scales,
            routing,
            combined_rows,
            total: received_rows + received_scales + routing + combined_rows,
            handle: buffer.handle_parts().bytes,
        });
        Ok(())
    })
}

/// Where a buffer's received rows lie in layout BY_RANK. It stays the same as long as the buffer lives.
///
/// # Safety
///
/// `received` is NULL (an error) or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmpool_experts_received(
    experts: symmpool_experts,
    received: *mut ExpertsReceived,
) -> Status {
    status(|| {
        let buffer = find(experts)?;
        // SAFETY: the caller promised that `received` is NULL or can be written to.
        let out = unsafe { Out::new(received, "received") }?;
        let parts = buffer.received();
        out.put(ExpertsReceived {
            rows: parts.rows.cast(),
            scales: parts.scales.cast(),
            ids: parts.ids,
            weights: parts.weights,
            capacity: buffer.capacity(false, 1),
        });
        Ok(())
    })
}

/// Where things lie in a handle of a buffer, and how long it is.
///
/// # Safety
///
/// `handle` is NULL (an error) or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmpool_experts_handle(
    experts: symmpool_experts,
    handle: *mut ExpertsHandle,
) -> Status {
    status(|| {
        let buffer = find(experts)?;
        // SAFETY: the caller promised that `handle` is NULL or can be written to.
        let out = unsafe { Out::new(handle, "handle") }?;
        let parts = buffer.handle_parts();
        out.put(ExpertsHandle {
            bytes: parts.bytes,
            head: parts.head,
            source_offsets: parts.source_offsets,
            source_index: parts.tokens,
            expert_counts: parts.expert_counts,
            expert_offsets: parts.expert_offsets,
            places: parts.places,
            weights: parts.weights,
        });
        Ok(())
    })
}

/// The most rows that this rank can receive in layout BY_EXPERT with such an alignment (0 for 1): what `output` needs room
/// for so that none is ever missing.
///
/// # Safety
///
/// `rows` is NULL (an error) or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmpool_experts_rows_by_expert(
    experts: symmpool_experts,
    alignment: u32,
    rows: *mut usize,
) -> Status {
    status(|| {
        let buffer = find(experts)?;
        // SAFETY: the caller promised that `rows` is NULL or can be written to.
        let out = unsafe { Out::new(rows, "rows") }?;
        out.put(buffer.capacity(true, alignment.max(1)));
        Ok(())
    })
}

/// Sends tokens to the ranks of their experts, and keeps in `handle`, memory of the caller, how they were routed. Every
/// rank calls it in the same order as its other calls, with tokens or without, in the same layout. On CUDA the call only
/// enqueues work on `stream`; tokens, ids and weights are read when it runs, so that each replay of a captured graph
/// routes anew. Errors, besides those of symmpool_all_reduce: INVALID_ARGUMENT on every rank for an id that is neither an
/// expert nor -1, which the text names with its rank and token and which counts as -1; OVERFLOW on every rank if one has
/// no room for all rows it is sent, the last of which are not written. On CUDA both come from symmpool_comm_synchronize,
/// and after both the communicator stays usable.
///
/// # Safety
///
/// Memory that `dispatch` names can be read and written for its lengths by the CPU or, on CUDA, the device, and
/// nobody else accesses it until the work is done. `dispatch` is NULL (an error) or can be read. `handle` can be
/// written to for the bytes that symmpool_experts_handle says; if `dispatch` has `known`, a dispatch of this buffer
/// with as many tokens wrote it. `stream` as for symmpool_all_reduce.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmpool_dispatch(
    experts: symmpool_experts,
    handle: *mut c_void,
    dispatch: *const DispatchInfo,
    stream: *mut c_void,
) -> Status {
    // SAFETY: the caller promised that `dispatch` is NULL or can be read.
    let arguments = |_: &SharedBuffer| unsafe { read(dispatch, "dispatch") }?.parse();
    call(experts, stream, arguments, |buffer, dispatch, stream| {
        // SAFETY: the caller promised memory of these lengths, and where `known` a handle of this buffer, until the end.
        unsafe { buffer.dispatch_at(handle.cast(), &dispatch, stream) }
    })
}

/// Dispatches like symmpool_dispatch of a new routing, and waits until it is known how many rows this rank receives;
/// on CUDA they may still be on their way then, and what `stream` is given next finds them there. `expert_counts`
/// gets how many rows each expert of this rank was sent, with those that had no room, and may be NULL. Errors are
/// those of symmpool_dispatch and, on CUDA, of symmpool_comm_synchronize; INVALID_ARGUMENT also where `dispatch` has
/// `known`, and INVALID_STATE while `stream` is captured. Nothing is written to `sizes` and `expert_counts` then.
///
/// # Safety
///
/// You must keep the promises of symmpool_dispatch. `sizes` is NULL (an error) or can be written to, and
/// `expert_counts` is NULL or has room for a number for each expert of this rank.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmpool_dispatch_exact(
    experts: symmpool_experts,
    handle: *mut c_void,
    dispatch: *const DispatchInfo,
    sizes: *mut DispatchSizes,
    expert_counts: *mut usize,
    stream: *mut c_void,
) -> Status {
    let arguments = |_: &SharedBuffer| {
        // SAFETY: the caller promised that `dispatch` is NULL or can be read.
        let dispatch = unsafe { read(dispatch, "dispatch") }?.parse()?;
        // SAFETY: the caller promised that `sizes` is NULL or can be written to.
        let sizes = unsafe { Out::new(sizes, "sizes") }?;
        if !expert_counts.is_aligned() {
            return Err(invalid(format!("expert_counts is {expert_counts:p}")));
        }
        Ok((dispatch, sizes))
    };
    call(experts, stream, arguments, |buffer, (dispatch, sizes), stream| {
        // SAFETY: the caller promised memory of these lengths until the work is done, and a handle's bytes at `handle`.
        let found = unsafe { buffer.dispatch_exact_at(handle.cast(), &dispatch, stream) }?;
        sizes.put(DispatchSizes { rows: found.rows, rows_by_expert: found.rows_by_expert });
        if !expert_counts.is_null() {
            let counts = &found.expert_counts;
            // SAFETY: there is room for a number for each expert of this rank, which the caller promised.
            unsafe { counts.as_ptr().copy_to_nonoverlapping(expert_counts, counts.len()) };
        }
        Ok(())
    })
}

/// Sends rows back to the ranks of their tokens, and sums up the rows of each token in float, in the order of ranks. A
/// token without rows becomes zeros. Rows by expert are multiplied by weights and summed up on their rank first, in the
/// order of the token's ids; that sum travels rounded to the buffer's type. Otherwise as symmpool_dispatch.
///
/// # Safety
///
/// You must keep the promises of symmpool_dispatch. `handle` is one that a dispatch of this buffer wrote, in the
/// layout and for as many tokens as `combine` says, and `input` has all rows that were received then.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmpool_combine(
    experts: symmpool_experts,
    handle: *mut c_void,
    combine: *const CombineInfo,
    stream: *mut c_void,
) -> Status {
    let arguments =
        // SAFETY: the caller promised that `combine` is NULL or can be read.
        |buffer: &SharedBuffer| unsafe { read(combine, "combine") }?.parse(&buffer.shape());
    call(experts, stream, arguments, |buffer, combine, stream| {
        // SAFETY: the caller promised that a dispatch of this buffer wrote `handle`, and that the input has its rows.
        unsafe { buffer.combine_at(handle.cast(), &combine, stream) }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_quantization_has_its_number() {
        let ours = [Quantize::None, Quantize::Fp8, Quantize::Fp8Pow2, Quantize::Fp8Ue8m0];
        for (ours, theirs) in ours.into_iter().zip(ExpertQuantization::ALL) {
            assert_eq!(ours as u32, theirs as u32);
        }
    }
}
