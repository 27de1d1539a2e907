//! Plans as JSON.
//!
//! A file is one object. Members that are not listed are refused, so that nothing that a later version means by them
//! is passed over.
//!
//! | member | what |
//! | --- | --- |
//! | `symmpool_plan` | the version of the format, [`PLAN_VERSION`] |
//! | `name` | the algorithm's name |
//! | `collective` | `"all_reduce"`, `"all_gather"`, `"reduce_scatter"`, `"broadcast"`, `"all_to_all"`, or an object with the `name` of one's own and its `outputs`: for each rank and chunk a list of `[rank, chunk]` of inputs |
//! | `world`, `chunks`, `scratch` | ranks, chunks of the input, chunks of scratch (0 if absent) |
//! | `reproducible` | see [`Plan::reproducible`]; true if absent |
//! | `protocol`, `blocks` | `"simple"` (if absent) or `"ll"`; thread blocks on devices, if they are given |
//! | `source` | the file that lines are in |
//! | `programs` | for each rank a list of operations |
//!
//! An operation has `op` (`copy`, `put`, `get`, `reduce`, `signal`, `wait`, `barrier`, `join`) and, as far as that
//! needs them, `dst`, `src`, `srcs`, `peer`, `channel` (0 if absent), `group`, `line`. A span is an object with
//! `buffer`, `index`, `count` (1 if absent) and `rank` (the program's own if absent).

use std::fmt;

use serde::de::value::MapAccessDeserializer;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use symmpool_allocator::{Error, Result, short};

use super::model::{
    Buffer, Collective, Contribution, Instruction, MAX_NAME, Operation, Plan, Protocol, Span,
};

/// The version of the format of plans in files.
pub const PLAN_VERSION: u32 = 1;

/// More operations than any sensible program has; what a check takes grows with them.
const MAX_OPERATIONS: usize = 1 << 18;
/// More bytes than so many operations need. `symmpool.language.load` reads no more of a file.
const MAX_BYTES: usize = 64 << 20;
/// More ranks than collectives in host memory have.
const MAX_WORLD: u32 = 1024;
/// More chunks of a buffer than any sensible program has.
const MAX_CHUNKS: u32 = 1 << 16;
/// More chunks that operations read and write, in all.
const MAX_ACCESSES: u64 = 1 << 20;
/// Thread blocks on a device, as [`Plan::blocks`] gives them.
const MAX_BLOCKS: u32 = 1024;
/// Block groups of a rank, and channels between two ranks.
pub(super) const MAX_GROUPS: u32 = 16;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    symmpool_plan: u32,
    name: String,
    collective: FileCollective,
    world: u32,
    chunks: u32,
    #[serde(default)]
    scratch: u32,
    #[serde(default = "yes")]
    reproducible: bool,
    #[serde(default = "simple")]
    protocol: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    blocks: Option<u32>,
    #[serde(default)]
    source: String,
    programs: Vec<Vec<FileOperation>>,
}

fn yes() -> bool {
    true
}

fn simple() -> String {
    Protocol::Simple.name().to_owned()
}

#[derive(Serialize)]
#[serde(untagged)]
enum FileCollective {
    Named(String),
    Own(FilePromise),
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct FilePromise {
    name: String,
    outputs: Vec<Vec<Vec<(u32, u32)>>>,
}

/// This is written by hand: serde's code for untagged enums cannot say what is wrong, and where.
impl<'de> Deserialize<'de> for FileCollective {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct EitherForm;
        impl<'de> Visitor<'de> for EitherForm {
            type Value = FileCollective;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a collective's name, or an object with a name and outputs")
            }

            fn visit_str<E>(self, name: &str) -> std::result::Result<FileCollective, E> {
                Ok(FileCollective::Named(name.to_owned()))
            }

            fn visit_map<A: MapAccess<'de>>(
                self,
                map: A,
            ) -> std::result::Result<FileCollective, A::Error> {
                let promise = FilePromise::deserialize(MapAccessDeserializer::new(map))?;
                Ok(FileCollective::Own(promise))
            }
        }
        deserializer.deserialize_any(EitherForm)
    }
}

