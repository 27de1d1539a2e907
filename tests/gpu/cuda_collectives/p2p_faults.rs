//! Checks messages whose sender and receiver differ, whose peer is late, and whose peer does not come (S5).

use std::thread::sleep;
use std::time::{Duration, Instant};

use symmpool_allocator::{Block, Error, Pool, Result, Stream};
use symmpool_collectives::{Communicator, CommunicatorOptions, DType};

use crate::cuda::{download, stream, upload};
use crate::{MAX_LATE, expect_error};

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
    // Messages as sent and as expected: elements and their type. The first is short enough to be sent before the
    // receiver compares it; the last are as long as expected, with other elements.
    let cases = [
        ((1000, DType::U8), (1004, DType::U8)),
        ((0, DType::F32), (1, DType::F32)),
        ((BYTES, DType::U8), (BYTES - 1, DType::U8)),
        ((100, DType::U8), (BYTES, DType::U8)),
        ((BYTES, DType::U8), (100, DType::U8)),
        ((256, DType::F64), (512, DType::F32)),
        ((256, DType::F32), (256, DType::I32)),
    ];
    for (nth, (sent, expected)) in (0..).zip(cases) {
        faults.differ(sent, expected, nth % 2 == 0)?;
    }
    for sends in [true, false] {
        faults.declined(sends)?;
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
        // SAFETY: the block has these elements, and nothing else uses it.
        unsafe { comm.recv_at(at, count, dtype, peer, &self.stream) }
    }

    fn expect(&mut self, what: &str, right: bool) {
        if !right {
            self.wrong += 1;
            println!("rank {}: {what}", self.pool.rank());
        }
    }

    /// Rank 0 sends to rank 1, which expects something else. All ranks learn that at once: rank 0 by its next message, or
    /// by a collective, and the others by a collective, in which they wait already or to which they come later.
    fn differ(
        &mut self,
        sent: (usize, DType),
        expected: (usize, DType),
        by_message: bool,
    ) -> Result<()> {
        let comm = self.comm()?;
        let rank = self.pool.rank();
        upload(self.pool, self.block.address(), &vec![BEFORE; BYTES])?;
        let began = Instant::now();
        let error = match rank {
            0 => {
                // A short message is sent before the receiver compares it, so a later call has the error.
                let deadline = began + self.timeout;
                let mut result = self.send(&comm, sent, 1);
                loop {
                    result = result.and_then(|()| comm.synchronize(&self.stream));
                    if result.is_err() || Instant::now() > deadline {
                        break expect_error(result, "a send that differs")?;
                    }
                    sleep(Duration::from_millis(20));
                    result = if by_message {
                        self.send(&comm, (0, DType::U8), 1)
                    } else {
                        comm.barrier(&self.stream)
                    };
                }
            }
            1 => {
                // Others may wait for this rank by then.
                sleep(Duration::from_millis(200));
                let result = self.receive(&comm, expected, 0);
                expect_error(
                    result.and_then(|()| comm.synchronize(&self.stream)),
                    "a recv that differs",
                )?
            }
            _ => {
                if by_message {
                    sleep(Duration::from_millis(400));
                }
                self.expect_at_once(&comm)?
            }
        };
        let took = began.elapsed();
        let text = error.to_string();
        let values = |(count, dtype): (usize, DType)| {
            format!("{count} {} ({} bytes)", dtype.name(), count * dtype.size())
        };
        let named = text.contains("rank 0 sends") && text.contains("to rank 1, which expects");
        let named = named && text.contains(&values(sent)) && text.contains(&values(expected));
        // A rank without part in it may learn of it from another such rank, which says who it was.
        let named = named || (rank > 1 && text.contains("what rank 0 sends to rank 1"));
        let right = error.is_diverged() && error.ranks() == [0, 1] && named;
        self.expect(
            &format!("{sent:?} for {expected:?}: after {took:?}: {error}"),
            right && took < self.timeout / 2,
        );
        if rank == 1 {
            let kept = download(self.pool, self.block.address(), BYTES)?;
            self.expect("a refused message was written", kept.iter().all(|byte| *byte == BEFORE));
        }
        // No call succeeds after it.
        let peer = if rank == 0 { 1 } else { 0 };
        let again = expect_error(self.send(&comm, sent, peer), "a message after a failure")?;
        self.expect(&format!("after a failure: {again}"), again.is_diverged());
        Ok(())
    }

    /// The error of a collective that waits for ranks which have failed.
    fn expect_at_once(&self, comm: &Communicator) -> Result<Error> {
        let result = comm.barrier(&self.stream);
        expect_error(
            result.and_then(|()| comm.synchronize(&self.stream)),
            "a barrier behind a failure",
        )
    }

    /// One end of a message refuses its own arguments; the other end fails too, and so do all calls.
    fn declined(&mut self, sends: bool) -> Result<()> {
        let comm = self.comm()?;
        let (rank, culprit) = (self.pool.rank(), if sends { 0 } else { 1 });
        let began = Instant::now();
        let message = (100, DType::U8);
        let outcome = match (rank, sends) {
            (0, false) => self.send(&comm, message, 1),
            (1, true) => self.receive(&comm, message, 0),
            (0 | 1, _) => {
                let null = std::ptr::null_mut();
                // SAFETY: refused before memory is accessed; so it is below.
                let sent = |()| unsafe { comm.send_at(null, 100, DType::U8, 1, &self.stream) };
                // SAFETY: refused before memory is accessed.
                let received = |()| unsafe { comm.recv_at(null, 100, DType::U8, 0, &self.stream) };
                let refused = if sends { sent(()) } else { received(()) };
                let why = expect_error(refused, "a message that its own rank refuses")?;
                self.expect(&format!("{why}"), why.is_invalid_argument());
                Ok(())
            }
            _ => Ok(()),
        };
        // The sender may be past the message already, and a rank without part in it comes to a collective.
        let error = match outcome.and_then(|()| comm.synchronize(&self.stream)) {
            Err(error) => error,
            Ok(()) => self.expect_at_once(&comm)?,
        };
        let took = began.elapsed();
        self.expect(
            &format!("declined by rank {culprit}: after {took:?}: {error}"),
            error.is_diverged()
                && (error.ranks() == [culprit] || (rank > 1 && error.ranks() == [0, 1]))
                && error.to_string().contains("its own")
                && took < self.timeout / 2,
        );
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
            let in_time = took < self.timeout + MAX_LATE;
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

    /// Messages to no other rank are refused, and do not fail the communicator; nor does a message that both ends
    /// refuse.
    fn refused(&mut self) -> Result<()> {
        let comm = self.comm()?;
        let (rank, world) = (self.pool.rank(), self.pool.world());
        let message = (100, DType::U8);
        let (next, before) = ((rank + 1) % world, (rank + world - 1) % world);
        let refused: [Result<()>; 5] = [
            self.send(&comm, message, rank),
            self.receive(&comm, message, rank),
            self.send(&comm, message, world),
            self.send(&comm, (usize::MAX / 4, DType::F64), next),
            self.receive(&comm, (usize::MAX / 4, DType::F64), before),
        ];
        for outcome in refused {
            let error: Error = expect_error(outcome, "nonsense")?;
            self.expect(&format!("{error}"), error.is_invalid_argument());
        }
        comm.barrier(&self.stream)?;
        comm.synchronize(&self.stream)
    }
}
