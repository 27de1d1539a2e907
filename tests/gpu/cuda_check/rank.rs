//! One rank: makes segments, maps its peers' segments too, and writes and reads patterns through all of them.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::process::ExitCode;
use std::time::Instant;

use serde_json::{Value, json};
use symmpool_allocator::driver::{
    CudaDriver, CudaOptions, Exported, MemoryDriver, Physical, Reservation,
};
use symmpool_allocator::{Deadline, HeapLayout};

use super::wire::{self, MessageKind, WireMessage};
use super::{CheckOptions, text};

/// How many segments a rank makes: one of the driver's granularity, and one of the requested size.
pub(crate) const SEGMENTS: u32 = 2;

/// How many times all ranks wait for each other.
pub(crate) const BARRIERS: u32 = 5;

/// The contents of this rank's memory before anyone writes.
const POISON: u32 = 0xdead_beef;

/// Runs rank `rank` and reports to the hub.
pub(crate) fn run(rank: u32, hub: &str, options: &CheckOptions, deadline: Deadline) -> ExitCode {
    let connected = SocketAddr::from_abstract_name(hub)
        .and_then(|address| UnixStream::connect_addr(&address))
        .map_err(|error| format!("connecting to the hub: {error}"));
    let mut socket = match connected {
        Ok(socket) => socket,
        Err(error) => {
            eprintln!("cuda_check: rank {rank}: {error}");
            return ExitCode::FAILURE;
        }
    };
    let outcome = wire::send(&mut socket, &WireMessage::new(MessageKind::Hello, rank, 0), deadline)
        .and_then(|()| Rank::start(rank, options, &mut socket, deadline))
        .and_then(Rank::exchange);
    let (kind, text, code) = match outcome {
        Ok(report) => (MessageKind::Report, report.to_string(), ExitCode::SUCCESS),
        Err(error) => (MessageKind::Failed, error, ExitCode::FAILURE),
    };
    if kind == MessageKind::Failed {
        eprintln!("cuda_check: rank {rank}: {text}");
    }
    match wire::send(&mut socket, &WireMessage::new(kind, rank, 0).with_payload(text), deadline) {
        Ok(()) => code,
        Err(error) => {
            eprintln!("cuda_check: rank {rank}: {error}");
            ExitCode::FAILURE
        }
    }
}

struct Rank<'a> {
    driver: CudaDriver,
    layout: HeapLayout,
    heap: Reservation,
    /// Sizes and offsets of the segments; the same on every rank.
    segments: [(u64, u64); SEGMENTS as usize],
    socket: &'a mut UnixStream,
    deadline: Deadline,
    barriers: u32,
    steps: Vec<(String, f64)>,
}

impl<'a> Rank<'a> {
    fn start(
        rank: u32,
        options: &CheckOptions,
        socket: &'a mut UnixStream,
        deadline: Deadline,
    ) -> Result<Self, String> {
        let mut steps = Vec::new();
        let count = CudaDriver::device_count().map_err(text)?;
        let with = CudaOptions { prefer_fabric: options.prefer_fabric, ..CudaOptions::default() };
        let driver = timed(&mut steps, "open the device", || {
            CudaDriver::with_options(rank % count.max(1), with)
        })?;
        let granule = driver.granularity();
        let large = (options.segment_mib << 20).next_multiple_of(granule);
        let stride = options.stride_gib << 30;
        if granule + large > stride {
            return Err(format!("segments of {large} bytes do not fit in slots of {stride}"));
        }
        let world = options.ranks;
        let bytes = u64::from(world) * stride;
        let heap = timed(&mut steps, "reserve", || driver.reserve(bytes, granule))?;
        Ok(Self {
            layout: HeapLayout { base: heap.base(), stride, rank, world },
            driver,
            heap,
            segments: [(0, granule), (granule, large)],
            socket,
            deadline,
            barriers: 0,
            steps,
        })
    }

    fn exchange(mut self) -> Result<Value, String> {
        let own = self.make_own()?;
        let exported = self.send_handles(&own)?;
        let peers = self.map_peers()?;
        self.barrier("all have mapped")?;
        // Only now may the exporter close its handles.
        drop(exported);
        self.write_patterns()?;
        self.barrier("all have written")?;
        self.read_patterns()?;
        self.barrier("all have read")?;
        // Mappings keep memory alive without its handles.
        for physical in own.into_iter().chain(peers) {
            timed(&mut self.steps, "release", || self.driver.release(physical))?;
        }
        self.fill_regions()?;
        self.barrier("all have filled")?;
        self.read_fills()?;
        self.barrier("all are done")?;
        self.tear_down()
    }

