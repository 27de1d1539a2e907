//! The counter-example: shared windows, and a caching allocator that knows its free blocks by
//! size and **address**, as most do.
//!
//! Nothing in it is wrong by itself. Every rank has the same windows and makes the same calls; only
//! where the windows lie in each address space differs, and with it which of two equally good free
//! blocks comes first.
#![allow(unsafe_code)] // maps windows

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap};
use symmpool_allocator::{Error, Group, Result, Stream};
use symmpool_collectives::Communicator;

use crate::clutter::Clutter;
use crate::program::Memory;
use crate::report::{Map, Placed};

/// Windows of each rank.
const WINDOWS: usize = 8;
/// Bytes of each.
const WINDOW: usize = 4 << 20;

/// One rank's windows and what is free in them.
pub(crate) struct ByAddress<'a> {
    /// Every rank's windows by index; the same memory on all ranks.
    windows: Vec<Vec<File>>,
    /// Where this rank's windows begin in its address space, and their index.
    starts: BTreeMap<usize, usize>,
    /// Free blocks: length, then address.
    free: BTreeSet<(usize, usize)>,
    live: BTreeMap<usize, (u32, usize)>,
    rank: usize,
    comm: &'a Communicator,
}

/// A tensor: its address, and how many elements.
pub(crate) struct Tensor {
    address: usize,
    count: usize,
}

impl<'a> ByAddress<'a> {
    /// Makes and shares the windows; other things happen in the address space meanwhile.
    pub(crate) fn new(
        group: &Group,
        comm: &'a Communicator,
        clutter: &mut Clutter,
    ) -> Result<Self> {
        let failed = |error| Error::system("making a window", error);
        let (mut own, mut starts) = (Vec::new(), BTreeMap::new());
        for index in 0..WINDOWS {
            let file = memfd_create("window", MemfdFlags::CLOEXEC).map_err(failed)?;
            ftruncate(&file, WINDOW as u64).map_err(failed)?;
            clutter.churn()?;
            let access = ProtFlags::READ | ProtFlags::WRITE;
            // SAFETY: a new mapping at an address of the kernel's choosing; only its address is
            // used, the data goes through the descriptor, which is the same memory.
            let start =
                unsafe { mmap(std::ptr::null_mut(), WINDOW, access, MapFlags::SHARED, &file, 0) };
            starts.insert(start.map_err(failed)? as usize, index);
            own.push(File::from(file));
        }
        let descriptors: Vec<i32> = own.iter().map(AsRawFd::as_raw_fd).collect();
        let told = serde_json::to_vec(&(std::process::id(), descriptors))
            .map_err(|error| Error::system("describing windows", error))?;
        let all = group.all_gather("windows", &told, group.deadline())?;
        let windows = all.parts().map(open).collect::<Result<_>>()?;
        // All have opened all before anybody can end.
        comm.barrier(&Stream::DEFAULT)?;
        let free = starts.keys().map(|start| (WINDOW, *start)).collect();
        let rank = comm.rank() as usize;
        Ok(Self { windows, starts, free, live: BTreeMap::new(), rank, comm })
    }

    /// Which window an address of this rank is in, and where in it.
    fn locate(&self, address: usize) -> (usize, u64) {
        let (start, index) = self.starts.range(..=address).next_back().expect("in a window");
        (*index, (address - start) as u64)
    }
}

/// Opens another rank's windows through its descriptors.
fn open(told: &[u8]) -> Result<Vec<File>> {
    let failed = |error: &dyn std::fmt::Display| Error::system("opening a peer's windows", error);
    let (pid, descriptors): (u32, Vec<i32>) =
        serde_json::from_slice(told).map_err(|error| failed(&error))?;
    let path = |fd| format!("/proc/{pid}/fd/{fd}");
    let open = |fd| OpenOptions::new().read(true).write(true).open(path(fd));
    descriptors.into_iter().map(|fd| open(fd).map_err(|error| failed(&error))).collect()
}

impl Memory for ByAddress<'_> {
    type Tensor = Tensor;

    fn alloc(&mut self, number: u32, count: usize) -> Result<Tensor> {
        let bytes = count * size_of::<f32>();
        let fit = self.free.range((bytes, 0)..).next().copied();
        let (length, address) =
            fit.ok_or_else(|| Error::out_of_memory(format!("no window has {bytes} bytes left")))?;
        self.free.remove(&(length, address));
        if length > bytes {
            self.free.insert((length - bytes, address + bytes));
        }
        self.live.insert(address, (number, bytes));
        Ok(Tensor { address, count })
    }

    fn free(&mut self, tensor: Tensor) -> Result<()> {
        let (mut start, mut end) =
            (tensor.address, tensor.address + tensor.count * size_of::<f32>());
        self.live.remove(&tensor.address);
        // Neighbours merge, within the window.
        let (window, _) = self.locate(start);
        let near = |block: &(usize, usize)| self.locate(block.1).0 == window;
        let before = self.free.iter().find(|block| block.0 + block.1 == start && near(block));
        let after = self.free.iter().find(|block| block.1 == end && near(block));
        for (length, address) in [before, after].map(Option::<&_>::copied).into_iter().flatten() {
            self.free.remove(&(length, address));
            (start, end) = (start.min(address), end.max(address + length));
        }
        self.free.insert((end - start, start));
        Ok(())
    }

    fn write(&mut self, tensor: &Tensor, values: &[f32]) -> Result<()> {
        let (window, offset) = self.locate(tensor.address);
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let written = self.windows[self.rank][window].write_all_at(&bytes, offset);
        written.map_err(|error| Error::system("writing a tensor", error))
    }

    fn read(&mut self, tensor: &Tensor) -> Result<Vec<f32>> {
        self.read_of(self.rank, tensor)
    }

    /// As with registered windows: a rank's tensor is known by its window and offset there, and
    /// what lies at that place on the other ranks is taken for the same tensor.
    fn all_reduce(&mut self, tensor: &Tensor) -> Result<()> {
        self.comm.barrier(&Stream::DEFAULT)?;
        let mut total = vec![0.0; tensor.count];
        for rank in 0..self.windows.len() {
            let theirs = self.read_of(rank, tensor)?;
            total.iter_mut().zip(theirs).for_each(|(sum, value)| *sum += value);
        }
        self.comm.barrier(&Stream::DEFAULT)?;
        self.write(tensor, &total)
    }

    fn map(&self) -> Result<Map> {
        let placed = self.live.iter().map(|(address, (tensor, bytes))| {
            let (window, offset) = self.locate(*address);
            let offset = (window * WINDOW) as u64 + offset;
            Placed { tensor: *tensor, offset, bytes: *bytes as u64 }
        });
        let mut live: Vec<_> = placed.collect();
        live.sort_by_key(|placed| placed.offset);
        Ok(Map { windows: vec![WINDOW as u64; WINDOWS], live })
    }
}

impl ByAddress<'_> {
    /// What `rank` has where this rank has `tensor`.
    fn read_of(&self, rank: usize, tensor: &Tensor) -> Result<Vec<f32>> {
        let (window, offset) = self.locate(tensor.address);
        let mut bytes = vec![0; tensor.count * size_of::<f32>()];
        let read = self.windows[rank][window].read_exact_at(&mut bytes, offset);
        read.map_err(|error| Error::system("reading a tensor", error))?;
        let floats = bytes.as_chunks::<4>().0.iter().map(|value| f32::from_le_bytes(*value));
        Ok(floats.collect())
    }
}