#[derive(Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct FileOperation {
    op: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    dst: Option<FileSpan>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    src: Option<FileSpan>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    srcs: Option<Vec<FileSpan>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    peer: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    channel: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    group: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    line: Option<u32>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct FileSpan {
    buffer: String,
    index: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    count: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    rank: Option<u32>,
}

impl Plan {
    /// Reads a plan. It is not checked yet; see [`Plan::check`].
    ///
    /// # Errors
    ///
    /// `is_invalid_argument` for what is not a plan, which says where; for another version; and for plans beyond the
    /// limits: 262,144 operations in all, 1,024 ranks, 65,536 chunks of a buffer, 16 block groups, 16 channels, 1,024 thread blocks.
    pub fn from_json(text: &str) -> Result<Self> {
        if text.len() > MAX_BYTES {
            return Err(Error::invalid_argument(format!(
                "a plan of {} bytes; at most {MAX_BYTES} are read",
                text.len()
            )));
        }
        check_version(text)?;
        let file: File = serde_json::from_str(text).map_err(|error| {
            Error::invalid_argument(format!("this is not a plan: {}", unreadable(&error)))
        })?;
        let plan = read(file).map_err(|why| Error::invalid_argument(format!("a plan {why}")))?;
        plan.within_limits()?;
        Ok(plan)
    }

    /// The plan as JSON, from which [`Plan::from_json`] makes the same plan.
    pub fn to_json(&self) -> String {
        let collective = match &self.collective {
            Collective::Custom { name, outputs } => FileCollective::Own(FilePromise {
                name: name.clone(),
                outputs: outputs
                    .iter()
                    .map(|chunks| {
                        let pairs = |chunk: &Vec<Contribution>| {
                            chunk.iter().map(|each| (each.rank, each.chunk)).collect()
                        };
                        chunks.iter().map(pairs).collect()
                    })
                    .collect(),
            }),
            named => FileCollective::Named(named.name().to_owned()),
        };
        let programs = (0u32..).zip(&self.programs);
        let file = File {
            symmpool_plan: PLAN_VERSION,
            name: self.name.clone(),
            collective,
            world: self.world,
            chunks: self.chunks,
            scratch: self.scratch,
            reproducible: self.reproducible,
            protocol: self.protocol.name().to_owned(),
            blocks: self.blocks,
            source: self.source.clone(),
            programs: programs
                .map(|(rank, program)| program.iter().map(|each| write(rank, each)).collect())
                .collect(),
        };
        serde_json::to_string(&file).expect("strings, numbers and lists have a JSON form")
    }

    /// A hash of all that ranks must have the same of, so that ranks with other algorithms are found out. Lines and
    /// file names are not part of it.
    pub fn hash(&self) -> u64 {
        let mut plain = self.clone();
        plain.source.clear();
        plain.programs.iter_mut().flatten().for_each(|each| each.line = 0);
        let hash = blake3::hash(plain.to_json().as_bytes());
        let mut first = [0; 8];
        first.copy_from_slice(&hash.as_bytes()[..8]);
        u64::from_le_bytes(first)
    }

    /// Whether there is a program for each rank, and as many chunks of input for each of its parts.
    pub(super) fn is_shaped(&self) -> bool {
        let shaped =
            self.world > 0 && self.chunks > 0 && self.programs.len() == self.world as usize;
        shaped
            && match &self.collective {
                Collective::Custom { outputs, .. } => outputs.len() == self.world as usize,
                _ => self.chunks.is_multiple_of(self.input_parts()),
            }
    }

