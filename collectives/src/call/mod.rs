//! The call description: what a rank calls, in the four words that travel with its handshake signal (rule S6). Devices
//! compare the words, host memory their digest.
//!
//! | module | holds |
//! | --- | --- |
//! | `operation` | the operations by number |
//! | `arguments` | a call as one value, on its way from a communicator's door to the engine |
//! | `text`, `mismatch` | descriptions in words, and the errors of ranks that differ |
//! | `plan_call` | calls of plans: what both engines check |
//! | `splits` | all-to-alls whose counts lie in memory |
//! | `rehearsal` | what a rehearsal of a call leaves out and finds |
//! | `p2p` | point-to-point messages: what their two ends compare |
//! | `norm`, `norm_output` | all-reduces with a residual and a norm |
//! | `matmul` | fused matmuls |
//! | `experts` | dispatch to experts, and combine |

mod arguments;
pub(crate) mod experts;
pub(crate) mod matmul;
mod mismatch;
pub(crate) mod norm;
pub(crate) mod norm_output;
pub(crate) mod operation;
pub(crate) mod p2p;
pub(crate) mod plan_call;
pub(crate) mod rehearsal;
pub(crate) mod splits;
mod text;

pub(crate) use self::arguments::{Arguments, StandardCall};
use self::experts::{ExpertMode, ExpertShape};
pub(crate) use self::mismatch::{mismatch, mismatch_of_first_large, mismatch_of_two, rank_list};
pub(crate) use self::operation::OpType;
use crate::algorithm::AlgorithmId;
use crate::signal::DESCRIPTION_WORDS;
use crate::types::place::Place;
use crate::{DType, MatmulShape, ReduceOp};

const INPUT_WINDOW: u64 = 1 << 32;
const OUTPUT_WINDOW: u64 = 1 << 33;
const IN_PLACE: u64 = 1 << 34;
/// Ranks take memory before the call, which they describe again without this.
const GROWS: u64 = 1 << 35;
/// Where the number of a piece of a call lies, in two parts of four and three bits: nothing else has them. Numbers of more
/// bits go round.
const PIECE_SHIFTS: [u32; 2] = [36, 60];
const PIECE: u64 = 0xf << PIECE_SHIFTS[0] | 0x7 << PIECE_SHIFTS[1];
/// The call's data goes by the memory for large calls.
const LARGE_AREA: u64 = 1 << 63;
/// The bits of the mode of a call of experts that fit between root and the piece's number. The others lie behind its shape.
const MODE_HEAD: u64 = 0xf_ffff;
/// The bit of the output's word at which the number of peer blocks begins. Offsets are smaller.
const PEER_BLOCKS_SHIFT: u32 = 48;
const OFFSET: u64 = (1 << PEER_BLOCKS_SHIFT) - 1;
/// The number of a registered algorithm, whose hash is in the highest bits of the count and of the input's offset.
const REGISTERED: u8 = 255;

/// Properties of a fused all-reduce that ranks compare besides its type and number of elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct NormFields {
    pub(crate) hidden: u32,
    pub(crate) epsilon: f32,
    pub(crate) weight_bias: f32,
    /// The number of a [`NormOutput`](crate::NormOutput).
    pub(crate) output: u8,
    pub(crate) residual: bool,
    pub(crate) bias: bool,
    pub(crate) powers_of_two: bool,
    pub(crate) algorithm: u8,
}

