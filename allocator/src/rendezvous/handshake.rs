//! The rendezvous handshake: two rounds by which the ranks of a pool find each other.
//!
//! 1. Every rank publishes a [`Hello`] in the store, or the reason why it cannot take part. All ranks check all hellos
//!    and come to the same result without further messages.
//! 2. Where handles are file descriptors, the ranks of a host connect to each other ([`super::sockets`]). Then every rank
//!    reports whether that succeeded, and which topology it sees; a failure of one is the error of all. Reports travel
//!    on the connections. A rank that lacks one closes the others and reports in the store, and so do all that see it
//!    go, ranks that need no connections, and ranks of several hosts.

use serde::{Deserialize, Serialize};

use super::checks;
use super::hello::Hello;
use super::identity::HostIdentity;
use super::message::{self, Message};
use super::peers::{Peers, PerRank};
use super::sockets::{Listener, PeerSockets};
use super::status::{RankStatus, agreed, all_ok, encode_status};
use crate::driver::{DeviceIdentity, Driver, Step, Transport};
use crate::group::Hosts;
use crate::random::random_bytes;
use crate::store::Gathered;
use crate::topology::Topology;
use crate::{Deadline, Error, Group, Result};

/// The longest description of a configuration that travels, in bytes.
const MAX_CONFIG_TEXT: usize = 4096;

/// How long a rank that lost a peer waits at most for the confirmations of the others.
const WAIT_AFTER_LOSS: std::time::Duration = std::time::Duration::from_secs(5);

/// Properties of other ranks that a rank accepts.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct HandshakeOptions {
    /// Whether another rank may use the same device. All ranks that share a device have to allow it.
    pub(crate) allow_shared_device: bool,
}

/// The first round.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Publish(pub(super) RankStatus<Box<Hello>>);

impl Message for Publish {
    const KIND: u16 = 1;
    const NAME: &'static str = "hello";
}

/// The second round: whether connecting succeeded, and the digest of the topology as this rank sees it.
#[derive(Debug, Serialize, Deserialize)]
struct Confirm(RankStatus<[u8; 32]>);

impl Message for Confirm {
    const KIND: u16 = 2;
    const NAME: &'static str = "confirmation";
}

/// Contribution of a rank to the handshake.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HandshakeConfig<'a> {
    pub(crate) driver: &'a Driver,
    /// Stands for everything that changes placement (rule D8).
    pub(crate) config_hash: [u8; 32],
    /// Describes it for people, one setting per line.
    pub(crate) config_text: &'a str,
    pub(crate) options: HandshakeOptions,
    /// Whether this process has no other pool on the device.
    pub(crate) first_on_device: bool,
}

