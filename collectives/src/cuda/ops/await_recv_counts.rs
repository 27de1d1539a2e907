//! The wait for how many rows a dispatch to experts receives.

use std::time::{Duration, Instant};

use symmpool_allocator::{Error, Result, Stream};

use crate::ReceivedSizes;
use crate::cuda::engine::CudaEngine;

/// How often the host looks at the stream, and at the clock, while it waits for sizes.
const LOOK: Duration = Duration::from_micros(100);

/// How many looks at sizes there are to one at the clock.
const LOOKS: u32 = 64;

/// After how long it sleeps between looks: a wait that takes so long is one for work that the stream does before.
const SPINS_FOR: Duration = Duration::from_millis(2);

/// How often it asks whether the wait is to stop, as after Ctrl-C.
const ASK_EVERY: Duration = Duration::from_millis(20);

/// How long it sleeps.
const PAUSE: Duration = Duration::from_micros(20);

impl CudaEngine {
    /// Waits until the call of this number, on this stream, has written sizes. Returns what it reported besides as an error.
    pub(in crate::cuda) fn await_sizes(
        &mut self,
        number: u32,
        local_experts: u32,
        stream: Stream,
    ) -> Result<ReceivedSizes> {
        let written = |engine: &Self| {
            let sizes = engine.recv_counts.as_ref()?;
            sizes.written(number, local_experts as usize)
        };
        let since = Instant::now();
        let (mut looks, mut next, mut ask_at) = (0_u32, LOOK, ASK_EVERY);
        let interrupted = self.pool.interrupt();
        loop {
            if let Some(sizes) = written(self) {
                // Counts come from ranks that call something else too. The device has said so by now.
                self.ready()?;
                self.take_async_error()?;
                return Ok(sizes);
            }
            looks = looks.wrapping_add(1);
            if !looks.is_multiple_of(LOOKS) {
                std::hint::spin_loop();
                continue;
            }
            let waited = since.elapsed();
            if waited < next {
                continue;
            }
            next = waited + LOOK;
            self.ready()?;
            if waited > ask_at && interrupted.as_ref().is_some_and(|interrupted| interrupted()) {
                return Err(Error::interrupted(format!(
                    "interrupted while rank {} waited for the sizes of a dispatch to experts, which goes on",
                    self.rank()
                )));
            }
            if waited > ask_at {
                ask_at = waited + ASK_EVERY;
            }
            // A kernel that failed, or never ran, tells nothing: the stream says so.
            if self.is_idle(stream)? && written(self).is_none() {
                self.synchronize(stream)?;
                return Err(Error::invalid_state(
                    "a dispatch to experts ended without telling how many rows it received",
                ));
            }
            if waited > SPINS_FOR {
                std::thread::sleep(PAUSE);
            }
        }
    }
}
