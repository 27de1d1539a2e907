//! Sequences of calls of the C API in a process that is the only rank, beside a naive allocator.

#![allow(unsafe_code)] // the API's functions, and memory that they hand out

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_void};
use std::ptr::{null, null_mut};

use arbitrary::Arbitrary;
use symmpool::Status;
use symmpool::capi::comm::{
    symmpool_all_reduce, symmpool_barrier, symmpool_broadcast, symmpool_comm_create,
    symmpool_comm_destroy, symmpool_comm_set_timeout, symmpool_comm_synchronize,
};
use symmpool::capi::group::{symmpool_group_destroy, symmpool_group_in_directory};
use symmpool::capi::memory::{
    symmpool_alloc, symmpool_forget_stream, symmpool_free, symmpool_free_unordered,
    symmpool_record_stream, symmpool_reserve,
};
use symmpool::capi::pool::{
    PoolStats, symmpool_commit, symmpool_is_commit_due, symmpool_pool_create,
    symmpool_pool_destroy, symmpool_resync, symmpool_stats,
};
use symmpool::capi::slot::{symmpool_slot_bind, symmpool_slot_release};
use symmpool::capi::symmpool_last_error;
use symmpool::capi::window::{Window, symmpool_is_window, symmpool_peer_pointer, symmpool_windows};
use symmpool::slots::SLOTS;
use tempfile::TempDir;

use crate::{FuzzTarget, value_of};

pub(crate) const TARGET: FuzzTarget = FuzzTarget {
    name: "c_calls",
    run,
    words: &[],
    quick: 600,
    max_memory: 64 << 20,
    max_input: 1024,
};

/// A handle: one that was returned, one of another kind, or any number.
#[derive(Arbitrary, Clone, Copy, Debug)]
enum Handle {
    Nth(u8),
    Gone(u8),
    Any(u64),
}

/// An address: of a live block, of one that was freed, near one, or any.
#[derive(Arbitrary, Clone, Copy, Debug)]
enum HandleChoice {
    Nth(u8),
    Near(u8, i16),
    Freed(u8),
    Null,
    Any(u64),
}

#[derive(Arbitrary, Clone, Debug)]
enum CCall {
    PoolCreate(Handle, Option<String>, u64, u8, bool),
    PoolDestroy(Handle),
    GroupDestroy(Handle),
    Alloc(Handle, u32, u8, u8),
    AllocAny(Handle, usize, u64),
    Free(Handle, HandleChoice, bool),
    Record(Handle, HandleChoice, u8),
    Reserve(Handle, u64),
    ForgetStream(Handle, u8),
    Commit(Handle, bool),
    Resync(Handle),
    IsDue(Handle),
    Stats(Handle, WrongArgument),
    IsWindow(Handle, HandleChoice, u64),
    PeerPointer(Handle, u32, HandleChoice),
    Windows(Handle, u8),
    SlotBind(Handle),
    SlotRelease(u8),
    CommCreate(Handle, Seconds),
    CommTimeout(Handle, Seconds),
    CommDestroy(Handle),
    Reduce(Handle, u8, u32, u32, bool),
    Broadcast(Handle, u8, u32, u32),
    Barrier(Handle),
    Synchronize(Handle),
    GroupOf(u32, u32, Option<String>, Seconds),
}

