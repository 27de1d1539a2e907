//! How long a client waits for the server: until a point in time, until it is interrupted, or until the connection
//! fails.

use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, socket_with, sockopt};

use std::net::{SocketAddr, TcpStream};

use crate::Error;
use crate::descriptors::{self, within_hard_limit};
use crate::store::{ASK_EVERY, Stop};

/// Why a connection is of no more use.
#[derive(Debug)]
pub(super) enum ConnectionFault {
    /// This client was interrupted; whether its request was served is not known.
    Stopped,
    /// Nothing came in time. An answer may still come, which the next request would take for its own.
    Late,
    /// The other end is gone; how that was seen.
    Gone(String),
    /// The server does not admit this client yet; why. Another connection may be tried.
    Later(String),
    /// One side has refused; trying again changes nothing.
    Refused(Error),
}

impl From<Error> for ConnectionFault {
    fn from(error: Error) -> Self {
        Self::Refused(error)
    }
}

/// When a client's wait ends.
#[derive(Clone, Copy)]
pub(super) struct WaitLimit<'a> {
    pub(super) until: Instant,
    pub(super) stop: Option<Stop<'a>>,
}

impl<'a> WaitLimit<'a> {
    /// Waits that nothing ends before `until`.
    pub(super) fn until(until: Instant) -> Self {
        Self { until, stop: None }
    }

    /// How long one system call may wait before [`check_stop`](WaitLimit::check_stop) is called: never zero,
    /// which would mean for ever.
    pub(super) fn slice(&self) -> Result<Duration, ConnectionFault> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ConnectionFault::Late);
        }
        let most = if self.stop.is_some() { ASK_EVERY } else { left };
        Ok(left.min(most).max(Duration::from_millis(1)))
    }

    /// Called whenever a wait of the system has ended without a result, or was interrupted by a signal.
    pub(super) fn check_stop(&self) -> Result<(), ConnectionFault> {
        if self.stop.is_some_and(|stop| stop()) { Err(ConnectionFault::Stopped) } else { Ok(()) }
    }

    /// A connection to `addr`, in blocking mode.
    pub(super) fn connect(&self, addr: SocketAddr) -> Result<TcpStream, ConnectionFault> {
        let gone = |errno: Errno| ConnectionFault::Gone(errno.to_string());
        let family = if addr.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = within_hard_limit(|| socket_with(family, SocketType::STREAM, flags, None));
        let socket = socket
            .map_err(|errno| ConnectionFault::Refused(descriptors::error("a socket", errno)))?;
        match connect(&socket, &addr) {
            Ok(()) => {}
            Err(Errno::INPROGRESS | Errno::INTR) => loop {
                let slice = Timespec::try_from(self.slice()?).ok();
                match poll(&mut [PollFd::new(&socket, PollFlags::OUT)], slice.as_ref()) {
                    Ok(0) | Err(Errno::INTR) => self.check_stop()?,
                    Ok(_) => {
                        sockopt::socket_error(&socket).map_err(gone)?.map_err(gone)?;
                        break;
                    }
                    Err(errno) => return Err(gone(errno)),
                }
            },
            Err(errno) => return Err(gone(errno)),
        }
        let stream = TcpStream::from(socket);
        stream.set_nonblocking(false).map_err(|error| ConnectionFault::Gone(error.to_string()))?;
        Ok(stream)
    }
}
