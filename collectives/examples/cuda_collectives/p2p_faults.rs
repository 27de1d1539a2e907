//! Checks messages whose sender and receiver differ, whose peer is late, and whose peer does not come (S5).

use std::thread::sleep;
use std::time::{Duration, Instant};

use symmpool_allocator::{Block, Error, Pool, Result, Stream};
use symmpool_collectives::{Communicator, CommunicatorOptions, DType};

use crate::cuda::{download, stream, upload};
use crate::{MOST_LATE, expect_error};

const BYTES: usize = 3 << 20;
const BEFORE: u8 = 0xa5;

struct Faults<'a> {
    pool: &'a Pool,
    timeout: Duration,
    stream: Stream,
    block: Block<u8>,
    wrong: u32,
}

pub(crate) fn run(pool: &Pool, timeout: Duration) -> Result<u32> {
    let stream = stream(pool)?;
    let mut faults = Faults { pool, timeout, stream, block: pool.alloc(BYTES)?, wrong: 0 };
    // What is sent, and what is expected: elements and bytes of an element. The first message is short enough to be
    // sent before the receiver compares it; the last is as long as expected, with other elements.
    for (sent, expected) in [
        ((1000, DType::U8), (1004, DType::U8)),
        ((0, DType::F32), (1, DType::F32)),
        ((BYTES, DType::U8), (BYTES - 1, DType::U8)),
        ((100, DType::U8), (BYTES, DType::U8)),
        ((BYTES, DType::U8), (100, DType::U8)),
        ((256, DType::F64), (512, DType::F32)),
    ] {
        faults.differ(sent, expected)?;
    }
    faults.late()?;
    faults.absent()?;
    Ok(faults.wrong)
}

impl Faults<'_> {
    fn comm(&self) -> Result<Communicator> {
        let options = CommunicatorOptions { timeout: self.timeout, ..Default::default() };
        Communicator::with_options(self.pool, &options)
    }

    fn send(&self, comm: &Communicator, (count, dtype): (usize, DType), peer: u32) -> Result<()> {
        let at = self.block.address() as *const u8;
        // SAFETY: the block has these elements, and nothing else uses it; so it is below.
        unsafe { comm.send_at(at, count, dtype, peer, &self.stream) }
    }

    fn receive(
        &self,
        comm: &Communicator,
        (count, dtype): (usize, DType),
        peer: u32,
    ) -> Result<()> {
        let at = self.block.address() as *mut u8;
        // SAFETY: as above.
        unsafe { comm.recv_at(at, count, dtype, peer, &self.stream) }
    }

    fn expect(&mut self, what: &str, right: bool) {
        if !right {
            self.wrong += 1;
            println!("rank {}: {what}", self.pool.rank());
        }
    }

    /// Rank 0 sends to rank 1, which expects something else.
    fn differ(&mut self, sent: (usize, DType), expected: (usize, DType)) -> Result<()> {
        let comm = self.comm()?;
        let rank = self.pool.rank();
        if rank > 1 {
            return Ok(());
        }
        upload(self.pool, self.block.address(), &vec![BEFORE; BYTES])?;
        let began = Instant::now();
        let error = if rank == 0 {
            // A short message is sent before the receiver compares it, so a later send has the error.
            let deadline = began + self.timeout;
            let mut result = self.send(&comm, sent, 1);
            loop {
                result = result.and_then(|()| comm.synchronize(&self.stream));
                if result.is_err() || Instant::now() > deadline {
                    break expect_error(result, "a send that differs")?;
                }
                sleep(Duration::from_millis(20));
                result = self.send(&comm, (0, DType::U8), 1);
            }
        } else {
            let result = self.receive(&comm, expected, 0);
            expect_error(
                result.and_then(|()| comm.synchronize(&self.stream)),
                "a recv that differs",
            )?
        };
        let took = began.elapsed();
        let text = error.to_string();
        let bytes = |(count, dtype): (usize, DType)| format!("{} bytes", count * dtype.size());
        let named = text.contains("rank 0 sends") && text.contains("to rank 1, which expects");
        let named = named && text.contains(&bytes(sent)) && text.contains(&bytes(expected));
        let right = error.is_diverged() && named && took < self.timeout + MOST_LATE;
        self.expect(&format!("{sent:?} for {expected:?}: after {took:?}: {error}"), right);
        if rank == 1 {
            let kept = download(self.pool, self.block.address(), BYTES)?;
            self.expect("a refused message was written", kept.iter().all(|byte| *byte == BEFORE));
        }
        // No call succeeds after it.
        let again = expect_error(self.send(&comm, sent, 1 - rank), "a message after a failure")?;
        self.expect(&format!("after a failure: {again}"), again.is_diverged());
        Ok(())
    }

    /// A peer that comes late, but in time, on either end.
    fn late(&mut self) -> Result<()> {
        let comm = self.comm()?;
        let rank = self.pool.rank();
        for waiting in 0..2 {
            if rank > 1 {
                break;
            }
            upload(self.pool, self.block.address(), &vec![rank as u8; BYTES])?;
            if rank != waiting {
                sleep(self.timeout / 3);
            }
            let message = (BYTES, DType::U8);
            if rank == 0 { self.send(&comm, message, 1) } else { self.receive(&comm, message, 0) }?;
            comm.synchronize(&self.stream)?;
            let got = download(self.pool, self.block.address(), BYTES)?;
            self.expect("a late message", got.iter().all(|byte| *byte == 0));
        }
        Ok(())
    }

    /// A peer that does not come, neither to send nor to receive.
    fn absent(&mut self) -> Result<()> {
        for sends in [false, true] {
            let comm = self.comm()?;
            let rank = self.pool.rank();
            if rank != 0 {
                sleep(self.timeout + Duration::from_millis(500));
                continue;
            }
            let began = Instant::now();
            let message = (BYTES, DType::U8);
            let result = if sends {
                // The first ones have free slots.
                (0..8).try_for_each(|_| self.send(&comm, message, 1))
            } else {
                self.receive(&comm, message, 1)
            };
            let result = result.and_then(|()| comm.synchronize(&self.stream));
            let error = expect_error(result, "a message without a peer")?;
            let took = began.elapsed();
            let what = if sends { "rank 1 to receive" } else { "a message of rank 1" };
            let named = error.ranks() == [1] && error.to_string().contains(what);
            let in_time = took < self.timeout + MOST_LATE;
            self.expect(
                &format!("alone, after {took:?}: {error}"),
                error.is_timeout() && named && in_time,
            );
            println!("{error} (after {took:?})");
            let refused = self.send(&comm, message, 1);
            let again = expect_error(refused, "a message after a failure")?;
            self.expect(&format!("after a failure: {again}"), again.is_timeout());
        }
        self.refused()
    }

    /// Invalid arguments are refused, and do not close the communicator.
    fn refused(&mut self) -> Result<()> {
        let comm = self.comm()?;
        let (rank, world) = (self.pool.rank(), self.pool.world());
        let message = (100, DType::U8);
        let refused: [Result<()>; 4] = [
            self.send(&comm, message, rank),
            self.receive(&comm, message, rank),
            self.send(&comm, message, world),
            self.receive(&comm, (usize::MAX / 4, DType::F64), (rank + 1) % world),
        ];
        for outcome in refused {
            let error: Error = expect_error(outcome, "nonsense")?;
            self.expect(&format!("{error}"), error.is_invalid_argument());
        }
        comm.barrier(&self.stream)?;
        comm.synchronize(&self.stream)
    }
}
