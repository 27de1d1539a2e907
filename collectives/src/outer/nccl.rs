//! Outer engines over NCCL, for data in the memory of GPUs.
//!
//! A rank has two communicators: the *rail*, between the ranks of equal index on all hosts, and *flat*, between all ranks.
//! Their ids travel through the group's store. They never block the host. Transfers go on a stream of each communicator's
//! own, so they run beside what the caller's stream does meanwhile.
//!
//! | file | holds |
//! | --- | --- |
//! | here | how ranks make outer engines, and the engines |
//! | `library` | NCCL's functions |
//! | `comm` | one communicator, and its end |
//! | `transfers` | transfers under way, and the thread that ends those that do not end |

#![allow(unsafe_code)] // passes on the caller's promises about raw memory

mod comm;
mod library;
mod transfers;

use std::sync::Arc;
use std::time::Duration;

use symmpool_allocator::{Deadline, Driver, Error, Group, Hosts, Pool, ProcessId, Result, Stream};

use self::comm::{OuterComm, Seat};
use self::library::{ID_BYTES, NcclLibrary, UniqueId, readable};
use self::transfers::{Transfers, in_context};
use super::{Outer, Outers, Ticket, Transfer};

/// Name under which ranks leave why they could not make their communicators.
const MAKING: &str = "NCCL between hosts";
/// Longest wait for the reason of a rank that could not.
const REASON_WAIT: Duration = Duration::from_secs(2);

impl Outers {
    /// Outer engines over NCCL between the ranks of a pool on GPUs of several hosts. Collective. The calling process's NCCL is
    /// used, or one that the system finds; all ranks must have the same version.
    ///
    /// Each rank has two communicators of NCCL, and no host has one of its own; where hosts have different numbers of ranks, all
    /// but their first ranks have one. They are made within twice `limit`, and each of their transfers is bounded by the timeout
    /// of [`Outer::set_timeout`], or `limit` before that is called. A transfer that takes longer is aborted by a thread of this
    /// rank, and fails the engines.
    ///
    /// # Errors
    ///
    /// On all ranks, with the ranks that are the cause: `is_unsupported` without NCCL, with one that is too old, and in host
    /// memory; `is_diverged` for different versions; `is_timeout` where a rank does not come, or NCCL does not connect the ranks;
    /// otherwise what NCCL says.
    pub fn nccl(pool: &Pool, limit: Duration) -> Result<Self> {
        let (hosts, rank) = (pool.hosts(), pool.rank());
        let group = pool.group().child("nccl").with_timeout(limit);
        let place = RailPlace::of(hosts, rank);
        let deadline = Deadline::after(limit);
        let own = offer(pool.driver(), rank, &place);
        let frame = own.as_ref().map_or_else(NcclOffer::refused, NcclOffer::frame);
        let gathered = group.all_gather("NCCL's ids", &frame, deadline)?;
        let offers = gathered.parts().map(NcclOffer::read);
        let offers: Vec<Result<NcclOffer>> = offers.collect();
        let library = own.map(|(library, _)| library);
        let ids = agreed(&offers, hosts)?;
        let made = connect(&group, pool.driver(), library?, (rank, hosts, &place), &ids, deadline);
        // A rank that has its communicators uses them only when all have theirs.
        let frame = made.as_ref().err().map(Error::message).unwrap_or_default();
        let met = group.all_gather("NCCL between hosts", frame.as_bytes(), group.deadline());
        let transfers = made?;
        let outcomes = met.inspect_err(|why| abort_made(&transfers, why))?;
        let failed = (0_u32..).zip(outcomes.parts()).find(|(_, text)| !text.is_empty());
        if let Some((rank, text)) = failed {
            let text = String::from_utf8_lossy(text);
            let why = at_rank(hosts, rank, Error::system("making NCCL's communicators", text));
            abort_made(&transfers, &why);
            return Err(why);
        }
        let shared = Arc::new(OuterPair { transfers, maker: ProcessId::here() });
        let engine = |comm: usize| -> Box<dyn Outer> {
            Box::new(NcclOuter { shared: Arc::clone(&shared), comm, limit })
        };
        let rail = place.has_rail.then(|| engine(0));
        Ok(Self { rail, flat: engine(usize::from(place.has_rail)) })
    }
}

