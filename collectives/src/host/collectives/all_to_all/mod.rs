//! All-to-all: every rank sends a segment to every rank, of equal or of given sizes.
//!
//! Who sends how much is known to all before data moves: either it is one count (`all_to_all`), or
//! every rank shows its row of the traffic matrix on entry (`all_to_all_v`), and every rank checks
//! the whole matrix. So ranks agree, without further talk, on how each sender's data travels:
//!
//! - `ll`: through the sender's scratch, in one piece that is there on entry if it fits, else
//!   in several, one step each;
//! - `direct`: receivers read the sender's window themselves, and a last step lets it go. Where one
//!   receives far more than others, these write a part of it into its output (`shares`).
//!
//! Inputs and outputs lie where each rank wants them: in the rows, ranks show where these are.

#![allow(unsafe_code)] // hands raw buffers to the kernels

mod direct;
mod load_balance;
mod splits;
mod staged;
mod traffic_matrix;

use symmpool_allocator::{Error, Result};

use self::traffic_matrix::Matrix;
use crate::{AllToAllAlgorithm, DType};
pub(crate) use load_balance::Shares;
pub use splits::{SplitRows, SplitsAt};

use super::all_reduce::Pieces;
use crate::host::call::{Call, Operation};
use crate::host::{Data, HostEngine, InPlace, Place};

/// What a row says of an input that is no window.
const NO_WINDOW: u64 = u64::MAX;

/// Windows that send more than this to other ranks are read directly; bytes, for the square of the
/// number of ranks, for more ranks make the second phase dearer. Only as far as scratch holds it in
/// one piece: every further one would be a phase more.
const DIRECT_BYTES: usize = 1 << 10;

impl HostEngine {
    /// Sends `count` elements to every rank: segment `r` of `input` goes to rank `r`, where it
    /// becomes segment `rank` of `output`. Both hold `world * count` elements and must not overlap.
    ///
    /// # Errors
    ///
    /// As [`Self::all_reduce`].
    ///
    /// # Safety
    ///
    /// `input` is readable and `output` writable for `world * count` elements of `dtype`, and
    /// nobody else touches either, in any rank's slot if it is a window, until the call returns on
    /// every rank.
    pub unsafe fn all_to_all(
        &mut self,
        input: Place,
        output: Place,
        count: usize,
        dtype: DType,
    ) -> Result<()> {
        self.ready()?;
        let (_, all, _) = self.part_of_all(count, dtype);
        let data = self.resolve((input, all), (output, all), InPlace::Never);
        let data = self.or_decline(data)?;
        let bytes = count * dtype.size();
        let call = Call::new(Operation::AllToAll).elements(dtype, count);
        let (matrix, counts) = (Matrix::Even { bytes }, |_| (bytes as u64, bytes as u64));
        // SAFETY: the caller's promises about input and output, which `data` resolves.
        unsafe { self.exchange((data, dtype), &call, matrix, counts) }
    }

    /// Sends `send[r]` elements to rank `r` and receives `receive[r]` from it; segments lie in
    /// rank order, without gaps, in `input` and `output`, which must not overlap. Any count may be
    /// zero.
    ///
    /// # Errors
    ///
    /// As [`Self::all_reduce`]; `is_diverged`, on every rank, if a rank does not send what another
    /// expects.
    ///
    /// # Safety
    ///
    /// `input` is readable for the sum of `send` elements of `dtype` and `output` writable for the
    /// sum of `receive`, and nobody else touches either, in any rank's slot if it is a window,
    /// until the call returns on every rank.
    pub unsafe fn all_to_all_v(
        &mut self,
        input: Place,
        send: &[usize],
        output: Place,
        receive: &[usize],
        dtype: DType,
    ) -> Result<()> {
        self.ready()?;
        let (rank, world, size) = (self.rank(), self.world(), dtype.size());
        let total = |counts: &[usize]| {
            counts.iter().try_fold(0usize, |sum, n| sum.checked_add(n.checked_mul(size)?))
        };
        let data = if send.len() != world as usize || receive.len() != world as usize {
            Err(Error::invalid_argument(format!(
                "{} send and {} receive counts for {world} ranks on rank {rank}; one of each per \
                 rank is needed",
                send.len(),
                receive.len()
            )))
        } else {
            let (input, output) = ((input, total(send)), (output, total(receive)));
            self.resolve(input, output, InPlace::Never)
        };
        let data = self.or_decline(data)?;
        let bytes = |peer: usize| ((send[peer] * size) as u64, (receive[peer] * size) as u64);
        let call = Call::new(Operation::AllToAllV).elements(dtype, 0);
        // SAFETY: the caller's promises about input and output, which `data` resolves.
        unsafe { self.exchange((data, dtype), &call, Matrix::Rows, bytes) }
    }

    /// Sends and receives as many bytes as `counts` says of each rank.
    ///
    /// # Safety
    ///
    /// As [`Self::all_to_all_v`], for the resolved buffers.
    unsafe fn exchange(
        &mut self,
        (data, dtype): (Data, DType),
        call: &Call,
        matrix: Matrix,
        counts: impl Fn(usize) -> (u64, u64),
    ) -> Result<()> {
        let (rank, world) = (self.rank(), self.world());
        for peer in 0..world {
            let (sent, received) = counts(peer as usize);
            self.set_next_row(peer, sent);
            self.set_next_row(world + peer, received);
        }
        let work = Work { data, matrix, size: dtype.size(), rank, world };
        // SAFETY: the caller's promise.
        unsafe { work.run(self, call) }
    }
}

