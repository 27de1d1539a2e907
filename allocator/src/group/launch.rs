//! Groups whose ranks meet where a launcher says, or at a given address.

use std::sync::Arc;

use super::env::{Launch, StoreAddress, not_launched};
use super::{Group, Interrupt, Member, check_rank};
use crate::store::TcpServer;
use crate::{Deadline, Error, Result};

impl Group {
    /// The group that a launcher describes to this process. Rank 0 serves the store, for as long as its group or a child
    /// of it lives; all connect to it.
    ///
    /// | launcher | rank, world, rank on the machine | where rank 0 is | port |
    /// | --- | --- | --- | --- |
    /// | torchrun, Ray Train, Kubeflow, scripts | `RANK`, `WORLD_SIZE`, `LOCAL_RANK` | `MASTER_ADDR` | `MASTER_PORT` |
    /// | Open MPI | `OMPI_COMM_WORLD_RANK`, `..._SIZE`, `..._LOCAL_RANK` | here, if all ranks are | of `PMIX_NAMESPACE` |
    /// | MPICH, Intel MPI | `PMI_RANK`, `PMI_SIZE`, `MPI_LOCALRANKID` | here, if all ranks are | |
    /// | Slurm | `SLURM_PROCID`, `SLURM_NTASKS`, `SLURM_LOCALID` | `SLURM_STEP_NODELIST`, or `SLURM_LAUNCH_NODE_IPADDR` | of `SLURM_JOB_ID` and `SLURM_STEP_ID` |
    /// | LeaderWorkerSet | `LWS_WORKER_INDEX`, `LWS_GROUP_SIZE` | `LWS_LEADER_ADDRESS` | 29500 |
    /// | PMIx | `PMIX_RANK`, `WORLD_SIZE` | | of `PMIX_NAMESPACE` |
    /// | Kubernetes' indexed job | `JOB_COMPLETION_INDEX`, `WORLD_SIZE` | | 29500 |
    ///
    /// `MASTER_ADDR` and `MASTER_PORT` come first with each of them, and must be set where a place is empty here. The
    /// address is one that rank 0 can listen on. Further variables may be absent:
    ///
    /// | variable | meaning |
    /// | --- | --- |
    /// | `SYMMPOOL_PORT` | the port to use in place of `MASTER_PORT` |
    /// | `SYMMPOOL_SECRET` | what all ranks have to know, unless the address is a loopback one |
    /// | `SYMMPOOL_STORE` | `file:///DIRECTORY`: a folder in which the ranks meet, in place of address and port |
    /// | `SYMMPOOL_LAUNCHER` | the launcher to believe: `env`, `openmpi`, `mpich`, `slurm`, `lws`, `pmix` or `kubernetes` |
    ///
    /// Without `SYMMPOOL_PORT`, the port after `MASTER_PORT` is used when
    /// `TORCHELASTIC_USE_AGENT_STORE=True` says that torchrun's own store holds that one.
    ///
    /// The first launcher of the table that sets rank and world is taken. torchrun and mpirun may run in jobs of those
    /// below them, and so may anything that has more ranks. Otherwise launchers that contradict each other are an
    /// [`Error::is_invalid_argument`], as is a variable that is missing or makes no sense: it names them.
    pub fn from_env(deadline: Deadline) -> Result<Self> {
        let launch = Launch::from_env()?.ok_or_else(not_launched)?;
        Self::from_launch(&launch, deadline, None)
    }

    /// [`from_env`](Group::from_env) and [`with_interrupt`](Group::with_interrupt), which then also
    /// applies while ranks wait for the store.
    pub fn from_env_with_interrupt(
        deadline: Deadline,
        stop: impl Fn() -> bool + Send + Sync + 'static,
    ) -> Result<Self> {
        let launch = Launch::from_env()?.ok_or_else(not_launched)?;
        Self::from_launch(&launch, deadline, Some(Interrupt(Arc::new(stop))))
    }

    /// Participant `rank` of `world` that meet over TCP at `address`: a host and a port, as in
    /// `127.0.0.1:29500`. Rank 0 serves the store, as in [`from_env`](Group::from_env); `secret` is known
    /// to all ranks, and may be absent on a loopback address.
    ///
    /// Fails with [`Error::is_invalid_argument`] unless `rank < world <= `[`Group::MAX_WORLD`] and the
    /// address has a port.
    pub fn over_tcp(
        rank: u32,
        world: u32,
        address: &str,
        secret: Option<&str>,
        deadline: Deadline,
    ) -> Result<Self> {
        let launch = Self::launch_at(rank, world, address, secret)?;
        Self::from_launch(&launch, deadline, None)
    }

    /// [`over_tcp`](Group::over_tcp) and [`with_interrupt`](Group::with_interrupt), which then also
    /// applies while ranks wait for the store.
    pub fn over_tcp_with_interrupt(
        rank: u32,
        world: u32,
        address: &str,
        secret: Option<&str>,
        deadline: Deadline,
        stop: impl Fn() -> bool + Send + Sync + 'static,
    ) -> Result<Self> {
        let launch = Self::launch_at(rank, world, address, secret)?;
        Self::from_launch(&launch, deadline, Some(Interrupt(Arc::new(stop))))
    }

    fn launch_at(rank: u32, world: u32, address: &str, secret: Option<&str>) -> Result<Launch> {
        check_rank(rank, world)?;
        let parts = address.rsplit_once(':').and_then(|(host, port)| {
            let host = host.strip_prefix('[').and_then(|h| h.strip_suffix(']')).unwrap_or(host);
            Some((host, port.parse().ok().filter(|port: &u16| *port != 0)?))
        });
        let Some((host, port)) = parts.filter(|(host, _)| !host.is_empty()) else {
            return Err(Error::invalid_argument(format!(
                "store address {address:?}: a host and a port from 1 to 65535 are needed, as in \
                 127.0.0.1:29500"
            )));
        };
        let secret = secret.map(str::to_owned);
        let store = StoreAddress::Tcp(host.to_owned(), port);
        let launcher = "";
        Ok(Launch { launcher, rank, world, local_rank: None, store, one_machine: false, secret })
    }

    pub(super) fn from_launch(
        launch: &Launch,
        deadline: Deadline,
        interrupt: Option<Interrupt>,
    ) -> Result<Self> {
        let Launch { rank, world, local_rank, .. } = *launch;
        let (store, server) = launch.meet(deadline, interrupt.as_ref()).map_err(|error| {
            error.context(format!("meeting at {} as rank {rank} of {world}", launch.store))
        })?;
        let doubt = launch.doubt(server.as_ref().map(TcpServer::local_addr));
        let member = Member { rank, world, local_rank, store, doubt, _server: server };
        Ok(Self { interrupt, ..Self::of(member)? })
    }
}