/// Everything that ranks must agree on before data is accessed, packed. A kernel has these words in its `CallParams`.
///
/// Bits of word 0:
///
/// | bits | what |
/// | --- | --- |
/// | 0 to 7 | the operation ([`OpType`]) |
/// | 8 to 15 | the element type |
/// | 16 to 23 | the reduction |
/// | 24 to 31 | the algorithm's number, or `REGISTERED` |
/// | 32 to 35 | `INPUT_WINDOW`, `OUTPUT_WINDOW`, `IN_PLACE`, `GROWS` |
/// | 36 to 39 | the lowest bits of the piece's number |
/// | 40 to 59 | the root (`Group::MAX_WORLD` is 65,536), a norm's output and flags, a matmul's kind, or the lowest bits of the mode of experts |
/// | 60 to 62 | the other bits of the piece's number |
/// | 63 | `LARGE_AREA` |
///
/// The other words:
///
/// | operation | word 1 | word 2 | word 3 |
/// | --- | --- | --- | --- |
/// | collectives | elements | offset of the input | offset of the output, and peer blocks from bit 48 on |
/// | registered algorithms | the same, and from bit 48 on a half of the hash | the same, and the other half | the same |
/// | norms | elements | length of a row, bias of weights | epsilon |
/// | matmuls | rows | inner dimension, columns | the rest of the shape |
/// | experts | row length, experts, experts a token, the rest of the mode | tokens, capacity | the buffer's memory, or its SMs |
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CallDescription {
    words: [u64; DESCRIPTION_WORDS],
}

impl CallDescription {
    #[inline]
    pub(crate) fn new(operation: OpType) -> Self {
        Self { words: [operation as u64, 0, 0, 0] }
    }

    /// Describes `count` elements of a type; for operations with one count for each rank, the elements of one rank.
    #[inline]
    pub(crate) fn elements(mut self, dtype: DType, count: usize) -> Self {
        self.words[0] |= (dtype as u64) << 8;
        self.words[1] = count as u64;
        self
    }

    #[inline]
    pub(crate) fn reduce(mut self, op: ReduceOp) -> Self {
        self.words[0] |= (op as u64) << 16;
        self
    }

    /// Describes a fused all-reduce of `count` elements.
    pub(crate) fn norm((dtype, count): (DType, usize), fields: NormFields) -> Self {
        let NormFields { hidden, epsilon, weight_bias, output, .. } = fields;
        let flags = [fields.residual, fields.bias, fields.powers_of_two].map(u32::from);
        let root = u32::from(output) | flags[0] << 8 | flags[1] << 9 | flags[2] << 10;
        let call = Self::new(OpType::AllReduceNorm).elements(dtype, count).root(root);
        let mut call = call.algorithm_code(fields.algorithm);
        call.words[2] = u64::from(hidden) | u64::from(weight_bias.to_bits()) << 32;
        call.words[3] = u64::from(epsilon.to_bits());
        call
    }

    /// The fields of a fused all-reduce.
    fn norm_fields(&self) -> NormFields {
        let [head, _, row, epsilon] = self.words;
        let flag = |bit: u32| head >> (40 + bit) & 1 != 0;
        NormFields {
            hidden: row as u32,
            epsilon: f32::from_bits(epsilon as u32),
            weight_bias: f32::from_bits((row >> 32) as u32),
            output: (head >> 40) as u8,
            residual: flag(8),
            bias: flag(9),
            powers_of_two: flag(10),
            algorithm: (head >> 24) as u8,
        }
    }

    /// Describes a fused matmul.
    pub(crate) fn matmul(mut self, shape: &MatmulShape) -> Self {
        self.words[0] |= (shape.dtype as u64) << 8 | (shape.kind as u64) << 40;
        self.words[1] = shape.rows & OFFSET;
        self.words[2] = u64::from(shape.inner) | u64::from(shape.columns) << 32;
        self.words[3] = shape.rest;
        self
    }

    /// Describes the requested algorithm by its number ([`AlgorithmId`]: all-reduces have one set of numbers, and all other
    /// collectives another one); 0 is the automatic choice.
    #[inline]
    pub(crate) fn algorithm(self, id: AlgorithmId) -> Self {
        self.algorithm_code(id.code())
    }

    #[inline]
    fn algorithm_code(mut self, code: u8) -> Self {
        self.words[0] |= u64::from(code) << 24;
        self
    }

    /// Describes a registered algorithm by its hash. You must call this last, and for counts below 2^48.
    #[inline]
    pub(crate) fn registered(self, hash: u64) -> Self {
        let mut call = self.algorithm_code(REGISTERED);
        call.words[1] |= hash << PEER_BLOCKS_SHIFT;
        call.words[2] |= hash >> 16 << PEER_BLOCKS_SHIFT;
        call
    }

