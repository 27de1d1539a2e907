//! All-to-all in host memory: every rank sends a segment to every rank, of equal or of given sizes.
//!
//! All ranks know who sends how much before data moves: either it is one count (`all_to_all`), or every rank
//! publishes its row of the traffic matrix before the handshake (`all_to_all_v`), and every rank checks the whole
//! matrix. So ranks agree, without further messages, on how each sender's data travels:
//!
//! - `scratch` (also requested as `lamport`): through the sender's scratch, in one piece that is there before the handshake if it
//!   fits, else in several pieces, one step each.
//! - `direct`: receivers read the sender's window themselves, and a last step ends their access. Where one rank
//!   receives far more than others, senders write a part of it into its output (`load_balance`).
//!
//! Inputs and outputs may lie at different places on each rank, which the rows of the matrix say.

#![allow(unsafe_code)] // hands raw buffers to the kernels

mod by_scratch;
mod direct;
mod splits;
mod traffic_matrix;

use symmpool_allocator::{Error, Result};

use self::traffic_matrix::TrafficMatrix;
use crate::DType;
use crate::algorithm::{
    AUTO, AlgorithmId, COPY, DIRECT, LAMPORT, RING, SCRATCH, StandardCollective,
};
use crate::host::layout::load_balance::LoadBalance;

use super::pieces::Pieces;
use crate::call::{Arguments, CallDescription, OpType, StandardCall};
use crate::host::HostEngine;
use crate::host::layout::place::{Data, InPlace};
use crate::types::place::Place;

/// Stands in a row for the offset of an input or output that is not a window.
const NO_WINDOW: u64 = u64::MAX;

/// A window that sends more than this many bytes, times the square of the number of ranks, to other ranks is read
/// directly: more ranks make the second phase more expensive. So is one that does not fit into scratch in one
/// piece, as every further piece would cost another phase.
const DIRECT_BYTES: usize = 1 << 10;

/// The routes that algorithms prescribe, by number; `None` where it follows from the size.
pub(crate) static ROUTES: [(AlgorithmId, bool); 2] = [(SCRATCH, false), (DIRECT, true)];
/// Routes of names that serve on devices.
static DEVICE_ROUTES: [(AlgorithmId, bool); 3] = [(LAMPORT, false), (COPY, true), (RING, true)];

/// Whether the algorithm of this number has receivers read windows. `None` if there is no such algorithm.
pub(crate) fn route(id: AlgorithmId) -> Option<bool> {
    ROUTES.iter().chain(&DEVICE_ROUTES).find(|(each, _)| *each == id).map(|(_, direct)| *direct)
}

impl HostEngine {
    /// Sends segment `r` of the input to rank `r`, where it becomes segment `rank` of the output.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Self::all_to_all`].
    pub(crate) unsafe fn run_all_to_all(&mut self, standard: &StandardCall) -> Result<()> {
        self.ready()?;
        let algorithm = standard.algorithm;
        if algorithm != AUTO && route(algorithm).is_none() {
            return Err(self.decline(self.not_here(algorithm, StandardCollective::AllToAll)));
        }
        let Arguments { input, output, count, dtype, .. } = standard.arguments;
        let (_, all, _) = self.part_of_all(count, dtype);
        let data = self.resolve((input, all), (output, all), InPlace::Never);
        let data = self.or_decline(data)?;
        let bytes = count * dtype.size();
        let call = standard.describe().algorithm(algorithm);
        let matrix = TrafficMatrix::Even { bytes };
        let work = AllToAllCall::new(self, algorithm, data, matrix, dtype.size());
        // SAFETY: the caller promised that input and output are there for these lengths on every rank; `data` has
        // their resolved places.
        unsafe { self.exchange(work, &call, |_| (bytes as u64, bytes as u64)) }
    }