/// Finds the other ranks of `group` in order to make a pool. Collective; costs one gather in the store, and a second
/// one where ranks have no connections.
///
/// `terms` is the result of this rank's own preparation: if that failed, the other ranks get the reason
/// instead of waiting. An error that concerns all ranks is the same on all of them: different
/// protocol versions ([`Error::is_refused`]), configurations or drivers ([`Error::is_diverged`]),
/// one device twice ([`Error::is_invalid_argument`]), and whatever made a single rank fail.
///
/// `settle` makes what depends on which ranks share a host with this one. It is called once that is known, and its error is
/// the error of all ranks.
pub(crate) fn handshake<T>(
    group: &Group,
    terms: Result<HandshakeConfig<'_>>,
    settle: impl FnOnce(&Hosts) -> Result<T>,
    deadline: Deadline,
) -> Result<(Peers, T)> {
    let doing = |error: Error| error.context("meeting the other ranks of the pool");
    let ready = terms.and_then(|terms| Ok((terms.driver, prepare(group, &terms)?)));
    let (hello, ready) = match ready {
        Ok((driver, (hello, listener))) => (Ok(Box::new(hello)), Ok((driver, listener))),
        Err(error) => (Err(error.kind().clone()), Err(error)),
    };
    let hello = encode_status(Publish, hello)?;
    let gathered = group.all_gather("hello", &hello, deadline).map_err(|error| {
        // This rank took part only to report its own failure, which is the error here.
        doing(ready.as_ref().err().cloned().unwrap_or(error))
    })?;
    let distinct = read_hellos(&gathered).map_err(doing)?;
    // If a rank was not ready, it has published that, and all ranks have returned above.
    let (driver, listener) = ready?;
    let hellos: Vec<&Hello> = gathered.which().iter().map(|&at| &distinct[at as usize]).collect();
    checks::agree(&hellos).map_err(doing)?;
    let secret = secret_of(&gathered);
    let hosts = hosts_of(&hellos);

    let settled = settle(&hosts);
    let ready = settled.as_ref().map(drop).map_err(Clone::clone);
    let ready = ready.and_then(|()| driver.at_step(Step::HandshakeConnect));
    let place = (group.rank(), &hosts);
    let connected = connect(ready, place, &hellos, &secret, listener, deadline);
    let connected =
        connected.map(|sockets| sockets.map(|sockets| sockets.with_interrupt(group.interrupt())));
    let devices = PerRank::new(hellos.iter().map(|hello| &hello.device));
    let topology = || {
        driver.at_step(Step::HandshakeConfirm)?;
        let here = hosts.here(group.rank()).iter();
        let devices: Vec<DeviceIdentity> = here.map(|&rank| devices.get(rank).clone()).collect();
        Topology::detect(&devices)
    };
    let confirmed = match connected {
        Ok(Some(sockets)) if hosts.count() == 1 => {
            confirm_on_sockets(group, &hosts, sockets, topology(), deadline)
        }
        Ok(sockets) => {
            let linked = topology().map(|topology| Linked { sockets, topology });
            confirm(group, &hosts, linked, deadline)
        }
        Err(error) => confirm(group, &hosts, Err(error), deadline),
    };
    let Linked { sockets, topology } = confirmed.map_err(doing)?;
    // Had this failed, no rank had confirmed.
    let settled = settled?;
    let peers = Peers {
        rank: group.rank(),
        identities: PerRank::new(hellos.iter().map(|hello| &hello.host)),
        hosts,
        devices,
        first_on_device: hellos.iter().all(|hello| hello.first_on_device),
        transport: hellos[0].transport,
        topology,
        sockets,
        missed: None,
    };
    Ok((peers, settled))
}

/// Which ranks can map each other's memory. File descriptors reach the ranks of one host; other handles reach all ranks, but
/// those that pretend to be elsewhere.
fn hosts_of(hellos: &[&Hello]) -> Hosts {
    let identities: Vec<&HostIdentity> = hellos.iter().map(|hello| &hello.host).collect();
    match hellos[0].transport {
        Transport::UnixSocket => Hosts::from_identities(&identities),
        Transport::Store | Transport::Derived => {
            let pretended = |host: &&HostIdentity| (host.host_id.clone(), host.host_name());
            Hosts::new(identities.iter().map(pretended))
        }
    }
}

/// Makes everything that this rank needs for the first round.
fn prepare(group: &Group, terms: &HandshakeConfig<'_>) -> Result<(Hello, Option<Listener>)> {
    let HandshakeConfig { driver, config_hash, config_text, options, first_on_device } = *terms;
    driver.at_step(Step::HandshakePublish)?;
    let transport = driver.transport();
    let listener = match transport {
        Transport::UnixSocket => Some(Listener::bind()?),
        Transport::Store | Transport::Derived => None,
    };
    let nonce = match transport {
        Transport::UnixSocket | Transport::Store => random_bytes()?,
        Transport::Derived => [0; 16],
    };
    let end = config_text.floor_char_boundary(MAX_CONFIG_TEXT);
    let hello = Hello {
        config_hash,
        config_text: config_text[..end].to_owned(),
        host: group.identity()?,
        device: driver.device(),
        allow_shared_device: options.allow_shared_device,
        transport,
        granularity: driver.granularity(),
        first_on_device,
        listener: listener.as_ref().map(|listener| listener.name().to_owned()),
        nonce,
    };
    Ok((hello, listener))
}