    /// The 32 bits of a registered algorithm's hash that are described.
    fn registered_hash(&self) -> Option<u64> {
        let parts = (self.words[1] >> PEER_BLOCKS_SHIFT, self.words[2] >> PEER_BLOCKS_SHIFT);
        ((self.words[0] >> 24) as u8 == REGISTERED).then_some(parts.1 << 16 | parts.0)
    }

    /// Describes that ranks take more memory for the communicator before they make the call.
    pub(crate) fn grows(mut self) -> Self {
        self.words[0] |= GROWS;
        self
    }

    /// Whether ranks take memory, and the call comes after that.
    pub(super) fn is_growth(&self) -> bool {
        self.words[0] & GROWS != 0
    }

    /// Description of a call without the parts that calls before which ranks take memory do not describe, and without
    /// those that follow from the memory that a call uses.
    pub(super) fn without_growth(&self) -> [u64; 2] {
        let not_described =
            GROWS | LARGE_AREA | INPUT_WINDOW | OUTPUT_WINDOW | IN_PLACE | 0xff << 24;
        [self.piece(0).words[0] & !not_described, self.words[1] & OFFSET]
    }

    #[inline]
    pub(crate) fn root(mut self, root: u32) -> Self {
        self.words[0] |= u64::from(root) << 40;
        self
    }

    /// Whether the call has no elements. Ranks may then have different places: an empty view of a tensor on one
    /// rank, and a tensor without memory on another.
    #[inline]
    fn is_empty(&self) -> bool {
        self.words[1] == 0
    }

    /// Describes where the input lies, unless there are no elements. You must call this after [`Self::elements`].
    #[inline]
    pub(crate) fn input(mut self, place: Place) -> Self {
        if let (Place::Window(offset), false) = (place, self.is_empty()) {
            self.words[0] |= INPUT_WINDOW;
            self.words[2] = offset;
        }
        self
    }

    #[inline]
    pub(crate) fn output(mut self, place: Place) -> Self {
        if let (Place::Window(offset), false) = (place, self.is_empty()) {
            self.words[0] |= OUTPUT_WINDOW;
            self.words[3] = offset;
        }
        self
    }

    #[inline]
    pub(crate) fn in_place(mut self, yes: bool) -> Self {
        if yes && !self.is_empty() {
            self.words[0] |= IN_PLACE;
        }
        self
    }

    /// Whether every rank's input is a window, and at one offset, as their calls are the same.
    pub(crate) fn has_input_window(&self) -> bool {
        self.words[0] & INPUT_WINDOW != 0
    }

    /// Whether every rank's call is in place.
    pub(crate) fn is_in_place(&self) -> bool {
        self.words[0] & IN_PLACE != 0
    }

    /// Describes a dispatch to experts, or a combine: what the buffer is made for, and how rows lie. You must call this before
    /// [`Self::output`], which describes the buffer's memory.
    #[inline]
    pub(crate) fn experts(mut self, shape: &ExpertShape, mode: ExpertMode) -> Self {
        let capacity = shape.capacity.unwrap_or(0) as u64;
        let rows = shape.max_tokens as u64 | capacity << 21;
        let mode = u64::from(mode.bits());
        self.words[0] |= (shape.dtype as u64) << 8 | (mode & MODE_HEAD) << 40;
        let fields = u64::from(shape.experts) << 24 | u64::from(shape.top_k) << 40;
        self.words[1] = shape.hidden as u64 | fields | (mode >> MODE_HEAD.count_ones()) << 48;
        self.words[2] = rows;
        self
    }

    /// Describes that ranks make a buffer for experts, with what they make it for.
    pub(crate) fn expert_buffer(shape: &ExpertShape, num_sms: u32, any_layout: bool) -> Self {
        // A buffer of any layout takes handles whose rows lie by expert.
        let mode = ExpertMode::of_bits(u32::from(any_layout));
        let mut call = Self::new(OpType::ExpertBuffer).experts(shape, mode);
        call.words[3] = u64::from(num_sms);
        call
    }