impl Outers {
    /// Gives the other ranks an error in place of their engines. You must call this instead of [`nccl`](Self::nccl) on a rank that
    /// has found something wrong. It waits for the others as long as that does.
    #[cold]
    pub fn decline_nccl(pool: &Pool, limit: Duration, why: &Error) {
        let group = pool.group().child("nccl").with_timeout(limit);
        let frame = NcclOffer::refused(why);
        if let Err(error) = group.all_gather("NCCL's ids", &frame, Deadline::after(limit)) {
            tracing::warn!(%error, "the other ranks are not told why NCCL is not used");
        }
    }
}

/// Ends communicators that not all ranks have.
fn abort_made(transfers: &Transfers, why: &Error) {
    if let Err(error) = transfers.abort(why.clone()) {
        tracing::warn!(%error, "communicators of NCCL are left as they are");
    }
}

/// Where a rank is in the rail.
struct RailPlace {
    has_rail: bool,
    index: u32,
    host: u32,
}

impl RailPlace {
    fn of(hosts: &Hosts, rank: u32) -> Self {
        let here = hosts.here(rank);
        let index = here.iter().position(|&other| other == rank).unwrap_or(0) as u32;
        let is_alike = hosts.iter().all(|ranks| ranks.len() == here.len());
        let has_rail = hosts.count() > 1 && (is_alike || index == 0);
        Self { has_rail, index, host: hosts.of(rank) }
    }
}

/// Message of a rank to the others: its version of NCCL, and ids that others need.
#[derive(Clone, Copy)]
struct NcclOffer {
    version: u32,
    /// The ids of the communicator of all ranks and of the rail: zeros of a rank that makes none.
    flat: UniqueId,
    rail: UniqueId,
}

impl NcclOffer {
    /// The message of a rank that cannot.
    fn refused(why: &Error) -> Vec<u8> {
        [&[1], why.message().as_bytes()].concat()
    }

    fn frame((_, offer): &(NcclLibrary, Self)) -> Vec<u8> {
        [&[0], &offer.version.to_le_bytes()[..], &offer.flat.0, &offer.rail.0].concat()
    }

    fn read(frame: &[u8]) -> Result<Self> {
        let id = |from: usize| frame.get(from..from + ID_BYTES)?.try_into().ok().map(UniqueId);
        let read = || -> Option<Self> {
            let version = frame.get(1..5)?.try_into().ok().map(u32::from_le_bytes)?;
            Some(Self { version, flat: id(5)?, rail: id(5 + ID_BYTES)? })
        };
        match frame.split_first() {
            Some((0, _)) => read().ok_or_else(|| Error::invalid_state("its offer cannot be read")),
            Some((_, why)) => Err(Error::unsupported(String::from_utf8_lossy(why))),
            None => Err(Error::invalid_state("its offer is empty")),
        }
    }
}

/// This rank's NCCL, and its offer.
fn offer(driver: &Driver, rank: u32, place: &RailPlace) -> Result<(NcclLibrary, NcclOffer)> {
    in_context(driver, || {
        let library = NcclLibrary::open()?;
        let version = library.version()?.unsigned_abs();
        let none = || Ok(UniqueId([0; ID_BYTES]));
        let flat = if rank == 0 { library.unique_id() } else { none() };
        let is_first = place.has_rail && place.host == 0;
        let rail = if is_first { library.unique_id() } else { none() };
        Ok((library, NcclOffer { version, flat: flat?, rail: rail? }))
    })
}

fn at_rank(hosts: &Hosts, rank: u32, why: Error) -> Error {
    why.context(format!("rank {rank} (host {})", hosts.name(hosts.of(rank)))).naming([rank])
}

