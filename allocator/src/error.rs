//! The one error type of the allocator.
//!
//! [`Error`] is opaque: callers act on its predicates and show its message. Each predicate stands
//! for one reaction of a caller.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::divergence::Divergence;
use crate::ranks::list;

/// A result with symmpool's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error: what went wrong, on which rank, what was expected and what to do.
///
/// The message is complete in itself. The frames of [`Error::context`], shown in front of it with the
/// outermost first, say what was being done. An error on which all ranks of a group agreed (see
/// [`Pool::commit`](crate::Pool::commit)) reads the same on each of them.
#[derive(Clone)]
pub struct Error(Box<Inner>);

#[derive(Clone)]
struct Inner {
    kind: ErrorKind,
    context: Vec<String>,
    /// The ranks at fault, if the kind does not hold them.
    ranks: Vec<u32>,
}

/// The causes behind [`Error`]. Serializable, because ranks send them to each other.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, thiserror::Error)]
pub(crate) enum ErrorKind {
    #[error("{0}")]
    InvalidArgument(String),
    #[error("{0}")]
    OutOfMemory(String),
    #[error("{0}")]
    Diverged(Box<Divergence>),
    /// Ranks that disagree about something other than a lane's events (configuration, arguments).
    #[error("{message}")]
    Mismatch { message: String, ranks: Vec<u32> },
    #[error("timed out after {after:.1?} {waiting_for}{}", missing_ranks(.missing))]
    Timeout { waiting_for: String, after: Duration, missing: Vec<u32> },
    #[error("{}{what}", lost_ranks(.ranks))]
    PeerLost { ranks: Vec<u32>, what: String },
    #[error("{0}")]
    Unsupported(String),
    #[error("{0}")]
    Refused(String),
    #[error("{0}")]
    Overflow(String),
    #[error("{0}")]
    InvalidState(String),
    #[error("{0}")]
    Interrupted(String),
    #[error("{what}: {cause}")]
    System { what: String, cause: String },
}

/// Beginning of every error's text.
const PREFIX: &str = "symmpool: ";

fn plural(ranks: &[u32]) -> &'static str {
    if ranks.len() == 1 { "" } else { "s" }
}

/// Whom an error of lost peers names, in front of what happened. Of some it is not known which rank they are.
fn lost_ranks(lost: &[u32]) -> String {
    if lost.is_empty() {
        return String::new();
    }
    format!("lost rank{} {}: ", plural(lost), list(lost))
}

fn missing_ranks(missing: &[u32]) -> String {
    if missing.is_empty() {
        return String::new();
    }
    format!("; no answer from rank{} {}", plural(missing), list(missing))
}

impl Error {
    pub(crate) fn from_kind(kind: ErrorKind) -> Self {
        Self(Box::new(Inner { kind, context: Vec::new(), ranks: Vec::new() }))
    }

    /// An invalid argument. The message names the value and what is accepted.
    pub fn invalid_argument(message: impl Into<String>) -> Self {
        Self::from_kind(ErrorKind::InvalidArgument(message.into()))
    }

    /// Memory, address range or a configured limit is used up.
    pub fn out_of_memory(message: impl Into<String>) -> Self {
        Self::from_kind(ErrorKind::OutOfMemory(message.into()))
    }

    /// Ranks that called with different arguments or configurations. [`Self::is_diverged`] says whether an error is one.
    pub fn mismatch(message: impl Into<String>) -> Self {
        Self::from_kind(ErrorKind::Mismatch { message: message.into(), ranks: Vec::new() })
    }

    /// A wait whose time is up: `waiting_for` completes "timed out after 3 s …", `missing` are the ranks
    /// that did not answer.
    pub fn timeout(waiting_for: impl Into<String>, after: Duration, missing: Vec<u32>) -> Self {
        Self::from_kind(ErrorKind::Timeout { waiting_for: waiting_for.into(), after, missing })
    }

    /// Peers that are gone, and how this was noticed.
    pub fn peer_lost(ranks: Vec<u32>, what: impl Into<String>) -> Self {
        Self::from_kind(ErrorKind::PeerLost { ranks, what: what.into() })
    }

    /// Something that this machine, library or build cannot do. The message names what was tried.
    pub fn unsupported(message: impl Into<String>) -> Self {
        Self::from_kind(ErrorKind::Unsupported(message.into()))
    }

