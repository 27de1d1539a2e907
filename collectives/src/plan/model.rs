//! The model of a plan: for each rank, the operations of its program, over chunks of three buffers.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;

/// Bytes of a name that a program gives an algorithm or a collective, or a kernel has, at most.
pub(crate) const MAX_NAME: usize = 256;

/// A program for every rank, for one number of ranks.
///
/// The input is `chunks` equal chunks. How many the output has follows from the collective; see
/// [`Plan::output_chunks`]. Scratch is memory of a rank that a call begins with undefined; it has chunks of the same
/// size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The name under which the algorithm is registered.
    pub name: String,
    /// Collective that the program computes.
    pub collective: Collective,
    /// The number of ranks that the program is for.
    pub world: u32,
    /// Chunks of every rank's input.
    pub chunks: u32,
    /// Chunks of every rank's scratch.
    pub scratch: u32,
    /// Whether results must have the same bits on every rank and in every run.
    pub reproducible: bool,
    /// How data shows on devices that it has arrived. Host memory always has signals.
    pub protocol: Protocol,
    /// Thread blocks on devices, at most; `None` leaves it to the size of a call.
    pub blocks: Option<u32>,
    /// The file that the program's lines are in, for messages. May be empty.
    pub source: String,
    /// The program of each rank, in rank order.
    pub programs: Vec<Vec<Instruction>>,
}

/// Collective of a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Collective {
    /// Every rank's output is the reduction of all inputs.
    AllReduce,
    /// Every rank's output is the inputs of all ranks, one behind the other.
    AllGather,
    /// Rank `r`'s output is the reduction of part `r` of all inputs; the input has a part for each rank.
    ReduceScatter,
    /// Every rank's output is the input of rank 0. Calls with another root run the plan with rotated ranks.
    Broadcast,
    /// Part `s` of rank `r`'s output is part `r` of rank `s`'s input.
    AllToAll,
    /// A collective of the program's own: for each rank and each chunk of its output, the chunks of inputs of which it is the
    /// reduction.
    Custom {
        /// The name in messages and of the registry's key.
        name: String,
        /// Contents of outputs by rank, then by chunk of the output.
        outputs: Vec<Vec<Vec<Contribution>>>,
    },
}

/// How data shows that it has arrived, on devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// A signal follows the data.
    Simple,
    /// Flags show it, which are half of every 16 bytes (LL): half the bandwidth, and no signal to wait for. For
    /// programs that reach peers only by puts and reductions into their scratch, and write each chunk of it at most
    /// once.
    Ll,
}

impl Protocol {
    /// The name in files and messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Simple => "simple",
            Self::Ll => "ll",
        }
    }

    /// The protocol of a name.
    pub fn named(name: &str) -> Option<Self> {
        [Self::Simple, Self::Ll].into_iter().find(|each| each.name() == name)
    }
}

/// A chunk of a rank's input, as a part of what an output must hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Contribution {
    /// Whose input.
    pub rank: u32,
    /// The chunk of it.
    pub chunk: u32,
}

impl fmt::Display for Contribution {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "input[{}] of rank {}", self.chunk, self.rank)
    }
}

/// One of a rank's three buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Buffer {
    /// Buffer that the caller passed in.
    Input,
    /// Buffer that the caller gets.
    Output,
    /// Memory between the two, undefined when a call begins.
    Scratch,
}

impl Buffer {
    /// The name in files and messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Input => "input",
            Self::Output => "output",
            Self::Scratch => "scratch",
        }
    }
}

/// Consecutive chunks of one rank's buffer. (`Span` of kernels is a caller's bytes.)
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Whose buffer.
    pub rank: u32,
    /// Which of the rank's buffers.
    pub buffer: Buffer,
    /// The first chunk.
    pub index: u32,
    /// The number of chunks.
    pub count: u32,
}

impl Span {
    /// The chunk at `offset` of the span.
    pub(crate) fn cell(self, offset: u32) -> Cell {
        Cell { rank: self.rank, buffer: self.buffer, index: self.index.saturating_add(offset) }
    }

    /// Writes the span as a program of `rank` has it: whose buffer it is stands there only for a peer's.
    pub(crate) fn seen_by(self, rank: u32) -> String {
        let Self { buffer, index, count, .. } = self;
        let range = match count {
            1 => format!("{}[{index}]", buffer.name()),
            _ => format!("{}[{index}:{}]", buffer.name(), u64::from(index) + u64::from(count)),
        };
        if self.rank == rank { range } else { format!("rank {}'s {range}", self.rank) }
    }
}

/// One chunk of one rank's buffer: pages call it a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Cell {
    pub(crate) rank: u32,
    pub(crate) buffer: Buffer,
    pub(crate) index: u32,
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}[{}] of rank {}", self.buffer.name(), self.index, self.rank)
    }
}

