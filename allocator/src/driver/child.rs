//! Tests of drivers with a second process, in which the same test runs again.
//!
//! [`start`] runs the named test in a child process that has a socket to its parent. In the child,
//! [`parent`] returns that socket, and the test plays the other side.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Stdio};
use std::time::Duration;

use rustix::net::{RecvFlags, SendFlags};

use crate::testing::{receive_with_descriptors, role, send_with_descriptors, this_test_as};

/// A socket between parent and child; waits on it end with an error after a minute.
pub(super) struct ChildSocket(UnixStream);

/// Runs `test`, whose name begins after this module's parent, in a child process.
pub(super) fn start(test: &str) -> (Child, ChildSocket) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let (root, _) = module_path!().rsplit_once("::").unwrap();
    let (_crate_name, module) = root.split_once("::").unwrap();
    let child = this_test_as(&format!("{module}::{test}"), test)
        .stdin(Stdio::from(OwnedFd::from(theirs)))
        .spawn()
        .unwrap();
    let mut socket = ChildSocket::new(ours);
    // A name that is no test would run nothing and succeed.
    socket.wait().expect("the child runs the test");
    (child, socket)
}

/// Runs `test` in a child process that must succeed and sends no signals.
pub(super) fn run(test: &str) {
    let (mut child, _socket) = start(test);
    let status = child.wait().unwrap();
    assert!(status.success(), "{test} in a child process: {status}");
}

/// The socket to the parent, in a child.
pub(super) fn parent() -> Option<ChildSocket> {
    role()?;
    let stdin = io::stdin().as_fd().try_clone_to_owned().unwrap();
    let mut socket = ChildSocket::new(stdin.into());
    socket.signal();
    Some(socket)
}

impl ChildSocket {
    fn new(stream: UnixStream) -> Self {
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        Self(stream)
    }

    /// Signals that a point is reached.
    pub(super) fn signal(&mut self) {
        self.0.write_all(&[1]).unwrap();
    }

    /// Waits for the other side's signal; an error if it is gone.
    pub(super) fn wait(&mut self) -> io::Result<()> {
        self.0.read_exact(&mut [0])
    }

    pub(super) fn send(&self, fd: &OwnedFd) {
        let sent = send_with_descriptors(&self.0, &[2], &[fd.as_fd()], SendFlags::empty());
        assert_eq!(sent, Ok(1));
    }

    pub(super) fn receive(&self) -> OwnedFd {
        let received = receive_with_descriptors(&self.0, &mut [0], RecvFlags::empty()).unwrap();
        assert_eq!(received.bytes, 1);
        received.fds.into_iter().next().expect("a descriptor")
    }
}