    /// A connection that either side refused (wrong secret, version, user).
    pub fn refused(message: impl Into<String>) -> Self {
        Self::from_kind(ErrorKind::Refused(message.into()))
    }

    /// Data that was longer than the buffer for it.
    pub fn overflow(message: impl Into<String>) -> Self {
        Self::from_kind(ErrorKind::Overflow(message.into()))
    }

    /// A call that is not possible in the present state (a commit inside a commit, a broken pool).
    pub fn invalid_state(message: impl Into<String>) -> Self {
        Self::from_kind(ErrorKind::InvalidState(message.into()))
    }

    /// A call that a program's own code or a signal ended, such as Ctrl-C.
    pub fn interrupted(message: impl Into<String>) -> Self {
        Self::from_kind(ErrorKind::Interrupted(message.into()))
    }

    /// A wait that was interrupted: `waiting` completes "interrupted …", `missing` are the ranks that had
    /// not answered by then.
    pub(crate) fn interrupted_wait(waiting: &str, missing: &[u32]) -> Self {
        Self::interrupted(format!("interrupted {waiting}{}", missing_ranks(missing)))
    }

    /// A failed call to the operating system or a device library.
    pub fn system(what: impl Into<String>, cause: impl fmt::Display) -> Self {
        Self::from_kind(ErrorKind::System { what: what.into(), cause: cause.to_string() })
    }

    pub(crate) fn diverged(divergence: Divergence) -> Self {
        Self::from_kind(ErrorKind::Diverged(Box::new(divergence)))
    }

    /// Adds a frame that says what was being done: "while …".
    #[must_use]
    pub fn context(mut self, doing: impl Into<String>) -> Self {
        self.0.context.push(doing.into());
        self
    }

    /// Reports the same timeout with the duration `total` of the whole wait, of which this was a part.
    pub(crate) fn waited_for(mut self, total: Duration) -> Self {
        if let ErrorKind::Timeout { after, .. } = &mut self.0.kind {
            *after = total;
        }
        self
    }

    /// Sets the ranks at fault ([`Error::ranks`]), unless the error has some: those that its message
    /// names for something that they did or lack.
    #[must_use]
    pub fn naming(mut self, ranks: impl IntoIterator<Item = u32>) -> Self {
        if self.ranks().is_empty() {
            let mut named: Vec<u32> = ranks.into_iter().collect();
            named.sort_unstable();
            named.dedup();
            match &mut self.0.kind {
                // Part of the kind, because ranks send kinds to each other.
                ErrorKind::Mismatch { ranks, .. } => *ranks = named,
                _ => self.0.ranks = named,
            }
        }
        self
    }

    /// Counts the error's ranks in another way, as those of a host among all: `number` gives each rank's other number.
    /// Prose of the message stays as it is, so say in a [`context`](Self::context) which ranks it counts.
    #[must_use]
    pub fn renumbered(mut self, number: impl Fn(u32) -> u32) -> Self {
        let ranks = match &mut self.0.kind {
            ErrorKind::Timeout { missing, .. } => missing,
            ErrorKind::PeerLost { ranks, .. } | ErrorKind::Mismatch { ranks, .. } => ranks,
            _ => &mut self.0.ranks,
        };
        for rank in ranks {
            *rank = number(*rank);
        }
        self
    }

    /// The frames of [`context`](Self::context), the innermost first.
    pub(crate) fn frames(&self) -> &[String] {
        &self.0.context
    }

    pub(crate) fn kind(&self) -> &ErrorKind {
        &self.0.kind
    }

