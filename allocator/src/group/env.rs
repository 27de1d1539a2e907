//! Groups as launchers describe them: torchrun's environment variables.

use std::fmt;
use std::str::FromStr;

use super::Interrupt;
use crate::store::tcp::{Secret, TcpOptions};
use crate::store::{TcpServer, TcpStore};
use crate::{Deadline, Error, Group, Result};

/// Description of this process's group in the environment; [`super::Group::from_env`] explains the variables.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct EnvConfig {
    /// This process's rank.
    pub(crate) rank: u32,
    /// The number of ranks.
    pub(crate) world: u32,
    /// The rank among those on this machine.
    pub(crate) local_rank: Option<u32>,
    /// Name or address of the machine that rank 0 runs on.
    pub(crate) address: String,
    /// The port there.
    pub(crate) port: u16,
    /// Secret of the group, which participants have to know. `Debug` does not show it.
    pub(crate) secret: Option<String>,
}

impl EnvConfig {
    /// Reads the environment of this process.
    pub(crate) fn from_env() -> Result<Self> {
        Self::from_lookup(|name| std::env::var_os(name).map(|v| v.to_string_lossy().into_owned()))
    }

    /// Reads variables through `lookup`.
    ///
    /// The port is `SYMMPOOL_PORT`; without it `MASTER_PORT`, or the one after it when
    /// `TORCHELASTIC_USE_AGENT_STORE=True` says that torchrun's own store holds that one. Each
    /// variable that is missing or makes no sense is an [`Error::is_invalid_argument`] that names
    /// it and its value.
    pub(crate) fn from_lookup(lookup: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let world: u32 = required(&lookup, "WORLD_SIZE", "a number of ranks")?;
        let rank: u32 = required(&lookup, "RANK", "a rank")?;
        if world == 0 || world > Group::MAX_WORLD {
            return Err(wrong("WORLD_SIZE", &world, &format!("1 to {}", Group::MAX_WORLD)));
        }
        if rank >= world {
            return Err(wrong("RANK", &rank, &format!("a rank below WORLD_SIZE={world}")));
        }
        let local_rank = optional(&lookup, "LOCAL_RANK", "a rank")?;
        let address: String = required(&lookup, "MASTER_ADDR", "the machine of rank 0")?;
        let port = match optional::<u16>(&lookup, "SYMMPOOL_PORT", PORT)? {
            Some(0) => return Err(wrong("SYMMPOOL_PORT", &0, PORT)),
            Some(port) => port,
            None => Self::master_port(&lookup)?,
        };
        let secret = lookup("SYMMPOOL_SECRET").filter(|secret| !secret.is_empty());
        Ok(Self { rank, world, local_rank, address, port, secret })
    }

    /// Connects to the store, which rank 0 serves.
    pub(super) fn meet(
        &self,
        deadline: Deadline,
        interrupt: Option<&Interrupt>,
    ) -> Result<(TcpStore, Option<TcpServer>)> {
        let secret = self.secret.as_ref().map(Secret::new).transpose()?;
        let options = TcpOptions { secret, hosted_by: Some(0), ..TcpOptions::default() };
        let at = (self.address.as_str(), self.port);
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
                    "serving the store on MASTER_ADDR (set SYMMPOOL_SECRET, the same on all \
                     ranks, where that is not a loopback address)",
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
        Ok((store?, server))
    }

    fn master_port(lookup: &impl Fn(&str) -> Option<String>) -> Result<u16> {
        let master: u16 = required(lookup, "MASTER_PORT", PORT)?;
        let taken = lookup("TORCHELASTIC_USE_AGENT_STORE")
            .is_some_and(|value| value.trim().eq_ignore_ascii_case("true"));
        let port = if taken { master.checked_add(1) } else { Some(master) };
        port.filter(|&port| port != 0).ok_or_else(|| {
            wrong("MASTER_PORT", &master, "a port with another after it, or SYMMPOOL_PORT")
        })
    }
}

/// The secret itself stays out of logs.
impl fmt::Debug for EnvConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EnvConfig")
            .field("rank", &self.rank)
            .field("world", &self.world)
            .field("local_rank", &self.local_rank)
            .field("address", &self.address)
            .field("port", &self.port)
            .field("secret", &self.secret.as_ref().map(|_| "(set)"))
            .finish()
    }
}

const PORT: &str = "a port from 1 to 65535";

