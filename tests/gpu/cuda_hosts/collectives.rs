//! Collectives over hosts on memory of devices, compared bit for bit with what the CPU computes.

#![allow(unsafe_code)] // names blocks by their addresses

use std::time::Duration;

use symmpool_allocator::{Block, Error, Hosts, Pool, Result, Stream};
use symmpool_collectives::{
    Communicator, CommunicatorOptions, DType, Outers, ReduceOp, Request, StandardCollective,
};

use crate::job::{RankOfJob, ensure};
use crate::memory::{read, write};
use crate::oracle;

const STREAM: &Stream = &Stream::DEFAULT;
/// The most elements of a part: more than the chunks that are under way at once.
const MAX_COUNT: usize = 5_000_003;
/// Element types and operations of reductions.
const REDUCTIONS: [(DType, ReduceOp); 9] = [
    (DType::F32, ReduceOp::Sum),
    (DType::F32, ReduceOp::Avg),
    (DType::F64, ReduceOp::Prod),
    (DType::Bf16, ReduceOp::Sum),
    (DType::Bf16, ReduceOp::Avg),
    (DType::F16, ReduceOp::Max),
    (DType::I32, ReduceOp::Avg),
    (DType::U8, ReduceOp::Min),
    (DType::F8E4m3, ReduceOp::Sum),
];

/// A rank that makes calls.
struct HostsCaller<'a> {
    comm: &'a Communicator,
    pool: &'a Pool,
    hosts: &'a Hosts,
    rank: u32,
    world: u32,
    input: Block<u8>,
    output: Block<u8>,
    /// Calls so far, from which their data follows.
    calls: u64,
}

/// Communicator of all ranks, with outer engines over NCCL.
pub(crate) fn communicator(pool: &Pool, limit: Duration) -> Result<Communicator> {
    let options = CommunicatorOptions { timeout: limit, ..CommunicatorOptions::default() };
    Communicator::spanning(pool, &options, Outers::nccl(pool, limit)?)
}

/// Makes calls of every collective, in windows and on other memory.
pub(crate) fn run(rank: &RankOfJob) -> Result<()> {
    let pool = rank.pool()?;
    let comm = communicator(&pool, rank.timeout / 2)?;
    let world = rank.world() as u32;
    for is_window in [true, false] {
        let bytes = MAX_COUNT * 4 + 64;
        let (input, output) = (pool.alloc::<u8>(bytes)?, pool.alloc::<u8>(bytes)?);
        if is_window {
            pool.commit()?;
        }
        let hosts = pool.hosts();
        let (comm, pool) = (&comm, &pool);
        let mut caller =
            HostsCaller { comm, pool, hosts, rank: rank.rank, world, input, output, calls: 0 };
        caller.every_collective()?;
        if !is_window {
            caller.large()?;
        }
    }
    Ok(())
}