    /// The mode of a call of experts.
    fn expert_mode(&self) -> ExpertMode {
        let [head, shape, ..] = self.words;
        let mode = head >> 40 & MODE_HEAD | shape >> 48 << MODE_HEAD.count_ones();
        ExpertMode::of_bits(mode as u32)
    }

    /// Describes among how many peer blocks a device divides the call: blocks of one index on all ranks signal each
    /// other, so all ranks need the same number.
    #[inline]
    pub(crate) fn peer_blocks(mut self, blocks: u32) -> Self {
        self.words[3] = self.words[3] & OFFSET | u64::from(blocks) << PEER_BLOCKS_SHIFT;
        self
    }

    /// Describes which piece of the call this is, of those that a device makes one after the other. A rank that failed in the
    /// middle of a call, or divides it in another way, is found by it.
    #[inline]
    pub(crate) fn piece(mut self, nth: u32) -> Self {
        let [low, high] = PIECE_SHIFTS;
        let nth = u64::from(nth);
        self.words[0] = self.words[0] & !PIECE | (nth & 0xf) << low | (nth >> 4 & 0x7) << high;
        self
    }

    /// Describes whether the call's data goes by the memory for large calls.
    #[inline]
    pub(crate) fn in_large_area(mut self, yes: bool) -> Self {
        self.words[0] = self.words[0] & !LARGE_AREA | if yes { LARGE_AREA } else { 0 };
        self
    }

    fn is_in_large_area(&self) -> bool {
        self.words[0] & LARGE_AREA != 0
    }

    /// The number of the piece.
    fn piece_number(&self) -> u64 {
        let [low, high] = PIECE_SHIFTS.map(|shift| (self.words[0] & PIECE) >> shift & 0xf);
        low | high << 4
    }

    #[inline]
    pub(crate) fn words(&self) -> &[u64; DESCRIPTION_WORDS] {
        &self.words
    }

    pub(crate) fn from_words(words: [u64; DESCRIPTION_WORDS]) -> Self {
        Self { words }
    }

    pub(crate) fn operation(&self) -> Option<OpType> {
        OpType::from_code(self.words[0] as u8)
    }

    /// The description without what the rows of the traffic matrix say as well. So an all-to-all of equal parts has
    /// the description of one whose parts have any size.
    pub(crate) fn without_parts(mut self) -> Self {
        if self.operation() == Some(OpType::AllToAll) {
            self.words[0] = self.words[0] & !0xff | OpType::AllToAllV as u64;
            self.words[1] = 0;
        }
        self
    }

    fn is_all_to_all(&self) -> bool {
        matches!(self.operation(), Some(OpType::AllToAll | OpType::AllToAllV))
    }

    /// Whether the operation runs like an all-to-all, so that outputs may lie at different offsets.
    fn is_exchange(&self) -> bool {
        let more = matches!(self.operation(), Some(OpType::AllGather | OpType::Broadcast));
        more || self.is_all_to_all()
    }

    /// Whether copy engines carry the data. These are the only exchanges whose description has the output's offset.
    fn is_copied(&self) -> bool {
        self.is_exchange() && self.words[0] & OUTPUT_WINDOW != 0
    }

    /// A 32-bit hash of the description and of what else must be equal on all ranks (`salt`). Two different calls
    /// have the same digest once in four billion cases.
    #[inline]
    pub(crate) fn digest(&self, salt: u64) -> u32 {
        let mut hash = salt ^ 0x9e37_79b9_7f4a_7c15;
        for word in self.words {
            hash = (hash ^ word).wrapping_mul(0xff51_afd7_ed55_8ccd);
            hash ^= hash >> 32;
        }
        (hash ^ (hash >> 29)) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ExpertQuantization, NormOutput};