fn wrong(name: &str, value: &dyn fmt::Display, expected: &str) -> Error {
    Error::invalid_argument(format!(
        "environment variable {name}={value}: expected {expected}; torchrun and similar launchers \
         set it"
    ))
}

fn optional<T: FromStr>(
    lookup: &impl Fn(&str) -> Option<String>,
    name: &str,
    expected: &str,
) -> Result<Option<T>> {
    let Some(value) = lookup(name) else { return Ok(None) };
    let trimmed = value.trim();
    match trimmed.parse() {
        Ok(parsed) if !trimmed.is_empty() => Ok(Some(parsed)),
        _ => Err(wrong(name, &format!("{value:?}"), expected)),
    }
}

fn required<T: FromStr>(
    lookup: &impl Fn(&str) -> Option<String>,
    name: &str,
    expected: &str,
) -> Result<T> {
    optional(lookup, name, expected)?.ok_or_else(|| wrong(name, &" (not set)", expected))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TORCHRUN: [(&str, &str); 5] = [
        ("RANK", "3"),
        ("WORLD_SIZE", "8"),
        ("LOCAL_RANK", "1"),
        ("MASTER_ADDR", "node0"),
        ("MASTER_PORT", "29500"),
    ];

    /// torchrun's variables, some of them changed (`None`: removed).
    fn with(changes: &[(&str, Option<&str>)]) -> Result<EnvConfig> {
        EnvConfig::from_lookup(|name| match changes.iter().find(|(changed, _)| *changed == name) {
            Some((_, value)) => value.map(str::to_owned),
            None => TORCHRUN.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned()),
        })
    }

    #[test]
    fn torchruns_variables_are_understood() {
        let expected = EnvConfig {
            rank: 3,
            world: 8,
            local_rank: Some(1),
            address: "node0".into(),
            port: 29500,
            secret: None,
        };
        assert_eq!(with(&[]).unwrap(), expected);
        assert_eq!(with(&[("LOCAL_RANK", None)]).unwrap().local_rank, None);
    }

    #[test]
    fn the_port_avoids_torchruns_own_store() {
        let agent = ("TORCHELASTIC_USE_AGENT_STORE", Some("True"));
        assert_eq!(with(&[agent]).unwrap().port, 29501);
        let off = ("TORCHELASTIC_USE_AGENT_STORE", Some("False"));
        assert_eq!(with(&[off]).unwrap().port, 29500);
        assert_eq!(with(&[agent, ("SYMMPOOL_PORT", Some("7000"))]).unwrap().port, 7000);
        let no_master = with(&[("SYMMPOOL_PORT", Some("7000")), ("MASTER_PORT", None)]);
        assert_eq!(no_master.unwrap().port, 7000);
        let last = with(&[agent, ("MASTER_PORT", Some("65535"))]).unwrap_err();
        assert!(last.to_string().contains("MASTER_PORT=65535"), "{last}");
    }

    #[test]
    fn every_wrong_variable_is_named_with_its_value() {
        for (name, value) in [
            ("RANK", "minus one"),
            ("RANK", "8"),
            ("RANK", ""),
            ("WORLD_SIZE", "0"),
            ("WORLD_SIZE", "99999999"),
            ("LOCAL_RANK", "-1"),
            ("MASTER_ADDR", " "),
            ("MASTER_PORT", "0"),
            ("MASTER_PORT", "70000"),
            ("SYMMPOOL_PORT", "0"),
            ("SYMMPOOL_PORT", "http"),
        ] {
            let error = with(&[(name, Some(value))]).unwrap_err();
            assert!(error.is_invalid_argument());
            let text = error.to_string();
            assert!(text.contains(name) && text.contains(value), "{name}={value:?}: {text}");
        }
        for name in ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"] {
            let text = with(&[(name, None)]).unwrap_err().to_string();
            assert!(text.contains(name) && text.contains("not set"), "{text}");
        }
    }

    #[test]
    fn secrets_are_not_shown() {
        let config = with(&[("SYMMPOOL_SECRET", Some("hunter2"))]).unwrap();
        assert_eq!(config.secret.as_deref(), Some("hunter2"));
        assert!(!format!("{config:?}").contains("hunter2"));
        assert_eq!(with(&[("SYMMPOOL_SECRET", Some(""))]).unwrap().secret, None);
    }
}
