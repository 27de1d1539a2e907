//! Threads that are std's outside of models, and loom's inside of one.

#![allow(missing_docs)] // methods are those of std

use std::io;

use super::is_running;

/// Words of the stack of a thread in a model, which runs pools and communicators.
const STACK: usize = 32 << 10;

/// A thread that can be waited for.
#[derive(Debug)]
pub struct JoinHandle<T>(ThreadHandle<T>);

#[derive(Debug)]
enum ThreadHandle<T> {
    Plain(std::thread::JoinHandle<T>),
    Watched(loom::thread::JoinHandle<T>),
}

pub fn spawn<T: Send + 'static>(run: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
    Builder::new().spawn(run).expect("a thread")
}

pub fn yield_now() {
    if is_running() {
        loom::thread::yield_now();
    } else {
        std::thread::yield_now();
    }
}

#[derive(Debug)]
pub struct Builder(std::thread::Builder);

impl Builder {
    #[expect(clippy::new_without_default, reason = "as std's")]
    pub fn new() -> Self {
        Self(std::thread::Builder::new())
    }

    #[must_use]
    pub fn name(self, name: String) -> Self {
        Self(self.0.name(name))
    }

    pub fn spawn<T: Send + 'static>(
        self,
        run: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<JoinHandle<T>> {
        let started = if is_running() {
            ThreadHandle::Watched(loom::thread::Builder::new().stack_size(STACK).spawn(run)?)
        } else {
            ThreadHandle::Plain(self.0.spawn(run)?)
        };
        Ok(JoinHandle(started))
    }
}

impl<T> JoinHandle<T> {
    pub fn join(self) -> std::thread::Result<T> {
        match self.0 {
            ThreadHandle::Plain(thread) => thread.join(),
            ThreadHandle::Watched(thread) if is_running() => thread.join(),
            ThreadHandle::Watched(_) => Err(Box::new("the model failed")),
        }
    }
}
