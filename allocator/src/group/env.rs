//! Groups as launchers describe them in the environment.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use xxhash_rust::xxh3::xxh3_64;

use super::Interrupt;
use super::launchers::{
    LAUNCHERS, Launcher, Leader, Lookup, OneMachine, Recognised, first_machine, optional,
    recognise, wrong,
};
use crate::store::tcp::{Secret, TcpOptions};
use crate::store::{FileStore, Store, TcpServer, TcpStore};
use crate::{Deadline, Error, Result, short};

/// Variable with a folder in which the ranks meet, in place of a TCP store: `file:///DIRECTORY`.
const FOLDER: &str = "SYMMPOOL_STORE";

/// Ports that are made of a job's number.
const JOB_PORTS: std::ops::Range<u64> = 10_000..30_000;

/// This process's place in a group, as a launcher describes it in the environment;
/// [`Group::from_env`](crate::Group::from_env) explains the variables.
#[derive(Clone, PartialEq, Eq)]
pub struct Launch {
    /// Name of the launcher.
    pub(super) launcher: &'static str,
    pub(super) rank: u32,
    pub(super) world: u32,
    pub(super) local_rank: Option<u32>,
    pub(super) store: StoreAddress,
    /// Whether the launcher says that all ranks are on one machine.
    pub(super) one_machine: bool,
    /// Secret of the group, which participants have to know. `Debug` does not show it.
    pub(super) secret: Option<String>,
}

/// Where the ranks meet.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum StoreAddress {
    /// Name or address of the machine that rank 0 runs on, and a port there.
    Tcp(String, u16),
    Folder(String),
}

impl fmt::Display for StoreAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address, port) => write!(f, "{address}:{port}"),
            Self::Folder(folder) => write!(f, "file://{folder}"),
        }
    }
}

impl Launch {
    /// Reads the environment of this process. `None` where no launcher's variables are set. Does not communicate.
    ///
    /// # Errors
    ///
    /// `is_invalid_argument` names the variable that is missing or makes no sense, or two launchers that contradict each
    /// other.
    pub fn from_env() -> Result<Option<Self>> {
        Self::from_lookup(&|name| std::env::var_os(name).map(|v| v.to_string_lossy().into_owned()))
    }