    fn make_own(&mut self) -> Result<Vec<Physical>, String> {
        let mut own = Vec::new();
        for (offset, bytes) in self.segments {
            let what = format!("create {} MiB", bytes >> 20);
            let physical = timed(&mut self.steps, &what, || self.driver.create(bytes))?;
            let at = self.offset_of(self.layout.rank, offset);
            let what = format!("map and allow access, own {} MiB", bytes >> 20);
            timed(&mut self.steps, &what, || self.driver.map(&self.heap, at, &physical))?;
            let address = self.layout.address(self.layout.rank, offset);
            // SAFETY: the segment is mapped there, and no peer has it yet.
            unsafe { self.driver.fill(address, POISON, bytes / 4) }.map_err(text)?;
            own.push(physical);
        }
        Ok(own)
    }

    /// Sends the handles. The caller keeps the returned messages until all peers have imported them.
    fn send_handles(&mut self, own: &[Physical]) -> Result<Vec<WireMessage>, String> {
        let mut sent = Vec::new();
        for (index, physical) in own.iter().enumerate() {
            let exported = timed(&mut self.steps, "export", || self.driver.export(physical))?;
            let mut message =
                WireMessage::new(MessageKind::Segment, self.layout.rank, index as u32);
            message.bytes = physical.bytes();
            match exported {
                Exported::Fd(fd) => message.fd = Some(fd),
                Exported::Bytes(bytes) => message.payload = bytes,
                Exported::Derived => {
                    return Err("the CUDA driver exported a derived handle".to_owned());
                }
            }
            wire::send(self.socket, &message, self.deadline)?;
            sent.push(message);
        }
        Ok(sent)
    }

    fn map_peers(&mut self) -> Result<Vec<Physical>, String> {
        let mut peers = Vec::new();
        for _ in 0..(self.layout.world - 1) * SEGMENTS {
            let message = wire::expect(self.socket, MessageKind::Segment, self.deadline)?;
            let (peer, index) = (message.rank, message.index);
            let (offset, bytes) = *self
                .segments
                .get(index as usize)
                .filter(|&&(_, bytes)| bytes == message.bytes && peer < self.layout.world)
                .ok_or(format!("segment {index} of rank {peer} has another size than ours"))?;
            let exported = match message.fd {
                Some(fd) => Exported::Fd(fd),
                None => Exported::Bytes(message.payload),
            };
            let what = format!("import {} MiB of rank {peer}", bytes >> 20);
            let physical = timed(&mut self.steps, &what, || self.driver.import(exported, bytes))?;
            let at = self.offset_of(peer, offset);
            let what = format!("map and allow access, {} MiB of rank {peer}", bytes >> 20);
            timed(&mut self.steps, &what, || self.driver.map(&self.heap, at, &physical))?;
            peers.push(physical);
        }
        Ok(peers)
    }

    /// Writes this rank's pattern into its region of every segment of every slot.
    fn write_patterns(&mut self) -> Result<(), String> {
        for owner in 0..self.layout.world {
            for segment in 0..SEGMENTS {
                let (address, words) = self.region(self.layout.rank, owner, segment);
                let data = pattern(self.layout.rank, owner, segment, words);
                let what = format!("write {} KiB to slot {owner}", data.len() >> 10);
                timed(&mut self.steps, &what, || {
                    // SAFETY: the region is mapped, and no other rank writes it.
                    unsafe { self.driver.copy_from_host(address, &data) }
                })?;
            }
        }
        Ok(())
    }

    /// Reads every rank's pattern from every slot, own and peers'.
    fn read_patterns(&mut self) -> Result<(), String> {
        for owner in 0..self.layout.world {
            for segment in 0..SEGMENTS {
                for writer in 0..self.layout.world {
                    let (address, words) = self.region(writer, owner, segment);
                    let mut read = vec![0u8; words as usize * 4];
                    let what = format!("read {} KiB from slot {owner}", read.len() >> 10);
                    timed(&mut self.steps, &what, || {
                        // SAFETY: the region is mapped, and all writers have finished.
                        unsafe { self.driver.copy_to_host(&mut read, address) }
                    })?;
                    let wanted = pattern(writer, owner, segment, words);
                    compare(&read, &wanted).map_err(|error| {
                        format!("segment {segment} of slot {owner}, written by {writer}: {error}")
                    })?;
                }
                self.check_tail(owner, segment)?;
            }
        }
        Ok(())
    }

    /// Checks that words outside of all regions still hold the poison.
    fn check_tail(&self, owner: u32, segment: u32) -> Result<(), String> {
        let (offset, bytes) = self.segments[segment as usize];
        let (_, words) = self.region(0, owner, segment);
        let used = words * 4 * u64::from(self.layout.world);
        let mut tail = vec![0u8; (bytes - used) as usize];
        if tail.is_empty() {
            return Ok(());
        }
        let address = self.layout.address(owner, offset) + used;
        // SAFETY: the tail of the segment is mapped, and nobody writes it.
        unsafe { self.driver.copy_to_host(&mut tail, address) }.map_err(text)?;
        let wanted = POISON.to_le_bytes().repeat(tail.len() / 4);
        compare(&tail, &wanted)
            .map_err(|error| format!("tail of segment {segment} of slot {owner}: {error}"))
    }

