//! Code that these programs share: processes that are ranks, and data that every rank can compute.

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, set_parent_process_death_signal};

/// Prints a line. Does not panic if the reader is gone.
macro_rules! say {
    ($($text:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stdout(), $($text)*);
    }};
}
pub(crate) use say;

/// Processes that write lines. They are stopped and waited for when this is dropped.
pub(crate) struct Processes {
    children: Vec<Child>,
    lines: Receiver<(usize, String)>,
    sender: Option<Sender<(usize, String)>>,
    deadline: Instant,
}

/// Why there is no further line.
#[derive(Debug)]
pub(crate) enum EndOfLines {
    /// All processes ended well.
    Done,
    /// This process failed.
    Failed(usize, ExitStatus),
    /// The time limit is over.
    Late,
}

impl Processes {
    /// No processes yet. All that are started are stopped after `limit`.
    pub(crate) fn new(limit: Duration) -> Self {
        let (sender, lines) = channel();
        let deadline = Instant::now() + limit;
        Self { children: Vec::new(), lines, sender: Some(sender), deadline }
    }

    /// Starts one process. Its output lines come with its index.
    pub(crate) fn start(&mut self, command: &mut Command) -> std::io::Result<()> {
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
        let (index, output) = (self.children.len(), child.stdout.take());
        self.children.push(child);
        if let (Some(output), Some(sender)) = (output, self.sender.clone()) {
            thread::spawn(move || {
                for line in BufReader::new(output).lines().map_while(Result::ok) {
                    if sender.send((index, line)).is_err() {
                        return;
                    }
                }
            });
        }
        Ok(())
    }

    /// Starts `world` ranks, with the variables that launchers set.
    pub(crate) fn start_ranks(
        &mut self,
        world: u32,
        command: impl Fn() -> Command,
    ) -> std::io::Result<()> {
        let port = free_port()?;
        for rank in 0..world {
            let mut command = command();
            command
                .env("RANK", rank.to_string())
                .env("LOCAL_RANK", rank.to_string())
                .env("WORLD_SIZE", world.to_string())
                .env("MASTER_ADDR", "127.0.0.1")
                .env("MASTER_PORT", port.to_string());
            self.start(&mut command)?;
        }
        Ok(())
    }

    /// The next line of any process, and the index of the process.
    pub(crate) fn next_line(&mut self) -> Result<(usize, String), EndOfLines> {
        // When the last process has ended, there are no senders any more.
        self.sender = None;
        loop {
            let slice = Duration::from_millis(50);
            match self.lines.recv_timeout(slice) {
                Ok(line) => return Ok(line),
                Err(RecvTimeoutError::Disconnected) => return Err(self.ends()),
                Err(RecvTimeoutError::Timeout) => {}
            }
            if let Some(failed) = self.failed() {
                // Lines that it wrote before come first.
                return self.lines.recv_timeout(slice).map_err(|_| failed);
            }
            if Instant::now() >= self.deadline {
                return Err(EndOfLines::Late);
            }
        }
    }

    /// Waits for processes that have closed their output.
    fn ends(&mut self) -> EndOfLines {
        loop {
            if let Some(failed) = self.failed() {
                return failed;
            }
            if self.children.iter_mut().all(|child| matches!(child.try_wait(), Ok(Some(_)))) {
                return EndOfLines::Done;
            }
            if Instant::now() >= self.deadline {
                return EndOfLines::Late;
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    fn failed(&mut self) -> Option<EndOfLines> {
        self.children.iter_mut().enumerate().find_map(|(index, child)| match child.try_wait() {
            Ok(Some(status)) if !status.success() => Some(EndOfLines::Failed(index, status)),
            _ => None,
        })
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        let running = |child: &mut Child| matches!(child.try_wait(), Ok(None));
        // SIGTERM first, which a launcher passes on to the processes it started.
        for child in self.children.iter_mut().filter_map(|child| running(child).then_some(child)) {
            if let Some(pid) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
                let _ = kill_process(pid, Signal::TERM);
            }
        }
        let patience = Instant::now() + Duration::from_secs(2);
        while Instant::now() < patience && self.children.iter_mut().any(running) {
            thread::sleep(Duration::from_millis(10));
        }
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Ends this process when the one that started it ends. Ranks must call this.
pub(crate) fn end_with_parent() {
    let _ = set_parent_process_death_signal(Some(Signal::TERM));
}

/// A port that is probably free.
fn free_port() -> std::io::Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

/// Element `index` of `rank`'s data: an integer from -256 to 255, so that sums of a few ranks are
/// exact in `f32` and every implementation must give the same.
pub(crate) fn value(seed: u32, rank: u32, index: usize) -> f32 {
    let x = (index as u32)
        .wrapping_mul(2_654_435_761)
        .wrapping_add(rank.wrapping_mul(2_246_822_519))
        .wrapping_add(seed.wrapping_mul(3_266_489_917));
    ((x ^ (x >> 15)).wrapping_mul(2_246_822_519) >> 23) as f32 - 256.0
}

/// `rank`'s data: `count` elements.
pub(crate) fn data(seed: u32, rank: u32, count: usize) -> Vec<f32> {
    (0..count).map(|index| value(seed, rank, index)).collect()
}

/// Element `index` of the sum of all ranks' data.
pub(crate) fn sum(seed: u32, world: u32, index: usize) -> f32 {
    (0..world).map(|rank| value(seed, rank, index)).sum()
}

/// A size as people write it: `64 KiB`.
pub(crate) fn size_name(bytes: usize) -> String {
    match bytes {
        b if b >= 1 << 20 && b.is_multiple_of(1 << 20) => format!("{} MiB", b >> 20),
        b if b >= 1 << 10 && b.is_multiple_of(1 << 10) => format!("{} KiB", b >> 10),
        b => format!("{b} B"),
    }
}

/// 1 KiB to 64 MiB.
pub(crate) fn sizes() -> Vec<usize> {
    (0..9).map(|step| 1024 << (2 * step)).collect()
}
