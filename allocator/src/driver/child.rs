//! Tests that need a second process run themselves again in one.
//!
//! [`start`] runs the named test in a child that has a socket to its parent; there [`parent`] says
//! so, and the test takes the other side.

use std::io::{Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use std::{env, io};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

const ROLE: &str = "SYMMPOOL_TEST_CHILD";

/// A socket between parent and child; waits on it end with an error after a minute.
pub(super) struct Socket(UnixStream);

/// Runs `test`, named from this module's parent on, in a child process.
pub(super) fn start(test: &str) -> (Child, Socket) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let (root, _) = module_path!().rsplit_once("::").unwrap();
    let (_crate_name, module) = root.split_once("::").unwrap();
    let child = Command::new(env::current_exe().unwrap())
        .args([&format!("{module}::{test}"), "--exact", "--nocapture", "--test-threads=1"])
        .env(ROLE, test)
        .stdin(Stdio::from(OwnedFd::from(theirs)))
        .spawn()
        .unwrap();
    let mut socket = Socket::new(ours);
    // A name that is no test would run nothing and succeed.
    socket.wait().expect("the child runs the test");
    (child, socket)
}

/// Runs `test` in a child process that must succeed and says nothing meanwhile.
pub(super) fn run(test: &str) {
    let (mut child, _socket) = start(test);
    let status = child.wait().unwrap();
    assert!(status.success(), "{test} in a child process: {status}");
}

/// The socket to the parent, in a child.
pub(super) fn parent() -> Option<Socket> {
    env::var_os(ROLE)?;
    let stdin = io::stdin().as_fd().try_clone_to_owned().unwrap();
    let mut socket = Socket::new(stdin.into());
    socket.signal();
    Some(socket)
}

impl Socket {
    fn new(stream: UnixStream) -> Self {
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        Self(stream)
    }

    /// Says that a point is reached.
    pub(super) fn signal(&mut self) {
        self.0.write_all(&[1]).unwrap();
    }

    /// Waits for the other side's signal; an error if it is gone.
    pub(super) fn wait(&mut self) -> io::Result<()> {
        self.0.read_exact(&mut [0])
    }

    pub(super) fn send(&self, fd: &OwnedFd) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds = [fd.as_fd()];
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        let data = [io::IoSlice::new(&[2])];
        assert_eq!(rustix::net::sendmsg(&self.0, &data, &mut control, SendFlags::empty()), Ok(1));
    }

    pub(super) fn receive(&self) -> OwnedFd {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut byte = [0];
        let mut data = [io::IoSliceMut::new(&mut byte)];
        let flags = RecvFlags::CMSG_CLOEXEC;
        let received = rustix::net::recvmsg(&self.0, &mut data, &mut control, flags).unwrap();
        assert_eq!(received.bytes, 1);
        let fd = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
            _ => None,
        });
        fd.expect("a descriptor")
    }
}