impl HostsCaller<'_> {
    fn every_collective(&mut self) -> Result<()> {
        for count in [0, 1, 7, 4099, 60_000] {
            for (dtype, op) in REDUCTIONS {
                self.check(StandardCollective::AllReduce, count, dtype, op, 0)?;
                self.check(StandardCollective::ReduceScatter, count, dtype, op, 0)?;
            }
            for dtype in [DType::U8, DType::F32] {
                self.check(StandardCollective::AllGather, count, dtype, ReduceOp::Sum, 0)?;
                self.check(StandardCollective::AllToAll, count, dtype, ReduceOp::Sum, 0)?;
                for root in 0..self.world {
                    self.check(StandardCollective::Broadcast, count, dtype, ReduceOp::Sum, root)?;
                }
            }
            self.uneven(count)?;
            self.comm.barrier(STREAM)?;
        }
        Ok(())
    }

    /// Calls whose data goes in several chunks.
    fn large(&mut self) -> Result<()> {
        let (sum, dtype) = (ReduceOp::Sum, DType::F32);
        self.check(StandardCollective::AllReduce, MAX_COUNT, dtype, sum, 0)?;
        let part = MAX_COUNT / self.world as usize;
        self.check(StandardCollective::ReduceScatter, part, dtype, sum, 0)?;
        self.check(StandardCollective::AllGather, part, dtype, sum, 0)?;
        self.check(StandardCollective::AllToAll, part, dtype, sum, 0)?;
        self.check(StandardCollective::Broadcast, MAX_COUNT, dtype, sum, self.world - 1)
    }

    /// The input of a rank in the call under way.
    fn data(&self, rank: u32, dtype: DType, count: usize) -> Vec<u8> {
        oracle::finite(self.calls, rank, dtype, count)
    }

    /// The reduction of all ranks' elements, as hosts make it: inside each first.
    fn reduced(&self, dtype: DType, op: ReduceOp, count: usize) -> Vec<u8> {
        let all: Vec<Vec<u8>> = (0..self.world).map(|rank| self.data(rank, dtype, count)).collect();
        let refs: Vec<&[u8]> = all.iter().map(Vec::as_slice).collect();
        let is_integer = matches!(dtype, DType::I32 | DType::I64 | DType::U8 | DType::I8);
        if op == ReduceOp::Avg && is_integer {
            return oracle::reduce(&refs, dtype, op);
        }
        let inside = if op == ReduceOp::Avg { ReduceOp::Sum } else { op };
        let mut partials: Vec<Vec<u8>> = self
            .hosts
            .iter()
            .map(|ranks| {
                let here: Vec<&[u8]> = ranks.iter().map(|rank| refs[*rank as usize]).collect();
                oracle::reduce(&here, dtype, inside)
            })
            .collect();
        if op == ReduceOp::Avg {
            // Zeros change no sum, and have it divided by the number of ranks.
            partials.resize(self.world as usize, vec![0; count * dtype.size()]);
        }
        let partials: Vec<&[u8]> = partials.iter().map(Vec::as_slice).collect();
        oracle::reduce(&partials, dtype, op)
    }

    fn check(
        &mut self,
        collective: StandardCollective,
        count: usize,
        dtype: DType,
        op: ReduceOp,
        root: u32,
    ) -> Result<()> {
        self.calls += 1;
        let (me, world, part) = (self.rank as usize, self.world as usize, count * dtype.size());
        let parts = match collective {
            StandardCollective::ReduceScatter | StandardCollective::AllToAll => world,
            _ => 1,
        };
        let input = self.data(self.rank, dtype, count * parts);
        let wanted = match collective {
            StandardCollective::AllReduce => self.reduced(dtype, op, count),
            StandardCollective::ReduceScatter => {
                self.reduced(dtype, op, count * world)[me * part..][..part].to_vec()
            }
            StandardCollective::AllGather => {
                (0..self.world).flat_map(|rank| self.data(rank, dtype, count)).collect()
            }
            StandardCollective::Broadcast => self.data(root, dtype, count),
            StandardCollective::AllToAll => (0..self.world)
                .flat_map(|rank| {
                    self.data(rank, dtype, count * world)[me * part..][..part].to_vec()
                })
                .collect(),
        };
        write(self.pool, &self.output, &vec![0xa5; wanted.len() + 16])?;
        let is_broadcast = collective == StandardCollective::Broadcast;
        write(self.pool, if is_broadcast { &self.output } else { &self.input }, &input)?;
        // SAFETY: both blocks live and have room for the call; nobody touches them until it is read below.
        let request = unsafe {
            Request::at(collective, self.output.as_ptr(), self.input.as_ptr(), count, dtype)
        };
        self.comm.call(&request.op(op).root(root), STREAM)?;
        let what = || format!("{collective} of {count} {} ({op:?}), root {root}", dtype.name());
        self.compare(&wanted, dtype, what)
    }

    /// An all-to-all whose parts differ.
    fn uneven(&mut self, count: usize) -> Result<()> {
        self.calls += 1;
        let (me, world) = (self.rank as usize, self.world as usize);
        let size = |from: usize, to: usize| (count * (1 + from) + 3 * to) / (1 + to) % (count + 1);
        let sent = |from: usize| -> Vec<usize> { (0..world).map(|to| size(from, to)).collect() };
        let total = |from: usize| sent(from).iter().sum::<usize>();
        let send = sent(me);
        let receive: Vec<usize> = (0..world).map(|from| size(from, me)).collect();
        let dtype = DType::U8;
        let wanted: Vec<u8> = (0..world)
            .flat_map(|from| {
                let skip: usize = (0..me).map(|to| size(from, to)).sum();
                let data = self.data(from as u32, dtype, total(from));
                data[skip..skip + size(from, me)].to_vec()
            })
            .collect();
        write(self.pool, &self.output, &vec![0xa5; wanted.len() + 16])?;
        write(self.pool, &self.input, &self.data(self.rank, dtype, total(me)))?;
        let (to, from) = (self.output.as_ptr(), self.input.as_ptr());
        // SAFETY: both blocks live and have room for the call; nobody touches them until it is read below.
        unsafe { self.comm.all_to_all_v_at(to, from, &receive, &send, dtype, STREAM) }?;
        self.compare(&wanted, dtype, || format!("an uneven all-to-all of up to {count} bytes"))
    }

    fn compare(&self, wanted: &[u8], dtype: DType, what: impl Fn() -> String) -> Result<()> {
        self.comm.synchronize(STREAM)?;
        let got = read(self.pool, &self.output, wanted.len() + 16)?;
        let (got, behind) = got.split_at(wanted.len());
        if let Some(at) = oracle::differs(got, wanted, dtype) {
            let element = |bytes: &[u8]| bytes[at * dtype.size()..][..dtype.size()].to_vec();
            return Err(Error::invalid_state(format!(
                "{} on rank {}: element {at} is {:?}, not {:?}",
                what(),
                self.rank,
                element(got),
                element(wanted)
            )));
        }
        ensure(behind.iter().all(|byte| *byte == 0xa5), || {
            format!("{} on rank {} wrote behind its output", what(), self.rank)
        })
    }
}
