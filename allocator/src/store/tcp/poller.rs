//! Events that the server waits for: the epoll set, the listener in it, and the order to stop.

use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::net::{SocketFlags, accept_with};

use super::server_state::Client;
use crate::Result;
use crate::descriptors::{self, within_hard_limit};
use crate::fork::NotInherited;

const LISTENER: u64 = 0;
const STOP: u64 = 1;

/// The first number a client may have.
pub(super) const FIRST_CLIENT: Client = 2;

/// Source of an event that is ready.
#[derive(Clone, Copy, Debug)]
pub(super) enum ReadySource {
    Listener,
    Stop,
    Client(Client, EventFlags),
}

#[derive(Debug)]
pub(super) struct Poller {
    epoll: OwnedFd,
    /// With a copy in a forked child, the port of a server that is gone would stay taken. Dropped before the
    /// listener.
    _own: NotInherited,
    pub(super) listener: TcpListener,
    /// Readable once the loop is to end. Kept open as long as the epoll set refers to it.
    _stop: Arc<OwnedFd>,
    /// Closed to make room for a connection for which there is no descriptor, while that is sent the reason.
    pub(super) spare: Option<OwnedFd>,
}

/// A descriptor that only reserves a place.
pub(super) fn spare() -> rustix::io::Result<OwnedFd> {
    within_hard_limit(|| eventfd(0, EventfdFlags::CLOEXEC))
}

impl Poller {
    /// `listener` must not block.
    pub(super) fn new(listener: TcpListener, stop: Arc<OwnedFd>) -> Result<Self> {
        let epoll = within_hard_limit(|| epoll::create(epoll::CreateFlags::CLOEXEC))
            .and_then(|epoll| {
                epoll::add(&epoll, &listener, EventData::new_u64(LISTENER), EventFlags::IN)?;
                epoll::add(&epoll, &*stop, EventData::new_u64(STOP), EventFlags::IN)?;
                Ok(epoll)
            })
            .map_err(|error| descriptors::error("epoll", error))?;
        let spare = spare().map_err(|error| descriptors::error("eventfd", error))?;
        let own = NotInherited::new(&listener);
        Ok(Self { epoll, _own: own, listener, _stop: stop, spare: Some(spare) })
    }

    /// Waits until something is ready or `until` has passed.
    pub(super) fn wait(&self, until: Option<Instant>) -> rustix::io::Result<Vec<ReadySource>> {
        let wait = until.and_then(|until| {
            // Older kernels take milliseconds in an int; waking up once an hour costs nothing.
            let wait =
                until.saturating_duration_since(Instant::now()).min(Duration::from_secs(3600));
            // One more millisecond, so that the timer has expired after the wait.
            Timespec::try_from(wait + Duration::from_millis(1)).ok()
        });
        let mut events = Vec::with_capacity(256);
        match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), wait.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error),
        }
        let ready = |event: epoll::Event| {
            let (flags, data) = (event.flags, event.data);
            match data.u64() {
                LISTENER => ReadySource::Listener,
                STOP => ReadySource::Stop,
                client => ReadySource::Client(client, flags),
            }
        };
        Ok(events.into_iter().map(ready).collect())
    }

    /// Watches a new client. Closing its socket ends that.
    pub(super) fn add(
        &self,
        client: Client,
        stream: &TcpStream,
        flags: EventFlags,
    ) -> rustix::io::Result<()> {
        epoll::add(&self.epoll, stream, EventData::new_u64(client), flags)
    }

    /// Watches a client for other events.
    pub(super) fn change(
        &self,
        client: Client,
        stream: &TcpStream,
        flags: EventFlags,
    ) -> rustix::io::Result<()> {
        epoll::modify(&self.epoll, stream, EventData::new_u64(client), flags)
    }

    /// Accepts a waiting connection, if there is one; its socket does not block.
    pub(super) fn accept(&self) -> rustix::io::Result<TcpStream> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        within_hard_limit(|| accept_with(&self.listener, flags)).map(TcpStream::from)
    }

    /// Turns reporting of waiting connections on or off.
    pub(super) fn listen(&self, listen: bool) -> rustix::io::Result<()> {
        let flags = if listen { EventFlags::IN } else { EventFlags::empty() };
        epoll::modify(&self.epoll, &self.listener, EventData::new_u64(LISTENER), flags)
    }
}