    /// Memory, address range or a limit is used up. Free or trim something, or raise the limit.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self.0.kind, ErrorKind::OutOfMemory(_))
    }

    /// Ranks did different things, or were configured differently: an error in the program.
    /// [`Error::divergence`] says where, if a lane's events differ.
    pub fn is_diverged(&self) -> bool {
        matches!(self.0.kind, ErrorKind::Diverged(_) | ErrorKind::Mismatch { .. })
    }

    /// A deadline passed. [`Error::ranks`] are the ranks that did not answer.
    pub fn is_timeout(&self) -> bool {
        matches!(self.0.kind, ErrorKind::Timeout { .. })
    }

    /// A peer is gone. Rebuild the group without it, or restart.
    pub fn is_peer_lost(&self) -> bool {
        matches!(self.0.kind, ErrorKind::PeerLost { .. })
    }

    /// This machine, library or build cannot do it.
    pub fn is_unsupported(&self) -> bool {
        matches!(self.0.kind, ErrorKind::Unsupported(_))
    }

    /// An argument is invalid; nothing was changed.
    pub fn is_invalid_argument(&self) -> bool {
        matches!(self.0.kind, ErrorKind::InvalidArgument(_))
    }

    /// An output was too short for what ranks sent. Data beyond its end was not written.
    pub fn is_overflow(&self) -> bool {
        matches!(self.0.kind, ErrorKind::Overflow(_))
    }

    /// Wrong secret, wrong protocol version, wrong user.
    pub fn is_refused(&self) -> bool {
        matches!(self.0.kind, ErrorKind::Refused(_))
    }

    /// The call does not fit the current state (a commit under way, a pool that lost a peer), or was
    /// interrupted.
    pub fn is_invalid_state(&self) -> bool {
        matches!(self.0.kind, ErrorKind::InvalidState(_) | ErrorKind::Interrupted(_))
    }

    /// The call was to stop, as by Ctrl-C.
    pub fn is_interrupted(&self) -> bool {
        matches!(self.0.kind, ErrorKind::Interrupted(_))
    }

    /// The ranks that are missing, lost, different or at fault; empty if there are none.
    pub fn ranks(&self) -> &[u32] {
        match &self.0.kind {
            ErrorKind::Timeout { missing, .. } => missing,
            ErrorKind::PeerLost { ranks, .. } => ranks,
            ErrorKind::Diverged(divergence) => divergence.ranks(),
            ErrorKind::Mismatch { ranks, .. } => ranks,
            _ => &self.0.ranks,
        }
    }

    /// Where ranks diverged, if a lane's events differ.
    pub fn divergence(&self) -> Option<&Divergence> {
        match &self.0.kind {
            ErrorKind::Diverged(divergence) => Some(divergence),
            _ => None,
        }
    }
}

impl Error {
    /// Text of the error without the library's name before it, for texts that begin with that themselves.
    pub fn message(&self) -> String {
        let text = self.to_string();
        text.strip_prefix(PREFIX).map(str::to_owned).unwrap_or(text)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(PREFIX)?;
        for frame in self.0.context.iter().rev() {
            write!(f, "{frame}: ")?;
        }
        write!(f, "{}", self.0.kind)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_within_errors_name_the_library_once() {
        let cause = Error::invalid_state("no").context("commit 7");
        assert_eq!(cause.message(), "commit 7: no");
        let outer = Error::invalid_state(format!("half-way ({})", cause.message()));
        assert_eq!(outer.to_string(), "symmpool: half-way (commit 7: no)");
    }

    #[test]
    fn context_reads_from_the_outside_in() {
        let error = Error::timeout("waiting for digests", Duration::from_secs(3), vec![2])
            .context("commit 7")
            .context("pool \"default\"");
        assert_eq!(
            error.to_string(),
            "symmpool: pool \"default\": commit 7: timed out after 3.0s waiting for digests; \
             no answer from rank 2"
        );
        assert!(error.is_timeout());
        assert_eq!(error.ranks(), [2]);
    }

    #[test]
    fn peers_are_named_if_they_are_known() {
        let text = |ranks| Error::peer_lost(ranks, "the store is gone").to_string();
        assert_eq!(text(vec![2, 1]), "symmpool: lost ranks 1, 2: the store is gone");
        assert_eq!(text(vec![]), "symmpool: the store is gone");
    }

    #[test]
    fn ranks_that_are_named_first_stay() {
        for error in [Error::mismatch("x"), Error::overflow("x"), Error::invalid_argument("x")] {
            assert_eq!(error.ranks(), [0_u32; 0]);
            assert_eq!(error.naming([3, 1, 3]).naming([2]).ranks(), [1, 3]);
        }
        let late = Error::timeout("x", Duration::from_secs(1), vec![2]);
        assert_eq!(late.naming([1]).ranks(), [2]);
    }

    #[test]
    fn ranks_of_a_mismatch_travel_with_its_kind() {
        let error = Error::mismatch("x").naming([4]);
        let sent = postcard::to_stdvec(error.kind()).unwrap();
        let received = Error::from_kind(postcard::from_bytes(&sent).unwrap());
        assert_eq!(received.ranks(), [4]);
    }
}