    /// Fills this rank's regions by the device, after the handles were released.
    fn fill_regions(&mut self) -> Result<(), String> {
        for owner in 0..self.layout.world {
            for segment in 0..SEGMENTS {
                let (address, words) = self.region(self.layout.rank, owner, segment);
                let value = word(self.layout.rank, owner, segment, u64::MAX);
                timed(&mut self.steps, &format!("fill a region of slot {owner}"), || {
                    // SAFETY: the region is mapped, and no other rank uses it.
                    unsafe { self.driver.fill(address, value, words) }
                })?;
            }
        }
        Ok(())
    }

    fn read_fills(&self) -> Result<(), String> {
        for segment in 0..SEGMENTS {
            for writer in 0..self.layout.world {
                let owner = self.layout.rank;
                let (address, words) = self.region(writer, owner, segment);
                let mut read = vec![0u8; words as usize * 4];
                // SAFETY: the region is mapped, and all writers have finished.
                unsafe { self.driver.copy_to_host(&mut read, address) }.map_err(text)?;
                let value = word(writer, owner, segment, u64::MAX);
                compare(&read, &value.to_le_bytes().repeat(words as usize))
                    .map_err(|error| format!("fill of rank {writer}: {error}"))?;
            }
        }
        Ok(())
    }

    fn tear_down(mut self) -> Result<Value, String> {
        for peer in 0..self.layout.world {
            for (offset, bytes) in self.segments {
                let at = self.offset_of(peer, offset);
                let what = format!("unmap {} MiB of slot {peer}", bytes >> 20);
                timed(&mut self.steps, &what, || self.driver.unmap(&self.heap, at, bytes))?;
            }
        }
        let Self { driver, heap, mut steps, .. } = self;
        timed(&mut steps, "give the addresses back", || driver.unreserve(heap))?;
        let facts = driver.facts();
        Ok(json!({
            "device": driver.device(),
            "transport": driver.transport(),
            "facts": {
                "driver_version": facts.driver_version,
                "ordinal": facts.ordinal,
                "total_bytes": facts.total_bytes,
                "granularity": facts.granularity,
                "posix_fd": facts.posix_fd,
                "fabric": facts.fabric.to_string(),
                "gpu_direct_rdma": facts.gpu_direct_rdma,
            },
            "steps_us": steps,
        }))
    }

    fn barrier(&mut self, what: &str) -> Result<(), String> {
        let index = self.barriers;
        self.barriers += 1;
        let waiting = |error| format!("at the barrier where {what}: {error}");
        let here = WireMessage::new(MessageKind::Barrier, self.layout.rank, index);
        wire::send(self.socket, &here, self.deadline).map_err(waiting)?;
        wire::expect(self.socket, MessageKind::Barrier, self.deadline).map_err(waiting)?;
        Ok(())
    }

    /// The offset in the reservation of `offset` in `rank`'s slot.
    fn offset_of(&self, rank: u32, offset: u64) -> u64 {
        u64::from(rank) * self.layout.stride + offset
    }

    /// Address and length in words of `writer`'s part of a segment of `owner`.
    fn region(&self, writer: u32, owner: u32, segment: u32) -> (u64, u64) {
        let (offset, bytes) = self.segments[segment as usize];
        let words = bytes / 4 / u64::from(self.layout.world);
        (self.layout.address(owner, offset) + u64::from(writer) * words * 4, words)
    }
}

/// A word that differs for every writer, owner, segment and position.
fn word(writer: u32, owner: u32, segment: u32, at: u64) -> u32 {
    let mut x = u64::from(writer) << 48 | u64::from(owner) << 32 | u64::from(segment) << 30;
    x = (x ^ at).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (x >> 32) as u32
}

fn pattern(writer: u32, owner: u32, segment: u32, words: u64) -> Vec<u8> {
    (0..words).flat_map(|at| word(writer, owner, segment, at).to_le_bytes()).collect()
}

fn compare(read: &[u8], wanted: &[u8]) -> Result<(), String> {
    if read == wanted {
        return Ok(());
    }
    let wrong = read.iter().zip(wanted).filter(|(a, b)| a != b).count();
    let first = read.iter().zip(wanted).position(|(a, b)| a != b).unwrap_or(wanted.len());
    Err(format!("{wrong} of {} bytes are wrong, the first at {first}", wanted.len()))
}

fn timed<T>(
    steps: &mut Vec<(String, f64)>,
    what: &str,
    call: impl FnOnce() -> symmpool_allocator::Result<T>,
) -> Result<T, String> {
    let start = Instant::now();
    let result = call();
    steps.push((what.to_owned(), start.elapsed().as_secs_f64() * 1e6));
    result.map_err(|error| format!("{what}: {error}"))
}