/// A pointer to a result: a right one, NULL, or one that is not aligned.
#[derive(Arbitrary, Clone, Copy, Debug)]
enum WrongArgument {
    No,
    Null,
    Odd,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Seconds {
    Ten,
    Any(u64),
}

impl Seconds {
    fn value(self) -> f64 {
        match self {
            Self::Ten => 10.0,
            Self::Any(bits) => f64::from_bits(bits),
        }
    }
}

/// A live block: its pool, its length, and the byte that it is filled with.
#[derive(Clone, Copy)]
struct BlockOfC {
    pool: u64,
    bytes: usize,
    byte: u8,
}

#[derive(Default)]
struct Process {
    pools: Vec<u64>,
    groups: Vec<u64>,
    comms: Vec<u64>,
    gone: Vec<u64>,
    slots: Vec<u32>,
    live: BTreeMap<u64, BlockOfC>,
    freed: Vec<u64>,
    serial: u8,
}

fn run(bytes: &[u8]) {
    let Some(calls) = value_of::<Vec<CCall>>(bytes) else { return };
    let directory = TempDir::new().expect("a temporary folder");
    let mut process = Process::default();
    let group = process.group(0, 1, directory.path().to_str(), Seconds::Ten);
    assert_eq!(group, Status::Ok, "{}", last_error());
    process.make_pool(process.groups[0], Some("cpu"), 1 << 30, 0);
    assert_eq!(process.pools.len(), 1, "{}", last_error());
    for call in calls.iter().take(64) {
        let status = process.call(call);
        if status != Status::Ok {
            let text = last_error();
            assert!(!text.is_empty() && text.len() < 4096, "{call:?}: {text}");
            assert!(status != Status::Internal && status != Status::System, "{call:?}: {text}");
        }
        process.check();
    }
    process.end();
}

fn last_error() -> String {
    let mut text: *const c_char = null();
    // SAFETY: the pointer can be written to.
    unsafe { symmpool_last_error(&raw mut text) };
    // SAFETY: the call wrote a C string, which lives until the next call of this thread fails.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

fn stream(number: u8) -> *mut c_void {
    usize::from(number % 80) as *mut c_void
}

fn c_text(text: Option<&str>) -> Option<CString> {
    text.map(|text| CString::new(text.replace('\0', "0")).expect("no NUL is left"))
}

impl Process {
    fn pick(of: &[u64], gone: &[u64], handle: Handle) -> u64 {
        let nth = |of: &[u64], at: u8| of.get(usize::from(at) % of.len().max(1)).copied();
        match handle {
            Handle::Nth(at) => nth(of, at).unwrap_or(0),
            Handle::Gone(at) => nth(gone, at).unwrap_or(u64::MAX),
            Handle::Any(any) => any,
        }
    }

    fn pool(&self, handle: Handle) -> u64 {
        Self::pick(&self.pools, &self.gone, handle)
    }

    fn comm(&self, handle: Handle) -> u64 {
        Self::pick(&self.comms, &self.gone, handle)
    }

    fn address(&self, place: HandleChoice) -> u64 {
        let nth = |at: u8| {
            let at = usize::from(at) % self.live.len().max(1);
            self.live.keys().nth(at).copied().unwrap_or(0)
        };
        match place {
            HandleChoice::Nth(at) => nth(at),
            HandleChoice::Near(at, by) => nth(at).wrapping_add_signed(by.into()),
            HandleChoice::Freed(at) => {
                let at = usize::from(at) % self.freed.len().max(1);
                self.freed.get(at).copied().unwrap_or(0)
            }
            HandleChoice::Null => 0,
            HandleChoice::Any(any) => any,
        }
    }

    fn group(&mut self, rank: u32, world: u32, directory: Option<&str>, time: Seconds) -> Status {
        let (name, mut group) = (c_text(directory), 0);
        let name = name.as_ref().map_or(null(), |name| name.as_ptr());
        // SAFETY: the name is NULL or a C string that lives until the end of this function, and the handle can be written.
        let status =
            unsafe { symmpool_group_in_directory(rank, world, name, time.value(), &raw mut group) };
        if status == Status::Ok {
            self.groups.push(group);
        }
        status
    }

    fn make_pool(&mut self, group: u64, device: Option<&str>, stride: u64, flags: u32) -> Status {
        let (name, mut pool) = (c_text(device), 0);
        let name = name.as_ref().map_or(null(), |name| name.as_ptr());
        // SAFETY: the name is NULL or a C string that lives until the end of this function, and the handle can be written.
        let status = unsafe { symmpool_pool_create(group, name, stride, flags, &raw mut pool) };
        if status == Status::Ok {
            self.pools.push(pool);
        }
        status
    }

    fn call(&mut self, call: &CCall) -> Status {
        match call {
            CCall::PoolCreate(group, device, stride, flags, right) => {
                if self.pools.len() > 3 {
                    return Status::Ok;
                }
                let group = Self::pick(&self.groups, &self.gone, *group);
                // Devices of the machine are for other tests.
                let device = device.as_deref().filter(|name| !name.starts_with("cuda"));
                let device = if *right { Some("cpu") } else { Some(device.unwrap_or("gpu")) };
                let stride = if *right { 1 << 30 } else { *stride };
                self.make_pool(group, device, stride, u32::from(*flags))
            }
            CCall::PoolDestroy(pool) => {
                let pool = self.pool(*pool);
                let known = self.pools.contains(&pool);
                let status = symmpool_pool_destroy(pool);
                assert_eq!(status == Status::Ok, known);
                if known {
                    self.forget_pool(pool);
                }
                status
            }
            CCall::GroupDestroy(group) => {
                let group = Self::pick(&self.groups, &self.gone, *group);
                let status = symmpool_group_destroy(group);
                assert_eq!(status == Status::Ok, self.groups.contains(&group));
                self.groups.retain(|each| *each != group);
                self.gone.push(group);
                status
            }
            CCall::Alloc(pool, bytes, align, on) => self.alloc(
                self.pool(*pool),
                (bytes % (1 << 18)) as usize,
                1 << (align % 22),
                stream(*on),
            ),
            CCall::AllocAny(pool, bytes, align) => {
                let bytes = if *bytes > 1 << 22 { bytes | 1 << 45 } else { *bytes };
                self.alloc(self.pool(*pool), bytes, *align, null_mut())
            }
            CCall::Free(pool, place, ordered) => {
                self.free(self.pool(*pool), self.address(*place), *ordered)
            }
            CCall::Record(pool, place, on) => {
                let (pool, address) = (self.pool(*pool), self.address(*place));
                // SAFETY: in host memory a stream is a number.
                let status =
                    unsafe { symmpool_record_stream(pool, address as *mut c_void, stream(*on)) };
                let known = self.live.get(&address).is_some_and(|block| block.pool == pool);
                assert!(known || status != Status::Ok, "a use of no block was recorded");
                status
            }
            CCall::Reserve(pool, bytes) => {
                let bytes = if *bytes > 1 << 22 { bytes | 1 << 45 } else { *bytes };
                // SAFETY: NULL is the default stream.
                let status = unsafe { symmpool_reserve(self.pool(*pool), bytes, null_mut()) };
                assert!(bytes < 1 << 45 || status != Status::Ok);
                status
            }
            CCall::ForgetStream(pool, on) => {
                // SAFETY: in host memory a stream is a number.
                unsafe { symmpool_forget_stream(self.pool(*pool), stream(*on)) }
            }
            CCall::Commit(pool, null) => self.commit(self.pool(*pool), *null),
            CCall::Resync(pool) => symmpool_resync(self.pool(*pool)),
            CCall::IsDue(pool) => {
                let mut due = false;
                // SAFETY: the result can be written to.
                unsafe { symmpool_is_commit_due(self.pool(*pool), &raw mut due) }
            }
            CCall::Stats(pool, wrong) => self.stats(self.pool(*pool), *wrong),
            CCall::IsWindow(pool, place, bytes) => {
                let mut is = false;
                let address = self.address(*place) as *const c_void;
                // SAFETY: the result can be written to.
                unsafe { symmpool_is_window(self.pool(*pool), address, *bytes, &raw mut is) }
            }
            CCall::PeerPointer(pool, rank, place) => {
                let (address, mut peer) = (self.address(*place), null_mut());
                // SAFETY: the result can be written to.
                let status = unsafe {
                    symmpool_peer_pointer(
                        self.pool(*pool),
                        *rank,
                        address as *const c_void,
                        &raw mut peer,
                    )
                };
                assert!(status != Status::Ok || *rank == 0 && peer as u64 == address);
                status
            }
            CCall::Windows(pool, capacity) => {
                let capacity = usize::from(capacity % 8);
                let mut found = vec![Window { offset: 0, bytes: 0, counter: 0 }; capacity];
                let mut count = 0;
                // SAFETY: so many entries can be written, and the count.
                unsafe {
                    symmpool_windows(self.pool(*pool), found.as_mut_ptr(), capacity, &raw mut count)
                }
            }
            CCall::SlotBind(pool) => {
                let mut slot = u32::MAX;
                // SAFETY: the number can be written to.
                let status = unsafe { symmpool_slot_bind(self.pool(*pool), &raw mut slot) };
                if status == Status::Ok {
                    assert!((slot as usize) < SLOTS && !self.slots.contains(&slot));
                    self.slots.push(slot);
                }
                status
            }
            CCall::SlotRelease(slot) => {
                let slot = u32::from(*slot);
                let status = symmpool_slot_release(slot);
                assert_eq!(status == Status::Ok, self.slots.contains(&slot));
                self.slots.retain(|each| *each != slot);
                status
            }
            CCall::CommCreate(pool, time) => {
                if self.comms.len() > 3 {
                    return Status::Ok;
                }
                let mut comm = 0;
                // SAFETY: the handle can be written to.
                let status =
                    unsafe { symmpool_comm_create(self.pool(*pool), time.value(), &raw mut comm) };
                if status == Status::Ok {
                    self.comms.push(comm);
                }
                status
            }
            CCall::CommTimeout(comm, time) => {
                symmpool_comm_set_timeout(self.comm(*comm), time.value())
            }
            CCall::CommDestroy(comm) => {
                let comm = self.comm(*comm);
                let status = symmpool_comm_destroy(comm);
                assert_eq!(status == Status::Ok, self.comms.contains(&comm));
                self.comms.retain(|each| *each != comm);
                self.gone.push(comm);
                status
            }
            CCall::Reduce(comm, count, dtype, op, null) => {
                let input: Vec<u128> = (0..u128::from(*count)).collect();
                let mut output = vec![77_u128; (*count).into()];
                let to = if *null { null_mut() } else { output.as_mut_ptr().cast() };
                let (from, count) = (input.as_ptr().cast(), usize::from(*count));
                // SAFETY: both have at least as many bytes as so many elements of the largest type, and live until the
                // call returns, when work in host memory is done.
                let status = unsafe {
                    symmpool_all_reduce(self.comm(*comm), to, from, count, *dtype, *op, null_mut())
                };
                if status == Status::Ok && *dtype == 5 && !null {
                    // Each reduction of one rank's i64 is its input.
                    let whole = |all: &[u128]| {
                        all.iter()
                            .flat_map(|each| each.to_ne_bytes())
                            .take(8 * count)
                            .collect::<Vec<u8>>()
                    };
                    assert_eq!(whole(&output), whole(&input));
                }
                status
            }
            CCall::Broadcast(comm, count, dtype, root) => {
                let mut data = vec![5_u128; (*count).into()];
                let (data, count) = (data.as_mut_ptr().cast(), usize::from(*count));
                // SAFETY: the data has at least as many bytes as so many elements of the largest type, and lives until the
                // call returns, when work in host memory is done.
                let status = unsafe {
                    symmpool_broadcast(self.comm(*comm), data, count, *dtype, *root, null_mut())
                };
                assert!(status != Status::Ok || *root == 0, "there is no rank {root}");
                status
            }
            // SAFETY: NULL is the default stream.
            CCall::Barrier(comm) => unsafe { symmpool_barrier(self.comm(*comm), null_mut()) },
            CCall::Synchronize(comm) => {
                // SAFETY: NULL is the default stream.
                unsafe { symmpool_comm_synchronize(self.comm(*comm), null_mut()) }
            }
            CCall::GroupOf(rank, world, directory, time) => {
                // A folder of any name would be made anywhere.
                let directory = directory.as_ref().map(|_| "/proc/self/nowhere");
                let status = self.group(*rank, *world, directory, *time);
                assert_ne!(status, Status::Ok);
                if status == Status::System { Status::Ok } else { status }
            }
        }
    }

    fn alloc(&mut self, pool: u64, bytes: usize, align: u64, on: *mut c_void) -> Status {
        let mut pointer = null_mut();
        // SAFETY: in host memory a stream is a number, and the result can be written to.
        let status = unsafe { symmpool_alloc(pool, bytes, align, on, &raw mut pointer) };
        if status == Status::Ok {
            assert!(self.pools.contains(&pool) && bytes <= 1 << 30);
            self.serial = self.serial.wrapping_add(1);
            let address = pointer as u64;
            assert_eq!(address % if align == 0 { 512 } else { align }, 0);
            // SAFETY: the block was just allocated, and has this length.
            unsafe { pointer.cast::<u8>().write_bytes(self.serial, bytes) };
            let before = self.live.insert(address, BlockOfC { pool, bytes, byte: self.serial });
            assert!(before.is_none(), "{address:#x} was handed out twice");
        }
        status
    }

    fn free(&mut self, pool: u64, address: u64, ordered: bool) -> Status {
        let free = if ordered { symmpool_free } else { symmpool_free_unordered };
        let status = free(pool, address as *mut c_void);
        let known = self.live.get(&address).is_some_and(|block| block.pool == pool);
        assert_eq!(status == Status::Ok, known, "free of {address:#x} in pool {pool}");
        if known {
            self.live.remove(&address);
            self.freed.push(address);
        }
        status
    }

    fn commit(&mut self, pool: u64, no_report: bool) -> Status {
        let report = symmpool::capi::pool::CommitReport {
            number: 0,
            windows_added: 0,
            windows_removed: 0,
            blocks_returned: 0,
        };
        let mut report = report;
        let out = if no_report { null_mut() } else { &raw mut report };
        // SAFETY: the report is NULL or can be written to.
        let status = unsafe { symmpool_commit(pool, out) };
        assert_eq!(status == Status::Ok, self.pools.contains(&pool), "{}", last_error());
        if status == Status::Ok {
            for (address, block) in self.live.iter().filter(|(_, block)| block.pool == pool) {
                let mut is = false;
                // SAFETY: the result can be written to.
                let asked = unsafe {
                    symmpool_is_window(
                        pool,
                        *address as *const c_void,
                        block.bytes as u64,
                        &raw mut is,
                    )
                };
                assert!(asked == Status::Ok && (is || block.bytes == 0));
            }
        }
        status
    }

    fn stats(&mut self, pool: u64, wrong: WrongArgument) -> Status {
        let mut room = [PoolStats { allocated: 0, reserved: 0, commits: 0, windows: 0 }; 2];
        let right = room.as_mut_ptr();
        let out = match wrong {
            WrongArgument::No => right,
            WrongArgument::Null => null_mut(),
            WrongArgument::Odd => right.wrapping_byte_add(1),
        };
        // SAFETY: the pointer is NULL, not aligned, which are refused, or can be written to.
        let status = unsafe { symmpool_stats(pool, out) };
        if status == Status::Ok {
            assert!(matches!(wrong, WrongArgument::No));
            let asked: usize = self
                .live
                .values()
                .filter(|block| block.pool == pool)
                .map(|block| block.bytes)
                .sum();
            assert!(room[0].allocated >= asked as u64 && room[0].reserved >= room[0].allocated);
        }
        status
    }

    /// A pool that was destroyed, with blocks that nobody frees any more.
    fn forget_pool(&mut self, pool: u64) {
        self.pools.retain(|each| *each != pool);
        self.gone.push(pool);
        let freed = self.live.extract_if(.., |_, block| block.pool == pool);
        self.freed.extend(freed.map(|(address, _)| address));
    }

    /// Blocks lie apart, and hold what was written.
    fn check(&self) {
        let mut end = 0;
        for (&address, block) in &self.live {
            assert!(address >= end, "blocks overlap at {address:#x}");
            end = address + block.bytes as u64;
            // SAFETY: the block is live, so its memory is mapped, and nothing writes to it.
            let held = unsafe { std::slice::from_raw_parts(address as *const u8, block.bytes) };
            assert!(held.iter().all(|byte| *byte == block.byte), "{address:#x} was written to");
        }
    }

    fn end(&mut self) {
        for slot in std::mem::take(&mut self.slots) {
            assert_eq!(symmpool_slot_release(slot), Status::Ok);
        }
        for comm in std::mem::take(&mut self.comms) {
            assert_eq!(symmpool_comm_destroy(comm), Status::Ok);
        }
        for (address, block) in std::mem::take(&mut self.live) {
            assert_eq!(symmpool_free(block.pool, address as *mut c_void), Status::Ok);
        }
        for pool in std::mem::take(&mut self.pools) {
            assert_eq!(symmpool_pool_destroy(pool), Status::Ok);
            assert_eq!(symmpool_resync(pool), Status::InvalidArgument);
        }
        for group in std::mem::take(&mut self.groups) {
            assert_eq!(symmpool_group_destroy(group), Status::Ok);
        }
    }
}
