//! The two rounds through the store by which the ranks of a pool meet.
//!
//! 1. Every rank publishes a [`Hello`], or why it cannot take part. All ranks check all hellos
//!    and come to the same result without talking again.
//! 2. Where handles are file descriptors, ranks connect to each other ([`super::sockets`]). Then
//!    every rank says how that went, and which topology it sees; a failure of one is the error of
//!    all.

use serde::{Deserialize, Serialize};

use super::checks;
use super::hello::Hello;
use super::identity::HostIdentity;
use super::message::{self, Message};
use super::peers::{Peers, PerRank};
use super::sockets::{Listener, Mesh};
use super::status::{Status, agreed, all_ok, encode_status};
use crate::driver::{DeviceIdentity, Driver, Step, Transport};
use crate::store::Gathered;
use crate::topology::Topology;
use crate::{Deadline, Error, Group, Result};

/// The longest description of a configuration that travels, in bytes.
const MAX_CONFIG_TEXT: usize = 4096;

/// How long a rank that lost a peer waits to hear what the others say about it, at most.
const HEAR_OTHERS_FOR: std::time::Duration = std::time::Duration::from_secs(5);

/// Choices of one rank about whom it meets.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct HandshakeOptions {
    /// Whether another rank may use the same device. All that share one have to allow it.
    pub(crate) allow_shared_device: bool,
}

/// The first round.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Publish(pub(super) Status<Box<Hello>>);

impl Message for Publish {
    const KIND: u16 = 1;
    const NAME: &'static str = "hello";
}

/// The second round: how connecting went, and the digest of the topology as this rank sees it.
#[derive(Debug, Serialize, Deserialize)]
struct Confirm(Status<[u8; 32]>);

impl Message for Confirm {
    const KIND: u16 = 2;
    const NAME: &'static str = "confirmation";
}

/// What a rank brings to the handshake.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terms<'a> {
    pub(crate) driver: &'a Driver,
    /// Stands for everything that changes placement (rule D8).
    pub(crate) config_hash: [u8; 32],
    /// Describes it for people, one setting a line.
    pub(crate) config_text: &'a str,
    pub(crate) options: HandshakeOptions,
}

/// Meets the other ranks of `group` in order to make a pool. Collective; costs two gathers.
///
/// `terms` is the outcome of this rank's own preparation: when that failed, the other ranks learn
/// why instead of waiting. An error that concerns all ranks is the same on all of them: different
/// protocol versions ([`Error::is_refused`]), configurations or drivers ([`Error::is_diverged`]),
/// one device twice ([`Error::is_invalid_argument`]), ranks that file descriptors cannot reach
/// ([`Error::is_unsupported`]), and whatever made a single rank fail.
pub(crate) fn handshake(
    group: &Group,
    terms: Result<Terms<'_>>,
    deadline: Deadline,
) -> Result<Peers> {
    let doing = |error: Error| error.context("meeting the other ranks of the pool");
    let ready = terms.and_then(|terms| Ok((terms.driver, prepare(&terms)?)));
    let (hello, ready) = match ready {
        Ok((driver, (hello, listener))) => (Ok(Box::new(hello)), Ok((driver, listener))),
        Err(error) => (Err(error.kind().clone()), Err(error)),
    };
    let hello = encode_status(Publish, hello)?;
    let gathered = group.all_gather("hello", &hello, deadline).map_err(|error| {
        // This rank stayed to tell the others; what it had to tell is the error here.
        doing(ready.as_ref().err().cloned().unwrap_or(error))
    })?;
    let distinct = read_hellos(&gathered).map_err(doing)?;
    // A rank that was not ready has said so, and all have returned above.
    let (driver, listener) = ready?;
    let hellos: Vec<&Hello> = gathered.which().iter().map(|&at| &distinct[at as usize]).collect();
    checks::agree(&hellos).map_err(doing)?;
    let secret = secret_of(&gathered);

    let connected = connect(group.rank(), driver, &hellos, &secret, listener, deadline);
    let devices = PerRank::new(hellos.iter().map(|hello| &hello.device));
    let confirmed = connected.and_then(|mesh| {
        driver.at_step(Step::HandshakeConfirm)?;
        let devices: Vec<DeviceIdentity> = devices.iter().cloned().collect();
        let mesh = mesh.map(|mesh| mesh.with_interrupt(group.interrupt()));
        Ok(Linked { mesh, topology: Topology::detect(&devices)? })
    });
    let Linked { mesh, topology } = confirm(group, confirmed, deadline).map_err(doing)?;
    Ok(Peers {
        rank: group.rank(),
        hosts: PerRank::new(hellos.iter().map(|hello| &hello.host)),
        devices,
        transport: hellos[0].transport,
        topology,
        mesh,
        missed: None,
    })
}

/// Everything this rank needs before it can meet others.
fn prepare(terms: &Terms<'_>) -> Result<(Hello, Option<Listener>)> {
    let Terms { driver, config_hash, config_text, options } = *terms;
    driver.at_step(Step::HandshakePublish)?;
    let transport = driver.transport();
    let listener = match transport {
        Transport::UnixSocket => Some(Listener::bind()?),
        Transport::Store | Transport::Derived => None,
    };
    let nonce = match transport {
        Transport::UnixSocket | Transport::Store => super::random()?,
        Transport::Derived => [0; 16],
    };
    let end = config_text.floor_char_boundary(MAX_CONFIG_TEXT);
    let hello = Hello {
        config_hash,
        config_text: config_text[..end].to_owned(),
        host: HostIdentity::current()?,
        device: driver.device(),
        allow_shared_device: options.allow_shared_device,
        transport,
        granularity: driver.granularity(),
        listener: listener.as_ref().map(|listener| listener.name().to_owned()),
        nonce,
    };
    Ok((hello, listener))
}

