//! Calls that may block without end, and that nothing can interrupt.
//!
//! Some of what symmpool asks the system knows no deadline: CUDA waits for a device until that is done,
//! and the C library resolves a name for as long as its resolver takes. Such a call is made on a thread
//! of its own, and the caller waits for that until its deadline.

use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::thread;
use std::time::Duration;

use crate::{Error, Result};

/// What `work` returns, if it does so within `limit`; `None` otherwise. The thread it runs on then goes
/// on until the work ends, and what it returns is dropped there.
pub(crate) fn within<T: Send + 'static>(
    limit: Duration,
    what: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<Option<T>> {
    let (done, told) = sync_channel(1);
    // Fails where the caller is gone, who then wants nothing any more.
    let work = move || drop(done.send(work()));
    let thread = thread::Builder::new().name("symmpool-wait".into()).spawn(work);
    thread.map_err(|error| Error::system(format!("starting a thread for {what}"), error))?;
    match told.recv_timeout(limit) {
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
        let (told, ended) = mpsc::channel();
        let started = Instant::now();
        let late = within(Duration::from_millis(20), "a wait", move || {
            let _ = held.recv();
            told.send(()).expect("somebody listens");
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
