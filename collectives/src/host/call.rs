//! The call description: what a rank calls, in the four words that travel with its handshake signal, and their
//! digest, which ranks compare (rule S6).

use std::cmp::Reverse;
use std::fmt;

use symmpool_allocator::Error;

pub(crate) use super::operation::Operation;
use super::place::Place;
use crate::algorithm::{AUTO, name_of};
use crate::experts::{ExpertMode, ExpertShape};
use crate::signal::DESCRIPTION_WORDS;
use crate::{DType, MatmulKind, MatmulShape, NormOutput, ReduceOp};

const INPUT_WINDOW: u64 = 1 << 32;
const OUTPUT_WINDOW: u64 = 1 << 33;
const IN_PLACE: u64 = 1 << 34;
/// The bit of the output's word at which the number of peer blocks begins. Offsets are smaller.
const PEER_BLOCKS_SHIFT: u32 = 48;
const OFFSET: u64 = (1 << PEER_BLOCKS_SHIFT) - 1;
/// The number of a registered algorithm, whose hash is in the highest bits of the count and of the input's offset.
const REGISTERED: u8 = 255;

/// What ranks compare of a fused all-reduce besides its type and number of elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct NormFields {
    pub(crate) hidden: u32,
    pub(crate) epsilon: f32,
    pub(crate) weight_bias: f32,
    /// The number of a [`NormOutput`].
    pub(crate) output: u8,
    pub(crate) residual: bool,
    pub(crate) bias: bool,
    pub(crate) powers_of_two: bool,
    pub(crate) algorithm: u8,
}

/// Everything that ranks must agree on before data is accessed, packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Call {
    words: [u64; DESCRIPTION_WORDS],
}