/// One all-to-all, checked and resolved. Sizes are in bytes from here on.
struct Work {
    data: Data,
    matrix: Matrix,
    /// Bytes of an element.
    size: usize,
    rank: u32,
    world: u32,
}

/// How a sender's data travels.
enum Route {
    /// Out of the sender's window at this offset.
    Direct(u64),
    Pieces(Pieces),
}

impl Work {
    /// # Safety
    ///
    /// As [`HostEngine::all_to_all_v`], for the resolved buffers; this rank's rows are shown.
    unsafe fn run(mut self, engine: &mut HostEngine, call: &Call) -> Result<()> {
        let offset = |place| match place {
            Place::Window(offset) => offset,
            Place::Plain(_) => NO_WINDOW,
        };
        let place = offset(self.data.input);
        engine.set_next_row(2 * self.world, place);
        engine.set_next_row(2 * self.world + 1, offset(self.data.output));
        // What this rank sends it knows; the rest it reads once all have entered.
        let own = self.route(self.matrix.next_stream(engine), engine, || place);
        if let Route::Pieces(pieces) = &own {
            // SAFETY: the input is readable by contract; scratch is free before entry.
            unsafe { staged::fill(&self, engine, pieces, 0, engine.next_scratch(), true) };
        }
        if !engine.enter_exchange(call)? {
            self.matrix = Matrix::Rows;
        }
        self.matrix.check(engine, self.size)?;
        let mut rounds = 0;
        let mut any_direct = false;
        for sender in 0..self.world {
            match self.route_of(engine, sender) {
                Route::Direct(_) => any_direct = true,
                Route::Pieces(pieces) => rounds = rounds.max(pieces.len()),
            }
        }
        tracing::trace!(rounds, any_direct, "all_to_all");
        for round in 0..rounds {
            if round > 0 {
                if let Route::Pieces(pieces) = &own {
                    let scratch = engine.scratch(self.rank);
                    // SAFETY: the half that held the piece before the last: every peer has
                    // signalled the last one since it read that.
                    unsafe { staged::fill(&self, engine, pieces, round, scratch, false) };
                }
                engine.step()?;
            }
            for sender in engine.peers() {
                if let Route::Pieces(pieces) = self.route_of(engine, sender) {
                    // SAFETY: the sender filled this piece before it signalled.
                    unsafe { staged::collect(&self, engine, &pieces, round, sender) };
                }
            }
        }
        // Equal parts are equal loads.
        let uneven = any_direct && !matches!(self.matrix, Matrix::Even { .. });
        let shares = uneven.then(|| self.share(engine));
        // SAFETY: the caller's promises; all ranks have entered and the matrix is agreed.
        unsafe { direct::pull(&self, engine, shares.as_ref()) };
        if let Some(shares) = shares {
            // Since the entry, where this was looked for last, this rank may have been stopped.
            if shares.writes() {
                engine.heed_abort()?;
            }
            // SAFETY: likewise.
            unsafe { direct::push(&self, engine, &shares) };
            engine.shares = shares;
        }
        if any_direct { engine.step() } else { Ok(()) }
    }

    /// Who copies how much of what travels directly.
    fn share(&self, engine: &mut HostEngine) -> Shares {
        let mut shares = std::mem::take(&mut engine.shares);
        let engine = &*engine;
        shares.plan(
            (self.rank, self.world),
            |receiver| self.matrix.received(engine, receiver).map(|(_, fitting)| fitting),
            |sender, receiver| {
                engine.row(receiver, 2 * self.world + 1) != NO_WINDOW
                    && matches!(self.route_of(engine, sender), Route::Direct(_))
            },
        );
        shares
    }

    /// How a sender's data travels, once all have entered; the same on every rank.
    fn route_of(&self, engine: &HostEngine, sender: u32) -> Route {
        let stream = self.matrix.stream(engine, sender);
        self.route(stream, engine, || engine.row(sender, 2 * self.world))
    }

    /// How `stream` bytes to others travel out of an input at `place`, which is asked only where it
    /// matters.
    fn route(&self, stream: usize, engine: &HostEngine, place: impl Fn() -> u64) -> Route {
        let direct = match engine.all_to_all_way() {
            AllToAllAlgorithm::Auto => is_direct(stream, self.world, engine.scratch_bytes()),
            AllToAllAlgorithm::Ll => false,
            AllToAllAlgorithm::Direct | AllToAllAlgorithm::Copy | AllToAllAlgorithm::Ring => true,
        };
        match if direct { place() } else { NO_WINDOW } {
            NO_WINDOW => Route::Pieces(Pieces::new(stream, 1, engine.scratch_bytes())),
            offset => Route::Direct(offset),
        }
    }
}

/// Whether a window's `stream` bytes are read where they are.
fn is_direct(stream: usize, world: u32, scratch: usize) -> bool {
    stream > (DIRECT_BYTES * (world as usize).pow(2)).min(scratch)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_go_through_scratch_in_one_piece_or_not_at_all() {
        for scratch in [256, 4096, 2 << 20] {
            for world in [1, 2, 8, 44, 45, 46, 1024] {
                let square = DIRECT_BYTES * (world as usize).pow(2);
                for stream in [0, 1, scratch - 1, scratch, scratch + 1, square, square + 1] {
                    let direct = is_direct(stream, world, scratch);
                    let pieces = Pieces::new(stream, 1, scratch).len();
                    assert!(direct || pieces <= 1, "{stream} bytes of {world} ranks");
                    assert_eq!(direct, stream > scratch || stream > square);
                }
            }
        }
    }
}