/// The offers, if all ranks can make communicators with each other: the same error on all of them otherwise.
fn agreed(offers: &[Result<NcclOffer>], hosts: &Hosts) -> Result<Vec<NcclOffer>> {
    let mut found = Vec::new();
    for (rank, offer) in (0_u32..).zip(offers) {
        found.push(offer.clone().map_err(|why| at_rank(hosts, rank, why))?);
    }
    let first = found.first().map_or(0, |offer| offer.version);
    let other = (0_u32..).zip(&found).find(|(_, offer)| offer.version != first);
    let Some((rank, offer)) = other else { return Ok(found) };
    let version = |version: u32| readable(version.cast_signed());
    Err(Error::mismatch(format!(
        "rank 0 (host {}) has NCCL {}, and rank {rank} (host {}) NCCL {}: all ranks must have the same version",
        hosts.name(hosts.of(0)),
        version(first),
        hosts.name(hosts.of(rank)),
        version(offer.version)
    ))
    .naming([0, rank]))
}

/// Makes this rank's communicators, the rail's and that of all ranks, at the same time.
fn connect(
    group: &Group,
    driver: &Driver,
    library: NcclLibrary,
    (rank, hosts, place): (u32, &Hosts, &RailPlace),
    offers: &[NcclOffer],
    deadline: Deadline,
) -> Result<Arc<Transfers>> {
    let rail = place.has_rail.then(|| {
        let first = hosts.ranks(0)[place.index as usize];
        let id = offers[first as usize].rail;
        Seat { id, rank: place.host, world: hosts.count() }
    });
    let flat = Seat { id: offers[0].flat, rank, world: hosts.world() };
    let mut comms = Vec::new();
    let made = rail.into_iter().chain([flat]).try_for_each(|seat| {
        comms.push(OuterComm::begin(library, driver, seat, deadline)?);
        Ok(())
    });
    let others = || {
        let stopped = group.has_reason(MAKING, Deadline::after(REASON_WAIT));
        let found = stopped.then(|| group.found_reason(MAKING, Deadline::after(REASON_WAIT)))?;
        found.map(|(rank, why)| at_rank(hosts, rank, why))
    };
    let made = made.and_then(|()| {
        comms.iter().try_for_each(|comm| {
            let doing = "for NCCL to connect the ranks of all hosts (NCCL_DEBUG=INFO has it say what it does, and \
                         NCCL_SOCKET_IFNAME names the interface)";
            comm.settle(doing, deadline, others)
        })
    });
    let made = made.and_then(|()| Transfers::new(driver, std::mem::take(&mut comms)));
    match made {
        Ok(transfers) => Ok(Arc::new(transfers)),
        Err(why) => {
            // Others that wait for this rank's communicator learn of it.
            if let Err(error) = group.leave_reason(MAKING, &why, Deadline::after(REASON_WAIT)) {
                tracing::warn!(%error, "the other ranks are not told why NCCL cannot be used");
            }
            comms.iter().for_each(OuterComm::begin_abort);
            let end = Deadline::after(REASON_WAIT);
            for comm in &comms {
                if let Err(error) = comm.await_end(end) {
                    tracing::warn!(%error, "a communicator of NCCL is left as it is");
                }
            }
            Err(why)
        }
    }
}

/// Part that both outer engines of a rank have in common: its end is that of the communicators.
struct OuterPair {
    transfers: Arc<Transfers>,
    maker: ProcessId,
}

impl Drop for OuterPair {
    /// Gives back the communicators. A forked child leaves its parent's alone.
    fn drop(&mut self) {
        if self.maker.is_here() {
            self.transfers.close();
        }
    }
}

/// An outer engine over NCCL.
struct NcclOuter {
    shared: Arc<OuterPair>,
    comm: usize,
    limit: Duration,
}

impl NcclOuter {
    fn seat(&self) -> &Seat {
        &self.shared.transfers.comms[self.comm].seat
    }
}

// SAFETY: NCCL reads and writes the memory of transfers on the streams of `Transfers`, for which `finish` has the caller's
// stream wait. When `abort` has returned `Ok`, NCCL has ended its kernels.
unsafe impl Outer for NcclOuter {
    fn name(&self) -> String {
        "NCCL".into()
    }