/// The distinct hellos, or the error on which ranks agree if some could not send one.
fn read_hellos(gathered: &Gathered) -> Result<Vec<Hello>> {
    checks::versions(gathered)?;
    let mut hellos = Vec::with_capacity(gathered.distinct().len());
    let mut failures = Vec::new();
    for (at, part) in (0u32..).zip(gathered.distinct()) {
        let mut ranks = (0u32..).zip(gathered.which()).filter(|(_, which)| **which == at);
        let first = ranks.next().map_or(0, |(rank, _)| rank);
        match message::decode::<Publish>(first, part)?.0 {
            Ok(hello) if hello.config_text.len() > MAX_CONFIG_TEXT => {
                return Err(Error::mismatch(format!(
                    "rank {first} describes its pool in {} bytes; at most {MAX_CONFIG_TEXT} are read",
                    hello.config_text.len()
                ))
                .naming([first]));
            }
            Ok(hello) => hellos.push(*hello),
            Err(kind) => {
                failures.push((first, kind.clone()));
                failures.extend(ranks.map(|(rank, _)| (rank, kind.clone())));
            }
        }
    }
    failures.sort_by_key(|(rank, _)| *rank);
    agreed("the handshake", &failures).map_or(Ok(hellos), Err)
}

/// For fuzz targets: what a rank does with a hello of its peer.
#[cfg(feature = "testing")]
pub(super) fn fuzzed_hello(part: &[u8]) {
    let gathered = Gathered::from_parts([part, part]);
    if let Ok(distinct) = read_hellos(&gathered) {
        let hellos: Vec<&Hello> =
            gathered.which().iter().map(|&at| &distinct[at as usize]).collect();
        let _ = (checks::agree(&hellos), hosts_of(&hellos), secret_of(&gathered));
    }
}

/// The group's secret: it is known only to those who know everything that was published.
fn secret_of(gathered: &Gathered) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new_derive_key("symmpool 2026 group secret");
    hasher.update(&gathered.world().to_le_bytes());
    for part in gathered.distinct() {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part);
    }
    for which in gathered.which() {
        hasher.update(&which.to_le_bytes());
    }
    hasher.finalize().into()
}

/// Connects to the other ranks of this host, if handles are file descriptors. Takes at most three quarters of the time
/// that is left, so that a failure can still be reported.
fn connect(
    ready: Result<()>,
    (rank, hosts): (u32, &Hosts),
    hellos: &[&Hello],
    secret: &[u8; 32],
    listener: Option<Listener>,
    deadline: Deadline,
) -> Result<Option<PeerSockets>> {
    let Some(listener) = listener else { return ready.map(|()| None) };
    if hellos.iter().any(|hello| hello.listener.is_none()) {
        return Err(Error::mismatch("a rank announced no socket to connect to"));
    }
    let here = hosts.of(rank);
    let names = (0..)
        .zip(hellos)
        .map(|(peer, hello)| hello.listener.as_deref().filter(|_| hosts.of(peer) == here));
    let names: Vec<Option<&str>> = names.collect();
    if let Err(error) = ready {
        PeerSockets::decline(listener, rank, &names, secret, &error);
        return Err(error);
    }
    let deadline = Deadline::after(deadline.remaining() / 4 * 3);
    PeerSockets::connect(listener, rank, &names, secret, deadline).map(Some)
}

/// Contribution of a rank to the second round.
#[derive(Debug)]
struct Linked {
    sockets: Option<PeerSockets>,
    topology: Topology,
}

/// [`confirm`] of a rank that is connected to all others, on these connections.
fn confirm_on_sockets(
    group: &Group,
    hosts: &Hosts,
    mut sockets: PeerSockets,
    topology: Result<Topology>,
    deadline: Deadline,
) -> Result<Linked> {
    let status = topology
        .as_ref()
        .map_err(|error| error.kind().clone())
        .and_then(|topology| digest_of(topology).map_err(|error| error.kind().clone()));
    let confirmation = encode_status(Confirm, status)?;
    match sockets.all_gather("confirm", &confirmation, deadline) {
        Ok(gathered) => {
            let ours = topology.map(|topology| Linked { sockets: Some(sockets), topology });
            conclude(group.rank(), hosts, &gathered, ours)
        }
        Err(error) if error.is_timeout() || error.is_interrupted() => Err(error),
        // Perhaps a rank that is not connected to all others, and reports that in the store. Before it closed the connections
        // that it has, it may have said why, which is no error of this rank.
        Err(error) => confirm(group, hosts, Err(sockets.loss().unwrap_or(error)), deadline),
    }
}