    /// Names of the variables by which launchers are recognised.
    pub fn variables() -> Vec<&'static str> {
        let names = |launcher: &'static Launcher| {
            [Some(launcher.rank), Some(launcher.world), launcher.local_rank].into_iter().flatten()
        };
        let mut all: Vec<&str> = LAUNCHERS.iter().flat_map(names).collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    /// Name of the launcher, or of its variables.
    pub fn launcher(&self) -> &'static str {
        self.launcher
    }

    /// This process's rank.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// The number of ranks.
    pub fn world(&self) -> u32 {
        self.world
    }

    /// The rank among those on this machine, if the launcher says it.
    pub fn local_rank(&self) -> Option<u32> {
        self.local_rank
    }

    /// Where the ranks meet: `HOST:PORT`, or `file:///DIRECTORY`.
    pub fn store_address(&self) -> String {
        self.store.to_string()
    }

    /// Reads variables through `lookup`.
    pub(super) fn from_lookup(lookup: Lookup<'_>) -> Result<Option<Self>> {
        let Some(found) = recognise(lookup)? else { return Ok(None) };
        let local = found.all().filter_map(|launcher| launcher.local_rank);
        let local = local.map(|name| optional(lookup, name, "a rank"));
        let local_rank = local.collect::<Result<Vec<_>>>()?.into_iter().flatten().next();
        let store = match lookup(FOLDER).filter(|folder| !folder.is_empty()) {
            Some(folder) => StoreAddress::Folder(directory(&folder)?),
            None => StoreAddress::Tcp(address(&found, lookup)?, port(&found, lookup)?),
        };
        let secret = lookup("SYMMPOOL_SECRET").filter(|secret| !secret.is_empty());
        let (rank, world, launcher) = (found.rank, found.world, found.name(lookup));
        let one_machine = is_one_machine(&found, lookup)?;
        Ok(Some(Self { launcher, rank, world, local_rank, store, one_machine, secret }))
    }

    /// Text on why ranks may not come to a store that listens at `served`: its name is one that only this machine has for
    /// itself. A launch that names the address itself means it.
    pub(super) fn doubt(&self, served: Option<SocketAddr>) -> Option<String> {
        let StoreAddress::Tcp(name, _) = &self.store else { return None };
        let is_meant = self.one_machine || name == "localhost" || name.parse::<IpAddr>().is_ok();
        let at = served.filter(|at| at.ip().is_loopback() && !is_meant)?.ip();
        Some(format!(
            "the store is at {name}, which is {at} on rank 0's machine and reaches no other one: if there are others, set \
             MASTER_ADDR to an address that they reach"
        ))
    }

    /// Connects to the store, which rank 0 serves unless it is a folder.
    pub(super) fn meet(
        &self,
        deadline: Deadline,
        interrupt: Option<&Interrupt>,
    ) -> Result<(Arc<dyn Store>, Option<TcpServer>)> {
        let (address, port) = match &self.store {
            StoreAddress::Folder(folder) => return Ok((Arc::new(FileStore::open(folder)?), None)),
            StoreAddress::Tcp(address, port) => (address.as_str(), *port),
        };
        let secret = self.secret.as_ref().map(Secret::new).transpose()?;
        let options = TcpOptions { secret, hosted_by: Some(0), ..TcpOptions::default() };
        let at = (address, port);
        let server = if self.rank == 0 {
            let server = TcpServer::bind_for_one_group(at, options.clone(), deadline);
            let server = server.map_err(|error| {
                if error.is_invalid_state() {
                    let what = "two processes say that they are rank 0, or a program that is none of the \
                                group's has the port: give each rank a number of its own (RANK), or the \
                                group another port (SYMMPOOL_PORT, MASTER_PORT)";
                    return error.naming([0]).context(what);
                }
                error.context(
                    "serving the store on MASTER_ADDR, which must be an address of rank 0's own machine (set \
                     SYMMPOOL_SECRET, the same on all ranks, where that is not a loopback address)",
                )
            })?;
            Some(server)
        } else {
            None
        };
        let requested = || interrupt.is_some_and(Interrupt::is_requested);
        let stop: Option<&dyn Fn() -> bool> = interrupt.is_some().then_some(&requested);
        let store = match &server {
            Some(server) => {
                TcpStore::connect_as_until(server.local_addr(), options, 0, deadline, stop)
            }
            None => TcpStore::connect_as_until(at, options, self.rank, deadline, stop),
        };
        Ok((Arc::new(store?), server))
    }
}

/// The error of a process that no launcher has described.
pub(super) fn not_launched() -> Error {
    let lookup = |name: &str| std::env::var_os(name);
    let advice = if lookup("PET_NNODES").is_some() || lookup("PET_NPROC_PER_NODE").is_some() {
        "; PET_* variables are for torchrun: start the program by it, without arguments"
    } else {
        ""
    };
    Error::invalid_argument(format!(
        "environment variables RANK and WORLD_SIZE are not set, and no other launcher's are: start the program by \
         torchrun, srun or mpirun, or name rank, world and address yourself{advice}"
    ))
}

/// The directory that a value of [`FOLDER`] names.
fn directory(value: &str) -> Result<String> {
    let directory = value.strip_prefix("file://").filter(|directory| directory.starts_with('/'));
    directory.map(str::to_owned).ok_or_else(|| {
        Error::invalid_argument(format!(
            "environment variable {FOLDER}={:?}: expected file:///DIRECTORY, a folder that all ranks see and this job \
             alone uses",
            short(value)
        ))
    })
}