    fn rank(&self) -> u32 {
        self.seat().rank
    }

    fn world(&self) -> u32 {
        self.seat().world
    }

    fn set_timeout(&mut self, limit: Duration) {
        self.limit = limit;
    }

    unsafe fn begin(&mut self, transfer: Transfer<'_>, stream: &Stream) -> Result<Ticket> {
        self.shared.maker.check("an outer engine")?;
        let (what, world) = (described(&transfer), self.world() as usize);
        let put = |comm: &OuterComm, stream: u64| {
            comm.call(|library, raw| match transfer {
                Transfer::AllGather { output, input, bytes } => {
                    // SAFETY: the caller promised the transfer's memory, and the communicator and its stream are there.
                    unsafe { library.all_gather(raw, (input, output), bytes, stream) }
                }
                Transfer::Broadcast { data, bytes, root } => {
                    // SAFETY: the caller promised the transfer's memory, and the communicator and its stream are there.
                    unsafe { library.broadcast(raw, (data, bytes), root, stream) }
                }
                Transfer::AllToAll { output, input, send, receive } => library.grouped(|| {
                    let (mut from, mut to) = (input, output);
                    for peer in 0..world {
                        let (leaving, coming) = (send[peer], receive[peer]);
                        if leaving > 0 {
                            // SAFETY: the caller promised the transfer's memory; communicator and stream are there.
                            unsafe { library.send(raw, (from, leaving), peer, stream) }?;
                        }
                        if coming > 0 {
                            // SAFETY: the caller promised the transfer's memory; communicator and stream are there.
                            unsafe { library.receive(raw, (to, coming), peer, stream) }?;
                        }
                        (from, to) = (from.wrapping_add(leaving), to.wrapping_add(coming));
                    }
                    Ok(())
                }),
            })
        };
        self.shared.transfers.begin(self.comm, &what, self.limit, stream, put)
    }

    fn finish(&mut self, ticket: Ticket, stream: &Stream) -> Result<()> {
        self.shared.transfers.finish(ticket, stream)
    }

    fn failure(&self) -> Option<Error> {
        self.shared.transfers.failure()
    }

    fn abort(&mut self) -> Result<()> {
        if !self.shared.maker.is_here() {
            return Ok(());
        }
        self.shared.transfers.abort(Error::invalid_state("the outer engine was aborted"))
    }
}

/// A transfer, for messages.
fn described(transfer: &Transfer<'_>) -> String {
    match transfer {
        Transfer::AllGather { bytes, .. } => {
            format!("an all-gather of {bytes} bytes of each rank by NCCL")
        }
        Transfer::AllToAll { send, receive, .. } => {
            let (sent, received) = (send.iter().sum::<usize>(), receive.iter().sum::<usize>());
            format!("an all-to-all of {sent} bytes to all ranks and {received} from them by NCCL")
        }
        Transfer::Broadcast { bytes, root, .. } => {
            format!("a broadcast of {bytes} bytes of rank {root} by NCCL")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offers_are_read_as_they_were_written() {
        let offer = NcclOffer {
            version: 22809,
            flat: UniqueId([3; ID_BYTES]),
            rail: UniqueId([7; ID_BYTES]),
        };
        let written = [&[0], &offer.version.to_le_bytes()[..], &[3; ID_BYTES], &[7; ID_BYTES]];
        let read = NcclOffer::read(&written.concat()).unwrap();
        assert_eq!((read.version, read.flat.0, read.rail.0), (22809, [3; 128], [7; 128]));
        let refused =
            NcclOffer::read(&NcclOffer::refused(&Error::unsupported("no NCCL"))).err().unwrap();
        assert!(refused.is_unsupported() && refused.message().contains("no NCCL"), "{refused}");
        for cut in [&[][..], &[0], &[0, 1, 2, 3, 4, 5]] {
            assert!(NcclOffer::read(cut).err().unwrap().is_invalid_state());
        }
    }
}