    /// Sends `send[r]` elements to rank `r` and receives `receive[r]` from it. Segments lie in rank order, without
    /// gaps, in `input` and `output`, which must not overlap. Any count may be zero.
    ///
    /// # Errors
    ///
    /// The errors of [`Self::all_reduce`]; `is_diverged`, on every rank, if a rank does not send what another
    /// expects.
    ///
    /// # Safety
    ///
    /// `input` is readable for the sum of `send` elements of `dtype` and `output` writable for the
    /// sum of `receive`, and nobody else accesses either, in any rank's slot if it is a window,
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
        let call = CallDescription::new(OpType::AllToAllV).elements(dtype, 0);
        let work = AllToAllCall::new(self, AUTO, data, TrafficMatrix::Rows, size);
        // SAFETY: the caller promised that input and output are there for these lengths on every rank; `data` has
        // their resolved places.
        unsafe { self.exchange(work, &call, bytes) }
    }

    /// Sends to and receives from each rank the numbers of bytes that `counts` gives for it.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Self::all_to_all_v`], for the resolved buffers.
    unsafe fn exchange(
        &mut self,
        work: AllToAllCall,
        call: &CallDescription,
        counts: impl Fn(usize) -> (u64, u64),
    ) -> Result<()> {
        if self.is_rehearsing() {
            return work.rehearse(self);
        }
        for peer in 0..work.world {
            let (sent, received) = counts(peer as usize);
            self.set_next_row(peer, sent);
            self.set_next_row(work.world + peer, received);
        }
        // SAFETY: the caller promised that the resolved buffers are there for the row that this rank has published.
        unsafe { work.run(self, call) }
    }
}

/// An all-to-all whose arguments were checked and resolved. Sizes are in bytes from here on.
struct AllToAllCall {
    /// Whether receivers read windows; `None` where that follows from the size.
    direct: Option<bool>,
    data: Data,
    matrix: TrafficMatrix,
    /// Bytes of an element.
    size: usize,
    rank: u32,
    world: u32,
}

/// How a sender's data travels.
enum SenderRoute {
    /// Receivers read the sender's window at this offset.
    Direct(u64),
    /// It goes through the sender's scratch in these pieces.
    Scratch(Pieces),
}

impl AllToAllCall {
    /// A call by an algorithm, or else by the one that options request.
    fn new(
        engine: &HostEngine,
        algorithm: AlgorithmId,
        data: Data,
        matrix: TrafficMatrix,
        size: usize,
    ) -> Self {
        let usual = AlgorithmId::of_all_to_all(engine.options.all_to_all);
        let direct = route(if algorithm == AUTO { usual } else { algorithm });
        Self { direct, data, matrix, size, rank: engine.rank(), world: engine.world() }
    }

    /// # Safety
    ///
    /// You must keep the promises of [`HostEngine::all_to_all_v`], for the resolved buffers; this rank's row is
    /// published.
    unsafe fn run(mut self, engine: &mut HostEngine, call: &CallDescription) -> Result<()> {
        let offset = |place| match place {
            Place::Window(offset) => offset,
            Place::Unregistered(_) => NO_WINDOW,
        };
        let place = offset(self.data.input);
        engine.set_next_row(2 * self.world, place);
        engine.set_next_row(2 * self.world + 1, offset(self.data.output));
        // This rank knows what it sends itself, and reads the other rows after the handshake.
        let own = self.route(self.matrix.next_outgoing(engine), engine, || place);
        if let SenderRoute::Scratch(pieces) = &own {
            // SAFETY: the input is readable by contract; scratch is free before the handshake.
            unsafe { by_scratch::fill(&self, engine, pieces, 0, engine.next_scratch(), true) };
        }
        if !engine.handshake_all_to_all(call)? {
            self.matrix = TrafficMatrix::Rows;
        }
        self.matrix.check(engine, self.size)?;
        let mut rounds = 0;
        let mut any_direct = false;
        for sender in 0..self.world {
            match self.route_of(engine, sender) {
                SenderRoute::Direct(_) => any_direct = true,
                SenderRoute::Scratch(pieces) => rounds = rounds.max(pieces.len()),
            }
        }
        tracing::trace!(rounds, any_direct, "all_to_all");
        for round in 0..rounds {
            if round > 0 {
                if let SenderRoute::Scratch(pieces) = &own {
                    let scratch = engine.scratch(self.rank);
                    // SAFETY: this half of scratch held the piece before the last one, and every peer has
                    // signalled the last piece since it read that.
                    unsafe { by_scratch::fill(&self, engine, pieces, round, scratch, false) };
                }
                engine.step()?;
            }
            for sender in engine.peers() {
                if let SenderRoute::Scratch(pieces) = self.route_of(engine, sender) {
                    // SAFETY: the sender filled this piece before it signalled.
                    unsafe { by_scratch::collect(&self, engine, &pieces, round, sender) };
                }
            }
        }
        // Equal parts are equal loads, which need no balancing.
        let uneven = any_direct && !matches!(self.matrix, TrafficMatrix::Even { .. });
        let balance = uneven.then(|| self.balance(engine));
        // SAFETY: the caller promised that the resolved buffers are there for the published rows; all ranks have
        // passed the handshake and agree on the matrix.
        unsafe { direct::pull(&self, engine, balance.as_ref()) };
        if let Some(balance) = balance {
            // This was checked last in the handshake. This rank may have been stopped since, for so long that a
            // peer has given up.
            if balance.writes() {
                engine.check_abort()?;
            }
            // SAFETY: the caller promised that the resolved buffers are there for the published rows; all ranks have
            // passed the handshake and agree on the matrix.
            unsafe { direct::push(&self, engine, &balance) };
            engine.load_balance = balance;
        }
        if any_direct { engine.step() } else { Ok(()) }
    }