/// The distinct hellos, or the error of the first ranks that could not send one.
fn read_hellos(gathered: &Gathered) -> Result<Vec<Hello>> {
    checks::versions(gathered)?;
    let mut hellos = Vec::with_capacity(gathered.distinct().len());
    let mut failures = Vec::new();
    for (at, part) in (0u32..).zip(gathered.distinct()) {
        let mut ranks = (0u32..).zip(gathered.which()).filter(|(_, which)| **which == at);
        let first = ranks.next().map_or(0, |(rank, _)| rank);
        match message::decode::<Publish>(first, part)?.0 {
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

/// The group's secret: only those know it who know everything that was published.
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

/// Connects to the other ranks where that is needed. Takes three quarters of the time there is,
/// so that a failure can still be told.
fn connect(
    rank: u32,
    driver: &Driver,
    hellos: &[&Hello],
    secret: &[u8; 32],
    listener: Option<Listener>,
    deadline: Deadline,
) -> Result<Option<Mesh>> {
    let ready = driver.at_step(Step::HandshakeConnect);
    let Some(listener) = listener else { return ready.map(|()| None) };
    let names: Option<Vec<&str>> = hellos.iter().map(|hello| hello.listener.as_deref()).collect();
    let names = names.ok_or_else(|| Error::mismatch("a rank announced no socket to connect to"))?;
    if let Err(error) = ready {
        Mesh::decline(listener, rank, &names, secret, &error);
        return Err(error);
    }
    let deadline = Deadline::after(deadline.remaining() / 4 * 3);
    Mesh::connect(listener, rank, &names, secret, deadline).map(Some)
}

/// What a rank brings to the second round.
#[derive(Debug)]
struct Linked {
    mesh: Option<Mesh>,
    topology: Topology,
}

/// Tells the others how connecting went, and hears from them.
///
/// Where ranks see different topologies (containers that show each only its own device), nothing
/// is wrong with their memory; but algorithms are chosen by topology and have to be the same, so
/// all ranks then go by none.
fn confirm(group: &Group, ours: Result<Linked>, deadline: Deadline) -> Result<Linked> {
    let (status, wait_until) = match &ours {
        Ok(linked) => (digest_of(&linked.topology).map_err(|e| e.kind().clone()), deadline),
        // A lost peer will not answer: hear what the others have to say, and leave.
        Err(error) if error.is_peer_lost() => {
            let soon = deadline.remaining().min(HEAR_OTHERS_FOR);
            (Err(error.kind().clone()), Deadline::after(soon))
        }
        Err(error) => (Err(error.kind().clone()), deadline),
    };
    let confirmation = encode_status(Confirm, status)?;
    let gone = || match &ours {
        Ok(Linked { mesh: Some(mesh), .. }) => mesh.lost_peers(),
        Ok(Linked { mesh: None, .. }) => Vec::new(),
        Err(error) if error.is_peer_lost() => error.ranks().to_vec(),
        Err(_) => Vec::new(),
    };
    let gathered = group.all_gather_from_living("confirm", &confirmation, wait_until, gone);
    let gathered = match gathered {
        Ok(gathered) => gathered,
        Err(error) => return Err(without_all(error, ours)),
    };
    let said: Vec<Confirm> = message::decode_all(&gathered)?;
    let digests = all_ok("the handshake", said.into_iter().map(|Confirm(status)| status))?;
    let Some(other) = digests.iter().position(|digest| *digest != digests[0]) else { return ours };
    tracing::warn!(
        rank = group.rank(),
        "rank 0 and rank {other} see different links between the ranks' devices, so all ranks go by \
         none: algorithms that count on NVLink are left out; have every rank see all devices (in its \
         container, too), or none"
    );
    ours.map(|linked| Linked { topology: Topology::unknown(linked.topology.world()), ..linked })
}

fn digest_of(topology: &Topology) -> Result<[u8; 32]> {
    let bytes = postcard::to_stdvec(topology)
        .map_err(|error| Error::system("encoding the topology", error))?;
    Ok(blake3::hash(&bytes).into())
}

/// What it means that the confirmations did not all come.
///
/// The store names all ranks that are not waiting any more, also those that gave up waiting a
/// moment before this one; closed connections tell which of them are gone.
fn without_all(error: Error, ours: Result<Linked>) -> Error {
    let gone = match &ours {
        Err(ours) if !ours.is_peer_lost() => return ours.clone(),
        Err(ours) => ours.ranks().to_vec(),
        Ok(linked) => linked.mesh.as_ref().map(Mesh::lost_peers).unwrap_or_default(),
    };
    if !error.is_timeout() {
        return error;
    }
    let missing = error.ranks();
    let lost: Vec<u32> = gone.into_iter().filter(|rank| missing.contains(rank)).collect();
    match ours {
        _ if !lost.is_empty() => Error::peer_lost(lost, "gone before the pool was made"),
        // Those that seemed lost did answer: the loss was a consequence, and these are its cause.
        Err(_) if !missing.is_empty() => {
            Error::peer_lost(missing.to_vec(), "gone before the pool was made")
        }
        Err(ours) => ours,
        Ok(_) => error,
    }
}

#[cfg(test)]
mod tests;