/// Reports to the others through the store whether connecting succeeded, and receives their reports.
fn confirm(
    group: &Group,
    hosts: &Hosts,
    ours: Result<Linked>,
    deadline: Deadline,
) -> Result<Linked> {
    let (status, wait_until) = match &ours {
        Ok(linked) => (digest_of(&linked.topology).map_err(|e| e.kind().clone()), deadline),
        // A lost peer will not answer: wait shortly for what the others report, and leave.
        Err(error) if error.is_peer_lost() => {
            let soon = deadline.remaining().min(WAIT_AFTER_LOSS);
            (Err(error.kind().clone()), Deadline::after(soon))
        }
        Err(error) => (Err(error.kind().clone()), deadline),
    };
    let confirmation = encode_status(Confirm, status)?;
    let gone = || match &ours {
        Err(error) if error.is_peer_lost() => error.ranks().to_vec(),
        _ => Vec::new(),
    };
    let gathered = group.all_gather_from_living("confirm", &confirmation, wait_until, gone);
    let gathered = match gathered {
        Ok(gathered) => gathered,
        Err(error) => return Err(missing_confirmations(error, ours)),
    };
    conclude(group.rank(), hosts, &gathered, ours)
}

/// Returns the result of all ranks' reports, which is the same on each of them.
///
/// If ranks see different topologies (as in containers that show each rank only its own device), nothing is
/// wrong with their memory. But algorithms are chosen by topology and have to be the same on all ranks, so
/// then all ranks of their host use an unknown topology.
fn conclude(rank: u32, hosts: &Hosts, gathered: &Gathered, ours: Result<Linked>) -> Result<Linked> {
    let confirmations: Vec<Confirm> = message::decode_all(gathered)?;
    let digests = all_ok("the handshake", confirmations.into_iter().map(|Confirm(status)| status))?;
    let here = hosts.here(rank);
    let digest = |rank: u32| digests[rank as usize];
    let other = here.iter().find(|&&other| digest(other) != digest(here[0]));
    let Some(other) = other else { return ours };
    tracing::warn!(
        rank,
        "rank {} and rank {other} see different links between the ranks' devices, so all ranks go by \
         none: algorithms that count on NVLink are left out; have every rank see all devices (in its \
         container, too), or none",
        here[0]
    );
    ours.map(|linked| Linked { topology: Topology::unknown(linked.topology.world()), ..linked })
}

fn digest_of(topology: &Topology) -> Result<[u8; 32]> {
    let bytes = postcard::to_stdvec(topology)
        .map_err(|error| Error::system("encoding the topology", error))?;
    Ok(blake3::hash(&bytes).into())
}

/// The error of a rank that did not receive all confirmations.
///
/// The store names all ranks that no longer wait, including those that stopped waiting a moment before this
/// one. Closed connections show which of them are gone.
fn missing_confirmations(error: Error, ours: Result<Linked>) -> Error {
    let gone = match &ours {
        Err(ours) if !ours.is_peer_lost() => return ours.clone(),
        Err(ours) => ours.ranks().to_vec(),
        Ok(_) => Vec::new(),
    };
    if !error.is_timeout() {
        return error;
    }
    let missing = error.ranks();
    let lost: Vec<u32> = gone.into_iter().filter(|rank| missing.contains(rank)).collect();
    match ours {
        _ if !lost.is_empty() => Error::peer_lost(lost, "gone before the pool was made"),
        // The ranks that seemed lost did answer: their loss was a consequence, and the missing ranks are the
        // cause.
        Err(_) if !missing.is_empty() => {
            Error::peer_lost(missing.to_vec(), "gone before the pool was made")
        }
        Err(ours) => ours,
        Ok(_) => error,
    }
}

#[cfg(test)]
mod tests;