impl Call {
    #[inline]
    pub(crate) fn new(operation: Operation) -> Self {
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
        let call = Self::new(Operation::AllReduceNorm).elements(dtype, count).root(root);
        let mut call = call.algorithm(fields.algorithm);
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

    /// Describes a fused product of matrices.
    pub(crate) fn matmul(mut self, shape: &MatmulShape) -> Self {
        self.words[0] |= (shape.dtype as u64) << 8 | (shape.kind as u64) << 40;
        self.words[1] = shape.rows & OFFSET;
        self.words[2] = u64::from(shape.inner) | u64::from(shape.columns) << 32;
        self.words[3] = shape.rest;
        self
    }

    /// Describes the requested algorithm by its number, which is the operation's own; 0 is the automatic choice.
    #[inline]
    pub(crate) fn algorithm(mut self, code: u8) -> Self {
        self.words[0] |= u64::from(code) << 24;
        self
    }

    /// Describes a registered algorithm by its hash. To be called last, and for counts below 2^48.
    #[inline]
    pub(crate) fn registered(self, hash: u64) -> Self {
        let mut call = self.algorithm(REGISTERED);
        call.words[1] |= hash << PEER_BLOCKS_SHIFT;
        call.words[2] |= hash >> 16 << PEER_BLOCKS_SHIFT;
        call
    }

    /// The 32 bits of a registered algorithm's hash that are described.
    fn registered_hash(&self) -> Option<u64> {
        let parts = (self.words[1] >> PEER_BLOCKS_SHIFT, self.words[2] >> PEER_BLOCKS_SHIFT);
        ((self.words[0] >> 24) as u8 == REGISTERED).then_some(parts.1 << 16 | parts.0)
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

    /// Describes where the input lies, unless there are no elements. To be called after [`Self::elements`].
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

    /// Describes a dispatch to experts, or a combine: what the buffer is made for, and how rows lie. To be called before
    /// [`Self::output`], which describes the buffer's memory.
    #[inline]
    pub(crate) fn experts(mut self, shape: &ExpertShape, mode: ExpertMode) -> Self {
        let capacity = shape.capacity.unwrap_or(0) as u64;
        let rows = shape.max_tokens as u64 | capacity << 21;
        self.words[0] |= (shape.dtype as u64) << 8 | u64::from(mode.bits()) << 40;
        self.words[1] =
            shape.hidden as u64 | u64::from(shape.experts) << 24 | u64::from(shape.top_k) << 40;
        self.words[2] = rows;
        self
    }

    /// Describes among how many peer blocks a device divides the call: blocks of one index on all ranks signal each
    /// other, so all ranks need the same number.
    #[inline]
    pub(crate) fn peer_blocks(mut self, blocks: u32) -> Self {
        self.words[3] = self.words[3] & OFFSET | u64::from(blocks) << PEER_BLOCKS_SHIFT;
        self
    }

    #[inline]
    pub(crate) fn words(&self) -> &[u64; DESCRIPTION_WORDS] {
        &self.words
    }

    pub(crate) fn from_words(words: [u64; DESCRIPTION_WORDS]) -> Self {
        Self { words }
    }

    pub(crate) fn operation(&self) -> Option<Operation> {
        Operation::from_code(self.words[0] as u8)
    }

    /// The description without what the rows of the traffic matrix say as well. So an all-to-all of equal parts has
    /// the description of one whose parts have any size.
    pub(crate) fn without_parts(mut self) -> Self {
        if self.operation() == Some(Operation::AllToAll) {
            self.words[0] = self.words[0] & !0xff | Operation::AllToAllV as u64;
            self.words[1] = 0;
        }
        self
    }

    fn is_all_to_all(&self) -> bool {
        matches!(self.operation(), Some(Operation::AllToAll | Operation::AllToAllV))
    }

    /// Whether the operation runs like an all-to-all, so that outputs may lie at different offsets.
    fn is_exchange(&self) -> bool {
        let more = matches!(self.operation(), Some(Operation::AllGather | Operation::Broadcast));
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

impl Call {
    /// What follows the name and the type of a dispatch to experts or a combine.
    fn fmt_experts(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [head, shape, rows, output] = self.words;
        let (hidden, experts, top_k) =
            (shape & 0xff_ffff, shape >> 24 & 0xffff, shape >> 40 & 0xff);
        let (max_tokens, capacity) = (rows & 0x1f_ffff, rows >> 21);
        write!(f, ", hidden {hidden}, {experts} experts, top_k {top_k}, max_tokens {max_tokens}")?;
        if capacity > 0 {
            write!(f, ", capacity {capacity}")?;
        }
        write!(f, ", {}", ExpertMode::of_bits((head >> 40) as u32))?;
        write!(f, ", in a buffer at window offset {:#x}", output & OFFSET)
    }
}

impl Call {
    /// A fused product of matrices in words.
    fn fmt_matmul(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [head, rows, row, rest] = self.words;
        let name = MatmulKind::from_code((head >> 40) as u8).map_or("?", MatmulKind::name);
        let dtype = DType::from_code((head >> 8) as u8).map_or("?", DType::name);
        let (inner, columns) = (row as u32, row >> 32);
        match (inner, columns) {
            (0, _) => write!(f, "{name} of a product of {rows} x {columns} {dtype}")?,
            _ => write!(f, "{name} of a shard of {rows} x {inner} {dtype}")?,
        }
        write!(f, ", whose other arguments have the hash {rest:016x}")
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [head, count, input, output] = self.words;
        let (count, input, output) = (count & OFFSET, input & OFFSET, output & OFFSET);
        let Some(operation) = self.operation() else {
            return write!(f, "an operation this version does not know ({:#x})", head as u8);
        };
        if operation == Operation::FusedMatmul {
            return self.fmt_matmul(f);
        }
        f.write_str(operation.name())?;
        if matches!(operation, Operation::Declined | Operation::Barrier) {
            return Ok(());
        }
        if operation == Operation::AllReduceNorm {
            let (dtype, fields) = (DType::from_code((head >> 8) as u8), self.norm_fields());
            let rows = self.words[1].checked_div(fields.hidden.into()).unwrap_or(0);
            let made = NormOutput::from_code(fields.output).map_or("?", NormOutput::name);
            let dtype = dtype.map_or("?", DType::name);
            write!(
                f,
                " of {rows} rows of {} {dtype} to {made}, epsilon {}",
                fields.hidden, fields.epsilon
            )?;
            for (given, name) in [
                (fields.residual, "a residual"),
                (fields.bias, "a bias"),
                (fields.powers_of_two, "scales that are powers of two"),
            ] {
                if given {
                    write!(f, ", with {name}")?;
                }
            }
            if fields.weight_bias != 0.0 {
                write!(f, ", {} added to weights", fields.weight_bias)?;
            }
            return match fields.algorithm {
                1 => write!(f, ", by one_shot"),
                2 => write!(f, ", by two_shot"),
                _ => Ok(()),
            };
        }
        if let Some(op) = ReduceOp::from_code((head >> 16) as u8) {
            write!(f, " {}", op.name())?;
        }
        if let Some(dtype) = DType::from_code((head >> 8) as u8) {
            if operation == Operation::AllToAllV && count == 0 {
                write!(f, " of {}", dtype.name())?;
            } else if operation == Operation::AllToAllV {
                write!(f, " of rows of {count} {}", dtype.name())?;
            } else if matches!(operation, Operation::ExpertDispatch | Operation::ExpertCombine) {
                write!(f, " of {}", dtype.name())?;
            } else {
                write!(f, " of {count} {}", dtype.name())?;
            }
        }
        if matches!(operation, Operation::ExpertDispatch | Operation::ExpertCombine) {
            return self.fmt_experts(f);
        }
        if operation == Operation::Broadcast {
            write!(f, " from rank {}", head >> 40)?;
        }
        let (from_window, to_window) = (head & INPUT_WINDOW != 0, head & OUTPUT_WINDOW != 0);
        let place = |window: bool, offset: u64| {
            if window { format!("window offset {offset:#x}") } else { "ordinary memory".to_owned() }
        };
        if head & IN_PLACE != 0 {
            write!(f, " in place at {}", place(from_window || to_window, input.max(output)))?;
        } else if operation == Operation::ReduceScatter {
            // Outputs are not described, as they may differ.
            write!(f, " from {}", place(from_window, input))?;
        } else if !self.is_exchange() {
            write!(f, " from {} to {}", place(from_window, input), place(to_window, output))?;
        } else {
            for (word, window, offset) in [("from", from_window, input), ("to", to_window, output)]
            {
                if window {
                    write!(f, " {word} {}", place(window, offset))?;
                }
            }
        }
        if let Some(hash) = self.registered_hash() {
            return write!(f, ", by a registered algorithm of hash {hash:08x}");
        }
        let code = (head >> 24) as u8;
        match operation.standard().and_then(|collective| name_of(collective, code)) {
            _ if code == AUTO => Ok(()),
            Some(name) => write!(f, ", by {name}"),
            None => write!(f, ", by algorithm {code}"),
        }
    }
}

/// The error for ranks that made different calls. It says which ranks made which call; every rank makes the same
/// error from the same calls.
pub(crate) fn mismatch(number: u64, calls: &[Call]) -> Error {
    let mut groups: Vec<(Call, Vec<u32>)> = Vec::new();
    for (rank, call) in (0u32..).zip(calls) {
        match groups.iter_mut().find(|(seen, _)| seen == call) {
            Some((_, ranks)) => ranks.push(rank),
            None => groups.push((*call, vec![rank])),
        }
    }
    if groups.len() == 1 {
        return Error::mismatch(format!(
            "ranks made the same call ({}) as call {number}, but through communicators with \
             different options, or of different versions of symmpool; build them with the same \
             options of the same version on every rank",
            calls[0]
        ));
    }
    let mut message = format!("ranks entered different collectives as call {number}:");
    for (call, ranks) in &groups {
        message.push_str(&format!("\n  {}: {call}", rank_list(ranks)));
    }
    message.push_str(
        "\nNothing was written and the communicator stays usable; every rank must make the same \
         call with the same arguments.",
    );
    Error::mismatch(message).naming(ranks_at_fault(&groups))
}

/// The ranks to blame: those that refused the call, if there are such, else those that are not in the largest group.
/// Of equally large groups, the one with the lowest rank counts as the largest.
fn ranks_at_fault(groups: &[(Call, Vec<u32>)]) -> Vec<u32> {
    let refused = |(call, _): &&(Call, Vec<u32>)| call.operation() == Some(Operation::Declined);
    if let Some((_, ranks)) = groups.iter().find(refused) {
        return ranks.clone();
    }
    let usual = groups.iter().max_by_key(|(_, ranks)| (ranks.len(), Reverse(ranks[0])));
    groups
        .iter()
        .filter(|group| Some(*group) != usual)
        .flat_map(|(_, ranks)| ranks.clone())
        .collect()
}

/// The error of a rank on a device, which has compared its call with that of one peer only.
pub(crate) fn mismatch_of_two(
    number: u64,
    rank: u32,
    ours: &Call,
    peer: u32,
    theirs: &Call,
) -> Error {
    let mut both = [(rank, ours), (peer, theirs)];
    both.sort_by_key(|(rank, _)| *rank);
    if ours.peer_blocks(0) == theirs.peer_blocks(0) {
        let [(low, mine), (high, other)] =
            both.map(|(rank, call)| (rank, call.words[3] >> PEER_BLOCKS_SHIFT));
        if mine == 0 || other == 0 {
            let cut = if mine == 0 { high } else { low };
            return Error::mismatch(format!(
                "ranks made the same call ({ours}) as call {number}, but on rank {cut} alone it goes by copy engines in \
                 pieces. All ranks need the same CUDA_DEVICE_MAX_CONNECTIONS, the same option beside_compute of the \
                 communicator, and buffers in the same kind of memory. The communicator is closed."
            ))
            .naming([rank, peer]);
        }
        return Error::mismatch(format!(
            "ranks made the same call ({ours}) as call {number}, but the device of rank {low} divides it \
             among {mine} blocks and that of rank {high} among {other}. All ranks need devices with the same \
             number of SMs, the same share of them left to the process (MPS), and kernels compiled by the \
             same NVRTC; for native kernels also the same SM budget, or a grid that all have room for. The \
             communicator is closed."
        ))
        .naming([rank, peer]);
    }
    let mut message = format!("ranks entered different collectives as call {number}:");
    for (rank, call) in both {
        message.push_str(&format!("\n  rank {rank}: {call}"));
    }
    let alike = ours.without_parts().operation() == theirs.without_parts().operation();
    if alike && (ours.is_copied() || theirs.is_copied()) {
        message.push_str(
            "\nCopy engines write large equal parts into outputs that are windows, and these must lie at the \
             same offset on all ranks: allocate outputs in the same order on every rank, as with \
             pool.empty, or choose another algorithm for all-to-alls (all_to_all=\"direct\" of the \
             communicator, or SYMMPOOL_ALL_TO_ALL=direct).",
        );
    }
    message.push_str(
        "\nWhat that call should have written is undefined. The communicator is closed: make a new \
         one; every rank must make the same call with the same arguments.",
    );
    let refused = both.iter().filter(|(_, call)| call.operation() == Some(Operation::Declined));
    let refused: Vec<u32> = refused.map(|(rank, _)| *rank).collect();
    // It is not known what the other ranks called.
    Error::mismatch(message).naming(refused).naming([rank, peer])
}

/// `rank 3`, or `ranks 0-2, 5`.
pub(crate) fn rank_list(ranks: &[u32]) -> String {
    let mut parts: Vec<String> = Vec::new();
    for run in ranks.chunk_by(|a, b| a + 1 == *b) {
        match run {
            [one] => parts.push(one.to_string()),
            [first, .., last] => parts.push(format!("{first}-{last}")),
            [] => {}
        }
    }
    format!("rank{} {}", if ranks.len() == 1 { "" } else { "s" }, parts.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::AllToAllAlgorithm;

    /// Rule S6.
    #[test]
    fn every_field_changes_the_digest_and_reads_back() {
        let base = Call::new(Operation::AllReduce).elements(DType::F32, 8).reduce(ReduceOp::Sum);
        let others = [
            Call::new(Operation::ReduceScatter).elements(DType::F32, 8).reduce(ReduceOp::Sum),
            Call::new(Operation::AllReduce).elements(DType::I32, 8).reduce(ReduceOp::Sum),
            Call::new(Operation::AllReduce).elements(DType::F32, 9).reduce(ReduceOp::Sum),
            Call::new(Operation::AllReduce).elements(DType::F32, 8).reduce(ReduceOp::Max),
            base.algorithm(1),
            base.root(1),
            base.input(Place::Window(0)),
            base.output(Place::Window(64)),
            base.in_place(true),
            base.peer_blocks(4),
            base.registered(0),
            base.registered(1),
            base.registered(1 << 31),
        ];
        for (i, call) in others.iter().enumerate() {
            assert_ne!(call.digest(0), base.digest(0), "field {i}");
            assert_ne!(call.to_string(), String::new());
        }
        assert_ne!(base.digest(0), base.digest(1));
        assert_eq!(Call::from_words(*base.words()), base);
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
        let call = |fields| Call::norm((DType::Bf16, 7 * 4096), fields);
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

    #[test]
    fn mismatches_group_ranks_by_what_they_called() {
        let a = Call::new(Operation::Barrier);
        let b = Call::new(Operation::Broadcast).elements(DType::U8, 3).root(2);
        let text = mismatch(7, &[a, a, b, a]).to_string();
        assert!(text.contains("ranks 0-1, 3: barrier"), "{text}");
        assert!(text.contains("rank 2: broadcast of 3 u8 from rank 2"), "{text}");
        assert_eq!(mismatch(7, &[a, a, b, a]).ranks(), [2]);
        assert_eq!(
            mismatch(7, &[a, b]).ranks(),
            [1],
            "of two groups of one rank, the one with the lower rank counts as the larger"
        );
        let refused = Call::new(Operation::Declined);
        assert_eq!(mismatch(7, &[refused, refused, a]).ranks(), [0, 1]);
        assert_eq!(mismatch_of_two(7, 3, &a, 1, &b).ranks(), [1, 3]);
        assert_eq!(mismatch_of_two(7, 3, &refused, 1, &b).ranks(), [3]);
        assert!(mismatch(7, &[a, a]).to_string().contains("different options"));
    }

    #[test]
    fn different_grids_give_another_error_than_different_calls() {
        let call = Call::new(Operation::AllReduce).elements(DType::F32, 8).reduce(ReduceOp::Sum);
        let call = call.output(Place::Window(0x40));
        let (few, more) = (call.peer_blocks(17), call.peer_blocks(133));
        assert_eq!((few.to_string(), few.peer_blocks(0)), (call.to_string(), call));
        let text = mismatch_of_two(7, 3, &few, 1, &more).to_string();
        assert!(
            text.contains("rank 1 divides it among 133 blocks and that of rank 3 among 17"),
            "{text}"
        );
        let other = more.root(1);
        let text = mismatch_of_two(7, 3, &few, 1, &other).to_string();
        assert!(text.contains("different collectives"), "{text}");
    }

    #[test]
    fn outputs_that_copy_engines_cannot_reach_are_named_with_what_to_do() {
        let copied = |offset| {
            let call = Call::new(Operation::AllToAll).elements(DType::F32, 8);
            call.output(Place::Window(offset)).algorithm(AllToAllAlgorithm::Copy as u8)
        };
        let pushed = Call::new(Operation::AllToAllV).elements(DType::F32, 1);
        for (other, words) in
            [(copied(0x80), "window offset 0x80, by copy"), (pushed, "rows of 1 f32\n")]
        {
            let text = mismatch_of_two(7, 0, &copied(0x40), 1, &other).to_string();
            assert!(text.contains("rank 0: all_to_all of 8 f32 to window offset 0x40, by copy"));
            assert!(text.contains(words) && text.contains("pool.empty"), "{text}");
            assert!(text.contains("all_to_all=\"direct\""), "{text}");
        }
        let (barrier, other) = (Call::new(Operation::Barrier), pushed.elements(DType::F32, 2));
        for (one, another) in [(pushed, barrier), (pushed, other), (copied(0x40), barrier)] {
            let text = mismatch_of_two(7, 0, &one, 1, &another).to_string();
            assert!(!text.contains("pool.empty"), "{text}");
        }
    }
}
