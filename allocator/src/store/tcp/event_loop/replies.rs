//! Replies to a connection, and how it ends.

use std::net::Shutdown;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{ConnectionPhase, EventLoop, LINGER};
use crate::Error;
use crate::store::tcp::frame_io::Incoming;
use crate::store::tcp::server_state::{Client, Frame};
use crate::store::tcp::wire::ToClient;

impl EventLoop {
    /// Sends the replies that the state has made, and before them which rank left first, if that has changed.
    pub(super) fn deliver(&mut self) {
        loop {
            let news = self.state.news();
            if let Some(first) = news {
                self.tell_all(&ToClient::FirstLeft(first));
            }
            let replies = self.state.take_replies();
            if replies.is_empty() && news.is_none() {
                return;
            }
            for (client, frame) in replies {
                self.reply(client, frame);
            }
        }
    }

    /// Tells all clients that have completed the handshake.
    fn tell_all(&mut self, message: &ToClient) {
        let frame = self.state.frame(message, None);
        let admitted = self.connections.iter().filter(|(_, connection)| {
            !matches!(connection.phase, ConnectionPhase::Handshake { .. } | ConnectionPhase::Ending)
        });
        for client in admitted.map(|(client, _)| *client).collect::<Vec<_>>() {
            self.tell(client, frame.clone());
        }
    }

    /// Sends a client a message that answers no request. A client may read late: of such messages only the last one is
    /// kept for it.
    pub(super) fn tell(&mut self, client: Client, frame: Frame) {
        let Some(connection) = self.connections.get_mut(&client) else { return };
        connection.outgoing.push_news(frame);
        self.flush(client);
    }

    pub(super) fn reply(&mut self, client: Client, frame: Frame) {
        let stall = self.limits().stall;
        let Some(connection) = self.connections.get_mut(&client) else { return };
        connection.outgoing.push(frame);
        self.set_phase(client, ConnectionPhase::Replying);
        self.set_timer(client, Some(stall));
        self.flush(client);
    }

    /// Sends what can be sent.
    pub(super) fn flush(&mut self, client: Client) {
        let stall = self.limits().stall;
        let Some(connection) = self.connections.get_mut(&client) else { return };
        let Ok(progress) = connection.outgoing.flush(&mut connection.stream) else {
            return self.close(client);
        };
        let empty = connection.outgoing.is_empty();
        match connection.phase {
            ConnectionPhase::Replying if empty => {
                self.set_phase(client, ConnectionPhase::Ready);
                self.set_timer(client, None);
            }
            ConnectionPhase::Replying if progress => self.set_timer(client, Some(stall)),
            ConnectionPhase::Ending if empty => {
                let _ = connection.stream.shutdown(Shutdown::Write);
            }
            _ => {}
        }
        self.update_polling(client);
    }

    /// Drops a client that broke the protocol or was too slow, after sending it the reason.
    pub(super) fn end(&mut self, client: Client, error: &Error) {
        tracing::debug!(%error, client, "the store drops a client");
        self.end_with(client, &ToClient::Failed(error.kind().clone()));
    }

    /// Sends a client its last message.
    pub(super) fn end_with(&mut self, client: Client, last: &ToClient) {
        let frame = self.state.frame(last, None);
        self.state.disconnect(client);
        let Some(connection) = self.connections.get_mut(&client) else { return };
        connection.incoming = Incoming::default();
        connection.outgoing.push(frame);
        self.set_phase(client, ConnectionPhase::Ending);
        self.set_timer(client, Some(LINGER));
        self.flush(client);
    }

    /// Sends the replies that are already made: the rank that serves the store leaves when it has its own
    /// reply, and the others still need theirs. Clients that do not read are not waited for long.
    pub(super) fn send_pending_replies(&mut self) {
        self.deliver();
        let until = Instant::now() + LINGER;
        loop {
            let unsent =
                self.connections.iter().filter(|(_, connection)| !connection.outgoing.is_empty());
            let (clients, mut polled): (Vec<Client>, Vec<PollFd<'_>>) = unsent
                .map(|(client, connection)| {
                    (*client, PollFd::new(&connection.stream, PollFlags::OUT))
                })
                .unzip();
            let left = until.saturating_duration_since(Instant::now());
            if clients.is_empty() || left.is_zero() {
                return;
            }
            // An error can be ignored: flushing finds the connections that are broken.
            let _ = poll(&mut polled, Timespec::try_from(left).ok().as_ref());
            for client in clients {
                self.flush(client);
            }
        }
    }
}