/// An operation of a rank's program, with where it stands there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Instruction {
    /// Operation of the instruction.
    pub operation: Operation,
    /// The block group that runs it. Operations of one group run in order; groups run at the same time. An
    /// operation of no group, and [`Operation::Join`], come after all before them and before all after them.
    pub group: Option<u32>,
    /// The line in the program's source, from 1; 0 where it is not known.
    pub line: u32,
}

/// Operation of a rank in one step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Copies chunks within the rank's own memory.
    Copy {
        /// Where to.
        dst: Span,
        /// Where from.
        src: Span,
    },
    /// Copies the rank's own chunks to a peer.
    Put {
        /// Where to, on the peer.
        dst: Span,
        /// Where from.
        src: Span,
    },
    /// Copies a peer's chunks to the rank's own memory.
    Get {
        /// Where to.
        dst: Span,
        /// Where from, on the peer.
        src: Span,
    },
    /// Reduces chunks, in the order of the sources. They may be a peer's, and so may the destination.
    Reduce {
        /// Where to. It may be one of the sources.
        dst: Span,
        /// Chunks that are reduced, at least one.
        srcs: Vec<Span>,
    },
    /// Adds one to the count of a channel of the peer's, behind all that this rank has done in this block group.
    Signal {
        /// Who is signalled.
        peer: u32,
        /// On which of its channels from this rank.
        channel: u32,
    },
    /// Waits until the peer has signalled the channel once more than was waited for.
    Wait {
        /// Who signals.
        peer: u32,
        /// On which channel.
        channel: u32,
    },
    /// Waits until all ranks have come to it.
    Barrier,
    /// Comes after all block groups before it and before all after it, on this rank.
    Join,
}

/// Sources of a reduction that messages and tables list.
const MAX_LISTED: usize = 32;

impl Operation {
    /// The name in files and messages.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Copy { .. } => "copy",
            Self::Put { .. } => "put",
            Self::Get { .. } => "get",
            Self::Reduce { .. } => "reduce",
            Self::Signal { .. } => "signal",
            Self::Wait { .. } => "wait",
            Self::Barrier => "barrier",
            Self::Join => "join",
        }
    }

    /// The chunks that it writes.
    pub(crate) fn destination(&self) -> Option<Span> {
        match self {
            Self::Copy { dst, .. } | Self::Put { dst, .. } | Self::Get { dst, .. } => Some(*dst),
            Self::Reduce { dst, .. } => Some(*dst),
            _ => None,
        }
    }

    /// The chunks that it reads, in order.
    pub(crate) fn sources(&self) -> &[Span] {
        match self {
            Self::Copy { src, .. } | Self::Put { src, .. } | Self::Get { src, .. } => {
                std::slice::from_ref(src)
            }
            Self::Reduce { srcs, .. } => srcs,
            _ => &[],
        }
    }

    /// All chunks that it reads or writes.
    pub(crate) fn spans(&self) -> impl Iterator<Item = Span> {
        self.sources().iter().copied().chain(self.destination())
    }

    /// The sources of a reduction in words: all of them, or the first ones and how many more there are.
    pub(crate) fn listed(srcs: &[Span], between: &str, word: impl Fn(&Span) -> String) -> String {
        let (shown, more) = srcs.split_at(srcs.len().min(MAX_LISTED));
        let mut words: Vec<String> = shown.iter().map(word).collect();
        if !more.is_empty() {
            words.push(format!("and {} more", more.len()));
        }
        words.join(between)
    }

    /// Writes the operation as a program of `rank` has it.
    pub(crate) fn seen_by(&self, rank: u32) -> String {
        let on = |channel: u32| match channel {
            0 => String::new(),
            channel => format!(" on channel {channel}"),
        };
        match self {
            Self::Copy { dst, src } | Self::Put { dst, src } | Self::Get { dst, src } => {
                format!("{} {} to {}", self.name(), src.seen_by(rank), dst.seen_by(rank))
            }
            Self::Reduce { dst, srcs } => {
                let srcs = Self::listed(srcs, ", ", |src| src.seen_by(rank));
                format!("reduce {srcs} to {}", dst.seen_by(rank))
            }
            Self::Signal { peer, channel } => format!("signal rank {peer}{}", on(*channel)),
            Self::Wait { peer, channel } => format!("wait for rank {peer}{}", on(*channel)),
            Self::Barrier | Self::Join => self.name().to_owned(),
        }
    }
}