/// Whether a launcher says that all ranks are on one machine.
fn is_one_machine(found: &Recognised, lookup: Lookup<'_>) -> Result<bool> {
    for launcher in found.all() {
        let is_one = match launcher.one_machine {
            OneMachine::Unknown => false,
            OneMachine::Ranks(name) => {
                optional(lookup, name, "a number of ranks")? == Some(found.world)
            }
            OneMachine::Machines(name) => {
                optional(lookup, name, "a number of machines")? == Some(1_u32)
            }
        };
        if is_one {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Where rank 0 is: `MASTER_ADDR`, or what a launcher says.
fn address(found: &Recognised, lookup: Lookup<'_>) -> Result<String> {
    const MASTER_ADDR: &str = "MASTER_ADDR";
    const EXPECTED: &str = "the machine of rank 0";
    if let Some(address) = optional(lookup, MASTER_ADDR, EXPECTED)? {
        return Ok(address);
    }
    if is_one_machine(found, lookup)? {
        return Ok("127.0.0.1".into());
    }
    for launcher in found.all() {
        for leader in launcher.leader {
            match leader {
                Leader::Address(name) => {
                    if let Some(address) = optional(lookup, name, EXPECTED)? {
                        return Ok(address);
                    }
                }
                Leader::FirstOf(name) => {
                    if let Some(list) = lookup(name) {
                        let first = first_machine(&list);
                        return first.ok_or_else(|| {
                            wrong(name, &format!("{:?}", short(&list)), "a list of machines")
                        });
                    }
                }
            }
        }
    }
    let by_srun = if found.launcher.key == "slurm" { "start the program by srun, or " } else { "" };
    Err(Error::invalid_argument(format!(
        "environment variable {MASTER_ADDR} is not set, and {} does not say where rank 0 is: {by_srun}set {MASTER_ADDR} to \
         {EXPECTED}, or {FOLDER}=file:///DIRECTORY to a folder that all ranks see and this job alone uses, on all ranks \
         (mpirun passes a variable on by -x NAME or -genv NAME VALUE)",
        found.name(lookup)
    )))
}

/// The store's port: `SYMMPOOL_PORT`; without it `MASTER_PORT`, or the one after it when
/// `TORCHELASTIC_USE_AGENT_STORE=True` says that torchrun's own store holds that one; else one that is made of the job.
fn port(found: &Recognised, lookup: Lookup<'_>) -> Result<u16> {
    const PORT: &str = "a port from 1 to 65535";
    match optional::<u16>(lookup, "SYMMPOOL_PORT", PORT)? {
        Some(0) => return Err(wrong("SYMMPOOL_PORT", &0, PORT)),
        Some(port) => return Ok(port),
        None => {}
    }
    if let Some(master) = optional::<u16>(lookup, "MASTER_PORT", PORT)? {
        let taken = lookup("TORCHELASTIC_USE_AGENT_STORE")
            .is_some_and(|value| value.trim().eq_ignore_ascii_case("true"));
        let port = if taken { master.checked_add(1) } else { Some(master) };
        return port.filter(|&port| port != 0 && master != 0).ok_or_else(|| {
            wrong("MASTER_PORT", &master, "a port with another after it, or SYMMPOOL_PORT")
        });
    }
    let of_job = |names: &[&str]| {
        let first = lookup(names.first()?)?;
        let rest = names[1..].iter().map(|name| lookup(name).unwrap_or_default());
        let job = rest.fold(first, |job, part| format!("{job}/{}", part.trim()));
        let port = JOB_PORTS.start + xxh3_64(job.as_bytes()) % (JOB_PORTS.end - JOB_PORTS.start);
        Some(port as u16)
    };
    let known = found.all().find_map(|launcher| of_job(launcher.job).or(launcher.port));
    known.ok_or_else(|| {
        Error::invalid_argument(format!(
            "environment variable MASTER_PORT is not set, and {} does not name its job: set it to a free port of rank \
             0's machine, on all ranks",
            found.name(lookup)
        ))
    })
}

/// The secret itself stays out of logs.
impl fmt::Debug for Launch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Launch")
            .field("launcher", &self.launcher)
            .field("rank", &self.rank)
            .field("world", &self.world)
            .field("local_rank", &self.local_rank)
            .field("store", &self.store)
            .field("secret", &self.secret.as_ref().map(|_| "(set)"))
            .finish()
    }
}

#[cfg(test)]
mod tests;
