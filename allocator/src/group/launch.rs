//! Groups whose ranks meet over TCP: as a launcher describes them, or at a given address.

use std::sync::Arc;

use super::env::EnvConfig;
use super::{Group, Interrupt, Member, check_rank};
use crate::{Deadline, Error, Result};

impl Group {
    /// The group that torchrun (or another launcher that sets its variables) describes to this
    /// process. Rank 0 serves the store, for as long as its group or a child of it lives; all
    /// connect to it.
    ///
    /// | variable | meaning |
    /// | --- | --- |
    /// | `RANK`, `WORLD_SIZE` | this process's number and how many there are |
    /// | `LOCAL_RANK` | its number on its machine; may be absent |
    /// | `MASTER_ADDR`, `MASTER_PORT` | the machine of rank 0, by an address that it can listen on, and a port |
    /// | `SYMMPOOL_PORT` | the port to use in place of `MASTER_PORT`; may be absent |
    /// | `SYMMPOOL_SECRET` | what all ranks have to know; may be absent where `MASTER_ADDR` is a loopback address |
    ///
    /// Without `SYMMPOOL_PORT`, the port after `MASTER_PORT` is used when
    /// `TORCHELASTIC_USE_AGENT_STORE=True` says that torchrun's own store holds that one.
    ///
    /// A variable that is missing or makes no sense is an [`Error::is_invalid_argument`] that
    /// names it and its value.
    pub fn from_env(deadline: Deadline) -> Result<Self> {
        Self::from_config(&EnvConfig::from_env()?, deadline, None)
    }

    /// [`from_env`](Group::from_env) and [`with_interrupt`](Group::with_interrupt), which then also
    /// applies while ranks wait for the store.
    pub fn from_env_with_interrupt(
        deadline: Deadline,
        stop: impl Fn() -> bool + Send + Sync + 'static,
    ) -> Result<Self> {
        let interrupt = Interrupt(Arc::new(stop));
        Self::from_config(&EnvConfig::from_env()?, deadline, Some(interrupt))
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
        let config = Self::config_for(rank, world, address, secret)?;
        Self::from_config(&config, deadline, None)
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
        let config = Self::config_for(rank, world, address, secret)?;
        Self::from_config(&config, deadline, Some(Interrupt(Arc::new(stop))))
    }

    fn config_for(rank: u32, world: u32, address: &str, secret: Option<&str>) -> Result<EnvConfig> {
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
        let address = host.to_owned();
        Ok(EnvConfig { rank, world, local_rank: None, address, port, secret })
    }

    pub(super) fn from_config(
        config: &EnvConfig,
        deadline: Deadline,
        interrupt: Option<Interrupt>,
    ) -> Result<Self> {
        let EnvConfig { rank, world, local_rank, .. } = *config;
        let (store, server) = config.meet(deadline, interrupt.as_ref()).map_err(|error| {
            let EnvConfig { address, port, .. } = config;
            error.context(format!("meeting at {address}:{port} as rank {rank} of {world}"))
        })?;
        let member = Member { rank, world, local_rank, store: Arc::new(store), _server: server };
        Ok(Self { interrupt, ..Self::of(member)? })
    }
}
