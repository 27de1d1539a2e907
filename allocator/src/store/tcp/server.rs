//! The server as its owner sees it: bound, served on a thread, stopped by dropping it.

use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::JoinHandle;

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;

use super::address::Unresolved;
use super::event_loop::EventLoop;
use super::poller::Poller;
use super::{ServerAddress, TcpOptions};
use crate::descriptors::{self, within_hard_limit};
use crate::fork::ProcessId;
use crate::random::random_bytes;
use crate::{Deadline, Error, Result};

/// A store's server, on a thread of its own. Dropping it closes every connection and joins the
/// thread; the content is gone with it. A forked child has no such thread: dropping its copy leaves
/// the server to its parent.
#[derive(Debug)]
pub struct TcpServer {
    addr: SocketAddr,
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
    maker: ProcessId,
}

impl TcpServer {
    /// Serves on `addr`; port 0 takes a free one, see [`local_addr`](TcpServer::local_addr).
    ///
    /// An address that another socket has is [`Error::is_invalid_state`].
    ///
    /// An address other than loopback without [`TcpOptions::secret`] is refused with
    /// [`Error::is_invalid_argument`]. A name is resolved first, for as long as the system takes;
    /// [`bind_by`](TcpServer::bind_by) limits that time.
    pub fn bind(addr: impl ToSocketAddrs, options: TcpOptions) -> Result<Self> {
        let addrs: Vec<SocketAddr> = addr
            .to_socket_addrs()
            .map_err(|error| Error::system("cannot resolve the store's address", error))?
            .collect();
        Self::serve(&addrs, options, false)
    }

    /// Binds like [`bind`](Self::bind); a name that is not resolved by `deadline` is an [`Error::is_timeout`].
    pub fn bind_by(
        addr: impl Into<ServerAddress>,
        options: TcpOptions,
        deadline: Deadline,
    ) -> Result<Self> {
        Self::start(&addr.into(), options, deadline, false)
    }

    /// Serves the ranks of one group: a rank that has left after the ranks met does not come back to this
    /// server, but to the one of the next group.
    pub(crate) fn bind_for_one_group(
        addr: impl Into<ServerAddress>,
        options: TcpOptions,
        deadline: Deadline,
    ) -> Result<Self> {
        Self::start(&addr.into(), options, deadline, true)
    }

    fn start(
        addr: &ServerAddress,
        options: TcpOptions,
        deadline: Deadline,
        one_group: bool,
    ) -> Result<Self> {
        match addr.resolve(deadline.remaining()) {
            Ok(addrs) => Self::serve(&addrs, options, one_group),
            Err(Unresolved::Late(_)) => Err(Error::timeout(
                format!("for the system to resolve the store's address, {addr}"),
                deadline.budget(),
                Vec::new(),
            )),
            Err(Unresolved::Failed(error)) => {
                Err(Error::system("cannot resolve the store's address", error))
            }
            Err(Unresolved::NotAsked(error)) => Err(error),
        }
    }

    fn serve(addrs: &[SocketAddr], options: TcpOptions, one_group: bool) -> Result<Self> {
        let open = addrs.iter().find(|addr| !addr.ip().to_canonical().is_loopback());
        if let (Some(open), None) = (open, &options.secret) {
            return Err(Error::invalid_argument(format!(
                "a store on {open} without a secret would serve everyone on the network; set one, \
                 or bind a loopback address"
            )));
        }
        let system = |what: &'static str| move |error| Error::system(what, error);
        let listener = TcpListener::bind(addrs).map_err(|error| {
            let what = format!("cannot listen on {addrs:?}");
            match Errno::from_io_error(&error) {
                Some(Errno::ADDRINUSE) => Error::invalid_state(format!("{what}: {error}")),
                Some(errno) => descriptors::error(what, errno),
                None => Error::system(what, error),
            }
        })?;
        // The standard library's backlog is too short for a large world that starts at once.
        rustix::net::listen(&listener, 4096).map_err(|error| Error::system("listen", error))?;
        listener.set_nonblocking(true).map_err(system("store listener"))?;
        let addr = listener.local_addr().map_err(system("store listener"))?;
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let stop = within_hard_limit(|| eventfd(0, flags))
            .map_err(|error| descriptors::error("eventfd", error))?;
        let stop = Arc::new(stop);
        let poller = Poller::new(listener, stop.clone())?;
        let instance = random_bytes()?;
        let thread = std::thread::Builder::new()
            .name("symmpool-store".into())
            .spawn(move || {
                // Made on this thread, because the state counts its memory without atomics.
                if let Err(error) = EventLoop::new(poller, options, instance, one_group).run() {
                    tracing::error!(%error, %addr, "the store's server stopped");
                }
            })
            .map_err(system("cannot start the store's thread"))?;
        Ok(Self { addr, stop, thread: Some(thread), maker: ProcessId::here() })
    }

    /// Where clients connect to.
    pub fn local_addr(&self) -> SocketAddr {
        self.addr
    }
}

impl Drop for TcpServer {
    fn drop(&mut self) {
        if !self.maker.is_here() {
            // The order to stop would reach the parent's thread, and this process has no thread to join.
            std::mem::forget(self.thread.take());
            return;
        }
        // An eventfd takes 2^64 - 2 of these before it is full.
        let _ = rustix::io::write(&*self.stop, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!(addr = %self.addr, "the store's server had panicked");
        }
    }
}
