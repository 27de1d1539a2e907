//! What a rank calls, in the four words that travel with its entry signal, and the digest of them
//! that ranks compare (rule S6).

use std::cmp::Reverse;
use std::fmt;

use symmpool_allocator::Error;

pub(crate) use super::operation::Operation;
use super::place::Place;
use crate::signal::DETAILS;
use crate::{AllToAllAlgorithm, DType, ReduceOp};

const INPUT_WINDOW: u64 = 1 << 32;
const OUTPUT_WINDOW: u64 = 1 << 33;
const IN_PLACE: u64 = 1 << 34;
/// Above offsets, beside the output's.
const TEAMS_AT: u32 = 48;
const OFFSET: u64 = (1 << TEAMS_AT) - 1;

/// Everything that ranks must agree on before data is touched, packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Call {
    words: [u64; DETAILS],
}

impl Call {
    #[inline]
    pub(crate) fn new(operation: Operation) -> Self {
        Self { words: [operation as u64, 0, 0, 0] }
    }

    /// `count` elements of a type: per rank where the operation has a count per rank.
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

    /// A forced algorithm, by an operation's own number; 0 is automatic.
    #[inline]
    pub(crate) fn algorithm(mut self, code: u8) -> Self {
        self.words[0] |= u64::from(code) << 24;
        self
    }

    #[inline]
    pub(crate) fn root(mut self, root: u32) -> Self {
        self.words[0] |= u64::from(root) << 40;
        self
    }

    /// Of no elements, which ranks may have in different places: one that is a view of something, and one
    /// that was made empty.
    #[inline]
    fn is_empty(&self) -> bool {
        self.words[1] == 0
    }

    /// Where what was said to be `elements` lies; nowhere, if these are none.
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

    /// Divided among so many teams of a device, of which those of one number work together on all ranks.
    #[inline]
    pub(crate) fn teams(mut self, teams: u32) -> Self {
        self.words[3] = self.words[3] & OFFSET | u64::from(teams) << TEAMS_AT;
        self
    }

    #[inline]
    pub(crate) fn words(&self) -> &[u64; DETAILS] {
        &self.words
    }

    pub(crate) fn from_words(words: [u64; DETAILS]) -> Self {
        Self { words }
    }

    pub(crate) fn operation(&self) -> Option<Operation> {
        Operation::from_code(self.words[0] as u8)
    }

    /// The same but for what rows of the traffic matrix say: an all-to-all of equal parts is one of
    /// parts of any size.
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

    /// Whether ranks send each other what goes as all-to-alls do, where outputs may lie anywhere.
    fn is_exchange(&self) -> bool {
        let more = matches!(self.operation(), Some(Operation::AllGather | Operation::Broadcast));
        more || self.is_all_to_all()
    }

    /// Whether copy engines carry it: the only exchange that says where its output is.
    fn is_copied(&self) -> bool {
        self.is_exchange() && self.words[0] & OUTPUT_WINDOW != 0
    }

    /// 32 bits over the call and over what must also be equal for it to work (`salt`). Different
    /// calls collide once in four billion.
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

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [head, count, input, output] = self.words;
        let output = output & OFFSET;
        let Some(operation) = self.operation() else {
            return write!(f, "an operation this version does not know ({:#x})", head as u8);
        };
        f.write_str(operation.name())?;
        if matches!(operation, Operation::Declined | Operation::Barrier) {
            return Ok(());
        }
        if let Some(op) = ReduceOp::from_code((head >> 16) as u8) {
            write!(f, " {}", op.name())?;
        }
        if let Some(dtype) = DType::from_code((head >> 8) as u8) {
            if operation == Operation::AllToAllV && count == 0 {
                write!(f, " of {}", dtype.name())?;
            } else if operation == Operation::AllToAllV {
                write!(f, " of rows of {count} {}", dtype.name())?;
            } else {
                write!(f, " of {count} {}", dtype.name())?;
            }
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
        let code = (head >> 24) as u8;
        let named = AllToAllAlgorithm::ALL.into_iter().find(|each| *each as u8 == code);
        match (code, named) {
            (0, _) => Ok(()),
            (_, Some(named)) if self.is_exchange() => write!(f, ", by {}", named.name()),
            _ => write!(f, ", by algorithm {code}"),
        }
    }
}

/// The error that every rank makes of the same calls: who called what.
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
        message.push_str(&format!("\n  {}: {call}", named(ranks)));
    }
    message.push_str(
        "\nNothing was written and the communicator stays usable; every rank must make the same \
         call with the same arguments.",
    );
    Error::mismatch(message).naming(at_fault(&groups))
}

/// Those that refused the call, if some did; else those that are not in the largest group, of equally large
/// ones that of the lowest rank.
fn at_fault(groups: &[(Call, Vec<u32>)]) -> Vec<u32> {
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

/// The error of a rank on a device, which has compared with one peer only: who called what.
pub(crate) fn mismatch_of_two(
    number: u64,
    rank: u32,
    ours: &Call,
    peer: u32,
    theirs: &Call,
) -> Error {
    let mut both = [(rank, ours), (peer, theirs)];
    both.sort_by_key(|(rank, _)| *rank);
    if ours.teams(0) == theirs.teams(0) {
        let [(low, mine), (high, other)] =
            both.map(|(rank, call)| (rank, call.words[3] >> TEAMS_AT));
        return Error::mismatch(format!(
            "ranks made the same call ({ours}) as call {number}, but the device of rank {low} divides it \
             among {mine} blocks and that of rank {high} among {other}: devices have the same number of \
             processors on all ranks, and as many of them left to the process (MPS), and their \
             kernels are compiled by the same NVRTC. The communicator is closed."
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
            "\nLarge equal parts go by copy engines into outputs that are windows, which lie at one \
             offset on all ranks: allocate outputs in the same order on every rank, as with \
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
    // What the ranks beyond these two called is not known.
    Error::mismatch(message).naming(refused).naming([rank, peer])
}

/// `rank 3`, or `ranks 0-2, 5`.
pub(crate) fn named(ranks: &[u32]) -> String {
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
            base.teams(4),
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
            "of two groups of one the lower rank's is usual"
        );
        let refused = Call::new(Operation::Declined);
        assert_eq!(mismatch(7, &[refused, refused, a]).ranks(), [0, 1]);
        assert_eq!(mismatch_of_two(7, 3, &a, 1, &b).ranks(), [1, 3]);
        assert_eq!(mismatch_of_two(7, 3, &refused, 1, &b).ranks(), [3]);
        assert!(mismatch(7, &[a, a]).to_string().contains("different options"));
    }

    #[test]
    fn grids_that_differ_are_told_apart_from_calls() {
        let call = Call::new(Operation::AllReduce).elements(DType::F32, 8).reduce(ReduceOp::Sum);
        let call = call.output(Place::Window(0x40));
        let (few, more) = (call.teams(17), call.teams(133));
        assert_eq!((few.to_string(), few.teams(0)), (call.to_string(), call));
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
