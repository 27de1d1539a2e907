//! Calls that may block for any time and that nothing can interrupt.
//!
//! Some calls of the system take no deadline: CUDA waits until a device is idle, and the C library resolves
//! a name for as long as its resolver takes. Such a call is made on a thread of its own, and the caller
//! waits for that thread until its deadline.

use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::thread;
use std::time::Duration;

use crate::{Error, Result};

/// The result of `work`, if there is one within `limit`; `None` otherwise. Its thread then runs until the
/// work ends, and drops the result.
pub(crate) fn within<T: Send + 'static>(
    limit: Duration,
    what: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<Option<T>> {
    let (done, result) = sync_channel(1);
    // Fails if the caller no longer waits.
    let work = move || drop(done.send(work()));
    let thread = thread::Builder::new().name("symmpool-wait".into()).spawn(work);
    thread.map_err(|error| Error::system(format!("starting a thread for {what}"), error))?;
    match result.recv_timeout(limit) {
        Ok(result) => Ok(Some(result)),
        Err(RecvTimeoutError::Timeout) => Ok(None),
        Err(RecvTimeoutError::Disconnected) => Err(Error::system(what, "it panicked")),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Instant;

    use super::*;

    #[test]
    fn what_ends_in_time_is_returned() {
        let within = within(Duration::from_secs(20), "a sum", || 2 + 3);
        assert_eq!(within.expect("a thread"), Some(5));
    }

    #[test]
    fn what_does_not_end_is_left_to_its_thread() {
        let (end, held) = mpsc::channel::<()>();
        let (ending, ended) = mpsc::channel();
        let started = Instant::now();
        let late = within(Duration::from_millis(20), "a wait", move || {
            let _ = held.recv();
            ending.send(()).expect("the test waits");
        });
        assert_eq!(late.expect("a thread"), None);
        assert!(started.elapsed() < Duration::from_secs(10));
        drop(end);
        ended.recv_timeout(Duration::from_secs(20)).expect("the thread ends when it can");
    }

    #[test]
    fn a_panic_is_an_error() {
        let error = within(Duration::from_secs(20), "a call", || panic!("as planned")).unwrap_err();
        assert!(error.to_string().contains("a call: it panicked"), "{error}");
    }
}