    /// Refuses what is larger than anybody needs, before time is spent on it.
    pub(super) fn within_limits(&self) -> Result<()> {
        let over = |what: &str, found: u64, most: u64| {
            if found <= most {
                return Ok(());
            }
            let name = short(&self.name);
            Err(Error::invalid_argument(format!(
                "plan {name:?} has {found} {what}; {most} are possible"
            )))
        };
        over("bytes in its name", self.name.len() as u64, MAX_NAME as u64)?;
        if let Collective::Custom { name, .. } = &self.collective {
            over("bytes in its collective's name", name.len() as u64, MAX_NAME as u64)?;
        }
        over("operations", self.len() as u64, MAX_OPERATIONS as u64)?;
        over("ranks", self.world.into(), MAX_WORLD.into())?;
        over("chunks of input", self.chunks.into(), MAX_CHUNKS.into())?;
        over("chunks of scratch", self.scratch.into(), MAX_CHUNKS.into())?;
        let outputs = (0..self.world).map(|rank| self.output_chunks(rank)).max().unwrap_or(0);
        over("chunks of output", outputs.into(), MAX_CHUNKS.into())?;
        if let Some(blocks) = self.blocks
            && !(1..=MAX_BLOCKS).contains(&blocks)
        {
            let name = short(&self.name);
            return Err(Error::invalid_argument(format!(
                "plan {name:?} has {blocks} thread blocks; 1 to {MAX_BLOCKS} are possible"
            )));
        }
        let mut accesses = 0;
        for each in self.programs.iter().flatten() {
            over(
                "block groups",
                each.group.map_or(0, |group| u64::from(group) + 1),
                MAX_GROUPS.into(),
            )?;
            if let Operation::Signal { channel, .. } | Operation::Wait { channel, .. } =
                each.operation
            {
                over("channels between two ranks", u64::from(channel) + 1, MAX_GROUPS.into())?;
            }
            accesses += each.operation.spans().map(|span| u64::from(span.count)).sum::<u64>();
            over("chunks that are read and written", accesses, MAX_ACCESSES)?;
        }
        if self.is_shaped() {
            return Ok(());
        }
        let Self { name, world, chunks, .. } = self;
        Err(Error::invalid_argument(format!(
            "plan {name:?} has {} programs for {world} ranks, and {chunks} chunks of input; a program for each rank \
             is needed, at least one chunk, and for {} as many for each of {} parts",
            self.programs.len(),
            self.collective.name(),
            self.input_parts(),
        )))
    }
}

/// Says of another version that it is one, whatever else the file has.
fn check_version(text: &str) -> Result<()> {
    #[derive(Deserialize)]
    struct Version {
        symmpool_plan: u64,
    }
    let version: Version = serde_json::from_str(text).map_err(|error| {
        Error::invalid_argument(format!("this is not a plan: {}", unreadable(&error)))
    })?;
    if version.symmpool_plan == u64::from(PLAN_VERSION) {
        return Ok(());
    }
    Err(Error::invalid_argument(format!(
        "a plan of version {}; this version of symmpool reads version {PLAN_VERSION}",
        version.symmpool_plan
    )))
}

/// Why a text was not read. Errors repeat names and values of it, which may be as long as the text.
pub(crate) fn unreadable(error: &serde_json::Error) -> String {
    const MAX_SHOWN: usize = 512;
    let why = error.to_string();
    if why.len() <= MAX_SHOWN {
        return why;
    }
    let begin = &why[..why.floor_char_boundary(MAX_SHOWN)];
    format!("{begin}... at line {} column {}", error.line(), error.column())
}

type Read<T> = std::result::Result<T, String>;

fn read(file: File) -> Read<Plan> {
    let name = file.name;
    let reading = |why: String| format!("{:?} {why}", short(&name));
    let collective = match file.collective {
        FileCollective::Named(of) => match of.as_str() {
            "all_reduce" => Collective::AllReduce,
            "all_gather" => Collective::AllGather,
            "reduce_scatter" => Collective::ReduceScatter,
            "broadcast" => Collective::Broadcast,
            "all_to_all" => Collective::AllToAll,
            _ => return Err(reading(format!("is of an unknown collective, {:?}", short(&of)))),
        },
        FileCollective::Own(FilePromise { name, outputs }) => {
            let chunk = |pairs: Vec<(u32, u32)>| {
                pairs.into_iter().map(|(rank, chunk)| Contribution { rank, chunk }).collect()
            };
            let rank = |chunks: Vec<_>| chunks.into_iter().map(chunk).collect();
            Collective::Custom { name, outputs: outputs.into_iter().map(rank).collect() }
        }
    };
    let protocol = Protocol::named(&file.protocol).ok_or_else(|| {
        reading(format!(
            "has an unknown protocol, {:?}; there are simple and ll",
            short(&file.protocol)
        ))
    })?;
    let mut programs = Vec::new();
    for (rank, program) in (0u32..).zip(file.programs) {
        let mut read = Vec::with_capacity(program.len());
        for (index, operation) in program.into_iter().enumerate() {
            let at = |why| {
                reading(format!("has, in rank {rank}'s program, as operation {index}, {why}"))
            };
            read.push(read_operation(rank, operation).map_err(at)?);
        }
        programs.push(read);
    }
    Ok(Plan {
        collective,
        world: file.world,
        chunks: file.chunks,
        scratch: file.scratch,
        reproducible: file.reproducible,
        protocol,
        blocks: file.blocks,
        source: file.source,
        programs,
        name,
    })
}