    /// Says how this rank's data would travel, where all parts are equal.
    fn rehearse(&self, engine: &mut HostEngine) -> Result<()> {
        let outgoing = self.matrix.next_outgoing(engine);
        let route = self.route(outgoing, engine, || match self.data.input {
            Place::Window(offset) => offset,
            Place::Unregistered(_) => NO_WINDOW,
        });
        let id = if matches!(route, SenderRoute::Direct(_)) { DIRECT } else { SCRATCH };
        engine.rehearses(StandardCollective::AllToAll, id);
        Ok(())
    }

    /// Computes which rank copies how much of what travels directly.
    fn balance(&self, engine: &mut HostEngine) -> LoadBalance {
        let mut balance = std::mem::take(&mut engine.load_balance);
        let engine = &*engine;
        balance.plan(
            (self.rank, self.world),
            |receiver| self.matrix.received(engine, receiver).map(|(_, fitting)| fitting),
            |sender, receiver| {
                engine.row(receiver, 2 * self.world + 1) != NO_WINDOW
                    && matches!(self.route_of(engine, sender), SenderRoute::Direct(_))
            },
        );
        balance
    }

    /// How a sender's data travels; the same on every rank. You must call this after the handshake.
    fn route_of(&self, engine: &HostEngine, sender: u32) -> SenderRoute {
        let outgoing = self.matrix.outgoing(engine, sender);
        self.route(outgoing, engine, || engine.row(sender, 2 * self.world))
    }

    /// How `outgoing` bytes to other ranks travel from an input whose offset `place` gives; it is called only
    /// where that matters.
    fn route(&self, outgoing: usize, engine: &HostEngine, place: impl Fn() -> u64) -> SenderRoute {
        let direct =
            self.direct.unwrap_or_else(|| is_direct(outgoing, self.world, engine.scratch_bytes()));
        match if direct { place() } else { NO_WINDOW } {
            NO_WINDOW => SenderRoute::Scratch(Pieces::new(outgoing, 1, engine.scratch_bytes())),
            offset => SenderRoute::Direct(offset),
        }
    }
}

/// Whether the `outgoing` bytes of a window are read where they lie.
fn is_direct(outgoing: usize, world: u32, scratch: usize) -> bool {
    outgoing > (DIRECT_BYTES * (world as usize).pow(2)).min(scratch)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_go_through_scratch_in_one_piece_or_not_at_all() {
        for scratch in [256, 4096, 2 << 20] {
            for world in [1, 2, 8, 44, 45, 46, 1024] {
                let square = DIRECT_BYTES * (world as usize).pow(2);
                for outgoing in [0, 1, scratch - 1, scratch, scratch + 1, square, square + 1] {
                    let direct = is_direct(outgoing, world, scratch);
                    let pieces = Pieces::new(outgoing, 1, scratch).len();
                    assert!(direct || pieces <= 1, "{outgoing} bytes of {world} ranks");
                    assert_eq!(direct, outgoing > scratch || outgoing > square);
                }
            }
        }
    }
}