    /// Rule S6.
    #[test]
    fn every_field_changes_the_digest_and_reads_back() {
        let base =
            CallDescription::new(OpType::AllReduce).elements(DType::F32, 8).reduce(ReduceOp::Sum);
        let others = [
            CallDescription::new(OpType::ReduceScatter)
                .elements(DType::F32, 8)
                .reduce(ReduceOp::Sum),
            CallDescription::new(OpType::AllReduce).elements(DType::I32, 8).reduce(ReduceOp::Sum),
            CallDescription::new(OpType::AllReduce).elements(DType::F32, 9).reduce(ReduceOp::Sum),
            CallDescription::new(OpType::AllReduce).elements(DType::F32, 8).reduce(ReduceOp::Max),
            base.algorithm_code(1),
            base.root(1),
            base.input(Place::Window(0)),
            base.output(Place::Window(64)),
            base.in_place(true),
            base.peer_blocks(4),
            base.piece(1),
            base.piece(16),
            base.registered(0),
            base.registered(1),
            base.registered(1 << 31),
        ];
        for (i, call) in others.iter().enumerate() {
            assert_ne!(call.digest(0), base.digest(0), "field {i}");
            assert_ne!(call.to_string(), String::new());
        }
        assert_ne!(base.digest(0), base.digest(1));
        for piece in 0..300 {
            let call = base.root(7).algorithm_code(9).in_place(true).piece(piece);
            assert_eq!(call.piece_number(), u64::from(piece) & 0x7f);
            let large = call.in_large_area(true);
            assert!(large.is_in_large_area() && large.piece_number() == call.piece_number());
            assert_eq!(large.in_large_area(false), call);
            assert_eq!(call.piece(0), base.root(7).algorithm_code(9).in_place(true));
            assert_eq!(call.to_string(), call.piece(0).to_string(), "text has no pieces");
        }
        let shape = ExpertShape {
            hidden: 64,
            experts: 4,
            top_k: 2,
            max_tokens: 9,
            dtype: DType::F32,
            capacity: None,
        };
        for quantize in ExpertQuantization::ALL {
            let scales = ExpertMode { scale_bytes: 4, scale_dtype: 5, ..Default::default() };
            let mode = ExpertMode { more: 3, quantize, ..scales };
            let experts = CallDescription::new(OpType::ExpertDispatch).experts(&shape, mode);
            let read = experts.piece(1).expert_mode();
            assert_eq!(read, mode, "a piece's number leaves the mode as it is");
        }
        assert_eq!(CallDescription::from_words(*base.words()), base);
        assert_eq!(
            base.input(Place::Window(0x40)).to_string(),
            "all_reduce sum of 8 f32 from window offset 0x40 to ordinary memory"
        );
    }

    #[test]
    fn fused_calls_differ_in_each_field_and_read_back() {
        let usual = NormFields {
            hidden: 4096,
            epsilon: 1e-6,
            weight_bias: 0.0,
            output: NormOutput::Norm as u8,
            residual: true,
            bias: false,
            powers_of_two: false,
            algorithm: 1,
        };
        let call = |fields| CallDescription::norm((DType::Bf16, 7 * 4096), fields);
        let others = [
            NormFields { hidden: 8192, ..usual },
            NormFields { epsilon: 1e-5, ..usual },
            NormFields { weight_bias: 1.0, ..usual },
            NormFields { output: NormOutput::Fp8PerToken as u8, ..usual },
            NormFields { residual: false, ..usual },
            NormFields { bias: true, ..usual },
            NormFields { powers_of_two: true, ..usual },
            NormFields { algorithm: 2, ..usual },
        ];
        for fields in others {
            assert_ne!(call(fields).digest(0), call(usual).digest(0), "{fields:?}");
            assert_ne!(call(fields).to_string(), call(usual).to_string(), "{fields:?}");
            assert_eq!(call(fields).norm_fields(), fields);
            let text = mismatch_of_two(7, 0, &call(fields), 1, &call(usual)).to_string();
            assert!(text.contains("different collectives"), "{text}");
        }
        assert_eq!(
            call(usual).to_string(),
            "all_reduce_norm of 7 rows of 4096 bf16 to NORM, epsilon 0.000001, with a residual, by one_shot"
        );
    }
}
