//! Ranks that are processes: the test binary starts itself again, over a memfd that the children open through `/proc`.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::fd::AsRawFd;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::mm::{MapFlags, ProtFlags, mmap};
use symmpool_allocator::HeapLayout;

use crate::flat_heap::memory;
use symmpool_collectives::{HostEngine, HostEngineOptions, ReduceOp};

const WORLD: u32 = 3;
const STRIDE: u64 = 8 << 20;
const BYTES: u64 = STRIDE * WORLD as u64;

/// Environment variables of a child: its role, its rank, and the memory that it shares with the others.
const ROLE: &str = "SYMMPOOL_TEST_ROLE";
const RANK: &str = "SYMMPOOL_TEST_RANK";
const MEMORY: &str = "SYMMPOOL_TEST_MEMORY";

/// Children that are killed and reaped however the test ends.
pub(crate) struct Children(Vec<Child>);

impl Drop for Children {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Children {
    /// Starts `world` processes, one for each rank, each running `test` of this binary in `role`, which share `bytes`
    /// bytes of zeroed memory.
    pub(crate) fn start(test: &str, role: &str, world: u32, bytes: u64) -> Self {
        let memory = memory();
        memory.set_len(bytes).unwrap();
        let path = format!("/proc/{}/fd/{}", std::process::id(), memory.as_raw_fd());
        let mut children = Self(Vec::new());
        for rank in 0..world {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args([test, "--exact", "--nocapture"]);
            command.env(ROLE, role).env(RANK, rank.to_string()).env(MEMORY, &path);
            command.stdout(Stdio::piped());
            children.0.push(command.spawn().unwrap());
        }
        // A child says "ready" after it has opened the memory. All must have, before it is closed here.
        for rank in 0..world {
            children.expect(rank, "ready");
        }
        children
    }

    /// Waits until a rank has ended.
    pub(crate) fn wait(&mut self, rank: u32) -> ExitStatus {
        self.0[rank as usize].wait().unwrap()
    }

    /// Reads a rank's output up to the line that ends with `text`, and returns that line.
    pub(crate) fn expect(&mut self, rank: u32, text: &str) -> String {
        let stdout = self.0[rank as usize].stdout.as_mut().unwrap();
        // The reader has no buffer, so that nothing behind the line is lost with it.
        let mut reader = BufReader::with_capacity(1, stdout);
        loop {
            let mut line = String::new();
            assert_ne!(reader.read_line(&mut line).unwrap(), 0, "rank {rank} ended early");
            if line.trim_end().ends_with(text) || line.contains(&format!("{text}:")) {
                return line;
            }
        }
    }
}

/// Where a child writes its process id before it says "ready": at the end of its slot.
fn pid(layout: &HeapLayout, rank: u32) -> &'static AtomicU64 {
    let at = layout.address(rank, STRIDE - 64) as *mut u64;
    // SAFETY: it lies in a mapping that is never unmapped, is aligned, past the control block, and only ever used as
    // this atomic.
    unsafe { AtomicU64::from_ptr(at) }
}

/// A child's engine, over the shared memory. If `watchful`, it checks whether peers' processes run.
fn engine(watchful: bool) -> HostEngine {
    let (rank, memory) = child();
    let (access, shared) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
    let bytes = BYTES as usize;
    // SAFETY: a new mapping at an address of the kernel's choosing.
    let base = unsafe { mmap(std::ptr::null_mut(), bytes, access, shared, &memory, 0) }.unwrap();
    let layout = HeapLayout { base: base as u64, stride: STRIDE, rank, world: WORLD };
    pid(&layout, rank).store(u64::from(std::process::id()), Ordering::Release);
    let mut options = HostEngineOptions::default();
    if watchful {
        options.peer_alive = Some(Box::new(move |peer| {
            let process = pid(&layout, peer).load(Ordering::Acquire);
            process == 0 || std::path::Path::new(&format!("/proc/{process}")).exists()
        }));
    }
    let control = HostEngine::control_bytes(WORLD, &options).unwrap();
    // SAFETY: the mapping is as long as the heap, new memfd pages are zero, it is never unmapped,
    // and nothing else uses it.
    unsafe { HostEngine::new(layout, 0, control, options) }.unwrap()
}

/// A child's rank, and the memory it shares with the others.
pub(crate) fn child() -> (u32, File) {
    let rank = std::env::var(RANK).unwrap().parse().unwrap();
    let path = std::env::var_os(MEMORY).unwrap();
    (rank, File::options().read(true).write(true).open(path).unwrap())
}

/// The role of this process, if it is a child.
pub(crate) fn role() -> Option<String> {
    std::env::var(ROLE).ok()
}

#[test]
fn processes_reduce_together() {
    if role().as_deref() == Some("reduce") {
        let mut engine = engine(false);
        println!("\nready");
        for call in 0..500 {
            let mut data = vec![i64::from(engine.rank()) + call; 40_000];
            engine.all_reduce_slice(&mut data, ReduceOp::Sum).unwrap();
            assert!(data.iter().all(|x| *x == 3 + 3 * call));
        }
        println!("\nwhole");
        return;
    }
    let mut children =
        Children::start("process::processes_reduce_together", "reduce", WORLD, BYTES);
    for rank in 0..WORLD {
        children.expect(rank, "whole");
        assert!(children.wait(rank).success());
    }
}

#[test]
fn a_killed_process_is_named_by_the_others() {
    // S5: rank 1 is killed during its calls. Rank 0 checks its process and notices that it has ended; rank 2 does not
    // check processes, and gets rank 0's report.
    if role().as_deref() == Some("killed") {
        let watchful = std::env::var(RANK).unwrap() == "0";
        let mut engine = engine(watchful);
        println!("\nready");
        let mut data = vec![1.0f32; 300_000];
        let error = loop {
            if let Err(error) = engine.all_reduce_slice(&mut data, ReduceOp::Max) {
                break error;
            }
        };
        assert!(error.is_peer_lost() && error.ranks() == [1], "{error}");
        assert!(engine.barrier().unwrap_err().is_peer_lost());
        println!("\nfailed: {error}");
        return;
    }
    let mut children =
        Children::start("process::a_killed_process_is_named_by_the_others", "killed", WORLD, BYTES);
    let began = Instant::now();
    children.0[1].kill().unwrap();
    children.wait(1);
    for rank in [0, 2] {
        children.expect(rank, "failed");
        assert!(children.wait(rank).success());
    }
    assert!(began.elapsed() < Duration::from_secs(20));
}