fn read_operation(rank: u32, it: FileOperation) -> Read<Instruction> {
    let FileOperation { op, dst, src, srcs, peer, channel, group, line } = it;
    let given = [
        ("dst", dst.is_some()),
        ("src", src.is_some()),
        ("srcs", srcs.is_some()),
        ("peer", peer.is_some()),
        ("channel", channel.is_some()),
    ];
    let wanted: &[&str] = match op.as_str() {
        "copy" | "put" | "get" => &["dst", "src"],
        "reduce" => &["dst", "srcs"],
        "signal" | "wait" => &["peer", "channel"],
        "barrier" | "join" => &[],
        _ => return Err(format!("an unknown op, {:?}", short(&op))),
    };
    if let Some((name, _)) = given.iter().find(|(name, is)| *is && !wanted.contains(name)) {
        return Err(format!("a {op} with {name:?}, which has none"));
    }
    let lacks = |name: &str| format!("a {op} without {name:?}");
    let span =
        |name: &str, span: Option<FileSpan>| read_span(rank, &span.ok_or_else(|| lacks(name))?);
    let peer = || peer.ok_or_else(|| lacks("peer"));
    let operation = match op.as_str() {
        "copy" => Operation::Copy { dst: span("dst", dst)?, src: span("src", src)? },
        "put" => Operation::Put { dst: span("dst", dst)?, src: span("src", src)? },
        "get" => Operation::Get { dst: span("dst", dst)?, src: span("src", src)? },
        "reduce" => {
            let srcs = srcs.ok_or_else(|| lacks("srcs"))?;
            let srcs = srcs.iter().map(|src| read_span(rank, src)).collect::<Read<_>>()?;
            Operation::Reduce { dst: span("dst", dst)?, srcs }
        }
        "signal" => Operation::Signal { peer: peer()?, channel: channel.unwrap_or(0) },
        "wait" => Operation::Wait { peer: peer()?, channel: channel.unwrap_or(0) },
        "barrier" => Operation::Barrier,
        _ => Operation::Join,
    };
    Ok(Instruction { operation, group, line: line.unwrap_or(0) })
}

fn read_span(rank: u32, it: &FileSpan) -> Read<Span> {
    let buffer = [Buffer::Input, Buffer::Output, Buffer::Scratch];
    let buffer = buffer.into_iter().find(|each| each.name() == it.buffer);
    let buffer =
        buffer.ok_or_else(|| format!("a place in an unknown buffer, {:?}", short(&it.buffer)))?;
    Ok(Span {
        rank: it.rank.unwrap_or(rank),
        buffer,
        index: it.index,
        count: it.count.unwrap_or(1),
    })
}

fn write(rank: u32, it: &Instruction) -> FileOperation {
    let mut file = FileOperation {
        op: it.operation.name().to_owned(),
        group: it.group,
        line: (it.line != 0).then_some(it.line),
        ..FileOperation::default()
    };
    match &it.operation {
        Operation::Copy { dst, src }
        | Operation::Put { dst, src }
        | Operation::Get { dst, src } => {
            (file.dst, file.src) = (Some(write_span(rank, *dst)), Some(write_span(rank, *src)));
        }
        Operation::Reduce { dst, srcs } => {
            file.dst = Some(write_span(rank, *dst));
            file.srcs = Some(srcs.iter().map(|src| write_span(rank, *src)).collect());
        }
        Operation::Signal { peer, channel } | Operation::Wait { peer, channel } => {
            (file.peer, file.channel) = (Some(*peer), (*channel != 0).then_some(*channel));
        }
        Operation::Barrier | Operation::Join => {}
    }
    file
}

fn write_span(rank: u32, it: Span) -> FileSpan {
    FileSpan {
        buffer: it.buffer.name().to_owned(),
        index: it.index,
        count: (it.count != 1).then_some(it.count),
        rank: (it.rank != rank).then_some(it.rank),
    }
}
