//! The address of a store's server, and resolving its name within a deadline.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6, ToSocketAddrs};
use std::time::Duration;

use crate::{Error, blocking};

/// Where the server of a [`TcpStore`](super::TcpStore) is: addresses, or a machine's name and a port.
/// Made of what [`ToSocketAddrs`] is usually given: `"node0:29500"`, `("node0", 29500)`, a
/// [`SocketAddr`].
#[derive(Clone, Debug)]
pub struct ServerAddress(AddressForm);

#[derive(Clone, Debug)]
enum AddressForm {
    Known(Vec<SocketAddr>),
    /// A host and a port, separated by a colon.
    Text(String),
    Host(String, u16),
}

/// Why a name has no addresses.
#[derive(Debug)]
pub(super) enum Unresolved {
    /// There was no answer in time.
    Late(Duration),
    /// The system's answer.
    Failed(io::Error),
    /// The system could not be asked.
    NotAsked(Error),
}

impl ServerAddress {
    /// The addresses that the name has now, if the system answers within `limit`. The C library's resolver
    /// takes no deadline, so it runs on a thread of its own.
    pub(super) fn resolve(&self, limit: Duration) -> Result<Vec<SocketAddr>, Unresolved> {
        let asked = match self.0.clone() {
            AddressForm::Known(addrs) => return Ok(addrs),
            // A literal address needs no resolver.
            AddressForm::Text(text) => match text.parse() {
                Ok(addr) => return Ok(vec![addr]),
                Err(_) => blocking::within(limit, "resolving a name", move || all(text.as_str())),
            },
            AddressForm::Host(host, port) => match host.parse::<IpAddr>() {
                Ok(ip) => return Ok(vec![SocketAddr::new(ip, port)]),
                Err(_) => {
                    blocking::within(limit, "resolving a name", move || all((host.as_str(), port)))
                }
            },
        };
        match asked {
            Ok(Some(answer)) => answer.map_err(Unresolved::Failed),
            Ok(None) => Err(Unresolved::Late(limit)),
            Err(error) => Err(Unresolved::NotAsked(error)),
        }
    }
}

fn all(name: impl ToSocketAddrs) -> io::Result<Vec<SocketAddr>> {
    name.to_socket_addrs().map(Iterator::collect)
}

/// Writes the address as a configuration has it.
impl fmt::Display for ServerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            AddressForm::Known(addrs) => match &addrs[..] {
                [addr] => write!(f, "{addr}"),
                addrs => write!(f, "{addrs:?}"),
            },
            AddressForm::Text(text) => f.write_str(text),
            AddressForm::Host(host, port) => write!(f, "{host}:{port}"),
        }
    }
}

impl fmt::Display for Unresolved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Late(after) => write!(f, "nobody resolved it within {after:.1?}"),
            Self::Failed(error) => write!(f, "it does not resolve: {error}"),
            Self::NotAsked(error) => write!(f, "it was not resolved: {error}"),
        }
    }
}

impl From<&str> for ServerAddress {
    fn from(text: &str) -> Self {
        Self(AddressForm::Text(text.to_owned()))
    }
}

impl From<&String> for ServerAddress {
    fn from(text: &String) -> Self {
        Self(AddressForm::Text(text.clone()))
    }
}

impl From<String> for ServerAddress {
    fn from(text: String) -> Self {
        Self(AddressForm::Text(text))
    }
}

impl From<(&str, u16)> for ServerAddress {
    fn from((host, port): (&str, u16)) -> Self {
        Self(AddressForm::Host(host.to_owned(), port))
    }
}

impl From<(String, u16)> for ServerAddress {
    fn from((host, port): (String, u16)) -> Self {
        Self(AddressForm::Host(host, port))
    }
}

impl From<&[SocketAddr]> for ServerAddress {
    fn from(addrs: &[SocketAddr]) -> Self {
        Self(AddressForm::Known(addrs.to_vec()))
    }
}

macro_rules! from_addresses {
    ($($address:ty),*) => { $(
        impl From<$address> for ServerAddress {
            fn from(address: $address) -> Self {
                Self(AddressForm::Known(vec![address.into()]))
            }
        }
    )* };
}

from_addresses!(SocketAddr, SocketAddrV4, SocketAddrV6);
from_addresses!((IpAddr, u16), (Ipv4Addr, u16), (Ipv6Addr, u16));

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_in_writing_need_no_resolver() {
        for (address, expected) in [
            (ServerAddress::from("127.0.0.1:7"), "127.0.0.1:7"),
            (ServerAddress::from("[::1]:7"), "[::1]:7"),
            (ServerAddress::from(("127.0.0.1", 7)), "127.0.0.1:7"),
            (ServerAddress::from(("::1", 7)), "[::1]:7"),
            (ServerAddress::from((Ipv4Addr::LOCALHOST, 7)), "127.0.0.1:7"),
        ] {
            let found = address.resolve(Duration::ZERO).expect("no name");
            assert_eq!(found, [expected.parse().expect("an address")], "{address}");
        }
    }

    #[test]
    fn what_is_no_address_says_so() {
        let limit = Duration::from_secs(20);
        let error = ServerAddress::from("nonsense").resolve(limit).unwrap_err();
        assert!(matches!(error, Unresolved::Failed(_)), "{error}");
        assert!(error.to_string().contains("does not resolve"), "{error}");
    }
}
