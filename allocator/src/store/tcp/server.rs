//! The server as its owner sees it: bound, served on a thread, stopped by dropping it.

use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::JoinHandle;

use rustix::event::{EventfdFlags, eventfd};

use super::TcpOptions;
use super::event_loop::EventLoop;
use super::poller::Poller;
use crate::fork::Maker;
use crate::store::random::random;
use crate::{Error, Result};

/// A store's server, on a thread of its own. Dropping it closes every connection and joins the
/// thread; the content is gone with it. A forked child has no such thread: dropping its copy leaves
/// the server to its parent.
#[derive(Debug)]
pub struct TcpServer {
    addr: SocketAddr,
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
    maker: Maker,
}

impl TcpServer {
    /// Serves on `addr`; port 0 takes a free one, see [`local_addr`](TcpServer::local_addr).
    ///
    /// One that another socket has is [`Error::is_invalid_state`].
    ///
    /// An address other than loopback without [`TcpOptions::secret`] is refused with
    /// [`Error::is_invalid_argument`].
    pub fn bind(addr: impl ToSocketAddrs, options: TcpOptions) -> Result<Self> {
        let addrs: Vec<SocketAddr> = addr
            .to_socket_addrs()
            .map_err(|error| Error::system("cannot resolve the store's address", error))?
            .collect();
        let open = addrs.iter().find(|addr| !addr.ip().to_canonical().is_loopback());
        if let (Some(open), None) = (open, &options.secret) {
            return Err(Error::invalid_argument(format!(
                "a store on {open} without a secret would serve everyone on the network; set one, \
                 or bind a loopback address"
            )));
        }
        let system = |what: &'static str| move |error| Error::system(what, error);
        let listener = TcpListener::bind(&addrs[..]).map_err(|error| {
            let what = format!("cannot listen on {addrs:?}");
            match error.kind() {
                ErrorKind::AddrInUse => Error::invalid_state(format!("{what}: {error}")),
                _ => Error::system(what, error),
            }
        })?;
        // The standard library's backlog is too short for a large world that starts at once.
        rustix::net::listen(&listener, 4096).map_err(|error| Error::system("listen", error))?;
        listener.set_nonblocking(true).map_err(system("store listener"))?;
        let addr = listener.local_addr().map_err(system("store listener"))?;
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| Error::system("eventfd", error))?;
        let stop = Arc::new(stop);
        let poller = Poller::new(listener, stop.clone())?;
        let instance = random()?;
        let thread = std::thread::Builder::new()
            .name("symmpool-store".into())
            .spawn(move || {
                // Made here, because the state counts its memory without atomics.
                if let Err(error) = EventLoop::new(poller, options, instance).run() {
                    tracing::error!(%error, %addr, "the store's server stopped");
                }
            })
            .map_err(system("cannot start the store's thread"))?;
        Ok(Self { addr, stop, thread: Some(thread), maker: Maker::here() })
    }

    /// Where clients connect to.
    pub fn local_addr(&self) -> SocketAddr {
        self.addr
    }
}

impl Drop for TcpServer {
    fn drop(&mut self) {
        if !self.maker.is_here() {
            // The order to stop would reach the parent's thread, and this process has none to join.
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