impl Collective {
    /// The name in files and messages.
    pub fn name(&self) -> &str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::AllGather => "all_gather",
            Self::ReduceScatter => "reduce_scatter",
            Self::Broadcast => "broadcast",
            Self::AllToAll => "all_to_all",
            Self::Custom { name, .. } => name,
        }
    }

    /// Whether outputs are reductions, so that calls have a [`crate::ReduceOp`].
    pub fn reduces(&self) -> bool {
        match self {
            Self::AllReduce | Self::ReduceScatter => true,
            Self::AllGather | Self::Broadcast | Self::AllToAll => false,
            Self::Custom { outputs, .. } => outputs.iter().flatten().any(|chunk| chunk.len() > 1),
        }
    }
}

impl Plan {
    /// How many equal parts the input has. A part is what the `count` of a call counts.
    pub fn input_parts(&self) -> u32 {
        match self.collective {
            Collective::ReduceScatter | Collective::AllToAll => self.world,
            _ => 1,
        }
    }

    /// How many equal parts the output has, each as long as one of the input.
    pub fn output_parts(&self) -> u32 {
        match self.collective {
            Collective::AllGather | Collective::AllToAll => self.world,
            _ => 1,
        }
    }

    /// Chunks of each part; of the input, where the collective is the program's own.
    pub fn chunks_of_part(&self) -> u32 {
        self.chunks / self.input_parts().max(1)
    }

    /// Chunks of `rank`'s output.
    pub fn output_chunks(&self, rank: u32) -> u32 {
        match &self.collective {
            Collective::Custom { outputs, .. } => {
                outputs.get(rank as usize).map_or(0, |chunks| chunks.len() as u32)
            }
            _ => self.chunks_of_part().saturating_mul(self.output_parts()),
        }
    }

    /// Chunks of a rank's buffer.
    pub(crate) fn chunks_of(&self, rank: u32, buffer: Buffer) -> u32 {
        match buffer {
            Buffer::Input => self.chunks,
            Buffer::Output => self.output_chunks(rank),
            Buffer::Scratch => self.scratch,
        }
    }

    /// The index of a chunk in its part, which says how long it is: those at the end of a part may be shorter. Chunks of
    /// scratch are as long as the first.
    pub(crate) fn index_in_part(&self, cell: Cell) -> u32 {
        match cell.buffer {
            Buffer::Scratch => 0,
            Buffer::Input | Buffer::Output => cell.index % self.chunks_of_part().max(1),
        }
    }

    /// Contents that chunk `index` of `rank`'s output must have, in rank order.
    pub(crate) fn expected(&self, rank: u32, index: u32) -> Vec<Contribution> {
        let each = self.chunks_of_part().max(1);
        let one = |rank, chunk| vec![Contribution { rank, chunk }];
        let of_all = |chunk| (0..self.world).map(|rank| Contribution { rank, chunk }).collect();
        match &self.collective {
            Collective::AllReduce => of_all(index),
            Collective::ReduceScatter => of_all(rank * each + index),
            Collective::AllGather => one(index / each, index % each),
            Collective::Broadcast => one(0, index),
            Collective::AllToAll => one(index / each, rank * each + index % each),
            Collective::Custom { outputs, .. } => outputs[rank as usize][index as usize].clone(),
        }
    }

    /// The chunk of the input that is one memory with chunk `index` of `rank`'s output in calls in place. `None` where
    /// there is none.
    pub(crate) fn alias(&self, rank: u32, index: u32) -> Option<u32> {
        let each = self.chunks_of_part();
        match self.collective {
            Collective::AllReduce | Collective::Broadcast | Collective::AllToAll => Some(index),
            Collective::AllGather => {
                let first = rank * each;
                (first..first + each).contains(&index).then(|| index - first)
            }
            Collective::ReduceScatter => Some(rank * each + index),
            Collective::Custom { .. } => (index < self.chunks).then_some(index),
        }
    }

    /// The number of operations of all ranks.
    pub fn len(&self) -> usize {
        self.programs.iter().map(Vec::len).sum()
    }

    /// Whether no rank does anything.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Splits a program into phases: operations outside of block groups, or those of several block groups between two points where
/// they join.
pub(super) fn phases(program: &[Instruction]) -> VecDeque<Vec<Vec<usize>>> {
    let mut phases = VecDeque::new();
    let mut groups: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
    let mut alone = Vec::new();
    for (index, each) in program.iter().enumerate() {
        let joins = each.operation == Operation::Join;
        if let (Some(group), false) = (each.group, joins) {
            if !alone.is_empty() {
                phases.push_back(vec![std::mem::take(&mut alone)]);
            }
            groups.entry(group).or_default().push(index);
            continue;
        }
        if !groups.is_empty() {
            phases.push_back(std::mem::take(&mut groups).into_values().collect());
        }
        if !joins {
            alone.push(index);
        }
    }
    if !groups.is_empty() {
        phases.push_back(groups.into_values().collect());
    } else if !alone.is_empty() {
        phases.push_back(vec![alone]);
    }
    phases
}
