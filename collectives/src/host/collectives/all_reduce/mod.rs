//! All-reduce: every rank ends with the reduction of all ranks' inputs.
//!
//! - `one_shot`: every rank copies its input to scratch, and every rank reduces all of it. One
//!   phase; best while the data is small.
//! - `two_shot`: every rank reduces one share and hands it to the others. Directly between windows,
//!   or through scratch for ordinary memory.
//! - `cube_mesh`: for ranks that are not all linked; every rank reads and writes data of those
//!   only that it has a link to. `halves` finds how such links group the ranks.

#![allow(unsafe_code)] // hands raw buffers to the kernels

mod cube_mesh;
mod one_shot;
mod paired_groups;
mod two_shot;

use std::ops::Range;

use symmpool_allocator::{Error, Result};

pub(crate) use paired_groups::Halves;

use crate::former_names::renamed;
use crate::host::call::{Call, Operation};
use crate::host::kernels::ReduceFn;
use crate::host::{Data, HostEngine, InPlace, Place};
use crate::{DType, ReduceOp};

/// Which algorithm an all-reduce uses. Results have the same bits with each (rule S7).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum AllReduceAlgorithm {
    /// By links, size, number of ranks and kind of memory.
    #[default]
    Auto = 0,
    /// Every rank reduces everything, through scratch.
    OneShot = 1,
    /// Every rank reduces a share and hands it out.
    TwoShot = 2,
    /// On devices: one shot, in the LL protocol, whose vectors of 16 bytes are half flags. Any type; fastest
    /// for a few KiB.
    OneShotLl = 3,
    /// On devices: one shot, in the Lamport protocol, whose receivers poll the data itself; floats but `f64`.
    OneShotLamport = 4,
    /// On devices: one shot, by loads from every rank's scratch.
    OneShotPull = 5,
    /// On devices: two shots, in the LL protocol.
    TwoShotLl = 6,
    /// On devices: two shots, in the Lamport protocol; floats but `f64`.
    TwoShotLamport = 7,
    /// On devices: two shots, shares by loads from inputs, results by stores; between windows.
    TwoShotPull = 8,
    /// On devices: two shots by stores, results straight into outputs that are windows.
    TwoShotPush = 9,
    /// In host memory: data over direct links only, between two groups of ranks that are all linked
    /// inside and paired with each other. What `Auto` uses on a hybrid cube mesh.
    CubeMesh = 10,
    /// On devices that are all linked by NVLink, or are one: one shot, in the LL128 protocol, whose lines of
    /// 128 bytes have 8 bytes of flags. Any type; fastest from some tens to some hundreds of KiB, for types
    /// that the Lamport protocol does not carry.
    OneShotLl128 = 11,
    /// On devices: two shots carried by copy engines, with kernels that reduce between them; outputs
    /// that are windows, from 1 MiB. Fastest from some hundred MiB.
    /// What copy engines were told to do cannot be called back: if the call fails, the memory that it
    /// names as output is undefined on every rank, on those that never called too.
    TwoShotCopy = 12,
}

impl AllReduceAlgorithm {
    /// All of them, `Auto` first.
    pub const ALL: [Self; 13] = [
        Self::Auto,
        Self::OneShot,
        Self::TwoShot,
        Self::OneShotLl,
        Self::OneShotLamport,
        Self::OneShotPull,
        Self::TwoShotLl,
        Self::TwoShotLamport,
        Self::TwoShotPull,
        Self::TwoShotPush,
        Self::CubeMesh,
        Self::OneShotLl128,
        Self::TwoShotCopy,
    ];

    /// Accepted until the next version.
    const FORMER_NAMES: &[(&str, Self)] = &[
        ("one_shot_packet", Self::OneShotLl),
        ("one_shot_line", Self::OneShotLl128),
        ("one_shot_sentinel", Self::OneShotLamport),
        ("two_shot_packet", Self::TwoShotLl),
        ("two_shot_sentinel", Self::TwoShotLamport),
    ];

    /// The name used in options and reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::OneShot => "one_shot",
            Self::TwoShot => "two_shot",
            Self::OneShotLl => "one_shot_ll",
            Self::OneShotLamport => "one_shot_lamport",
            Self::OneShotPull => "one_shot_pull",
            Self::TwoShotLl => "two_shot_ll",
            Self::TwoShotLamport => "two_shot_lamport",
            Self::TwoShotPull => "two_shot_pull",
            Self::TwoShotPush => "two_shot_push",
            Self::CubeMesh => "cube_mesh",
            Self::OneShotLl128 => "one_shot_ll128",
            Self::TwoShotCopy => "two_shot_copy",
        }
    }

    /// The algorithm of this [`name`](Self::name). Former names, such as `one_shot_packet`, are accepted,
    /// with a warning.
    pub fn named(name: &str) -> Option<Self> {
        let found = Self::ALL.into_iter().find(|algorithm| algorithm.name() == name);
        found.or_else(|| renamed(name, Self::FORMER_NAMES, Self::name))
    }
}

/// Up to here windows take one phase through scratch instead of two without; bytes, for the square
/// of the number of ranks: more ranks make a phase dearer, above all when they share cores, and
/// each then reduces a smaller share. Only as far as scratch holds it in one piece: every further
/// one would be a phase more.
const ONE_SHOT_WINDOW_BYTES: usize = 512;
/// Up to here ordinary memory takes one phase instead of two; bytes times ranks.
const ONE_SHOT_PLAIN_BYTES: usize = 128 << 10;

impl HostEngine {
    /// Reduces `count` elements of every rank's `input` into every rank's `output`. In place if
    /// both begin at one address; otherwise they must not overlap.
    ///
    /// # Errors
    ///
    /// `is_diverged`, on every rank, if ranks called differently; `is_invalid_argument` if buffers
    /// overlap or do not fit, or `dtype` is none of [`DType::REDUCED`]; `is_unsupported` if the
    /// algorithm does not run in host memory, or not over the links there are; `is_timeout` or
    /// `is_peer_lost` if a rank does not come.
    ///
    /// # Safety
    ///
    /// `input` is readable and `output` writable for `count` elements of `dtype`, and nobody else
    /// touches either, in any rank's slot if it is a window, until the call returns on every rank.
    pub unsafe fn all_reduce(
        &mut self,
        input: Place,
        output: Place,
        count: usize,
        dtype: DType,
        op: ReduceOp,
        algorithm: AllReduceAlgorithm,
    ) -> Result<()> {
        self.ready()?;
        let reduce = self.reduction("all_reduce", dtype, op)?;
        let size = count.checked_mul(dtype.size());
        let data = self.resolve((input, size), (output, size), InPlace::OutputAt(0));
        let data = self.or_decline(data)?;
        let call = Call::new(Operation::AllReduce)
            .elements(dtype, count)
            .reduce(op)
            .algorithm(algorithm as u8)
            .input(input)
            .output(output)
            .in_place(data.in_place);
        let work = Work { call, data, count, size: dtype.size(), reduce };
        let windows = match (input, output) {
            (Place::Window(from), Place::Window(to)) => Some((from, to)),
            _ => None,
        };
        let way = self.choose(algorithm, work.bytes(), windows.is_some());
        let way = self.or_decline(way)?;
        if count == 0 {
            return self.enter(&work.call);
        }
        tracing::debug!(
            bytes = work.bytes(),
            dtype = dtype.name(),
            windows = windows.is_some(),
            algorithm = way.name(),
            why = if algorithm == AllReduceAlgorithm::Auto { "rule" } else { "asked for" },
            "all_reduce"
        );
        match (way, windows) {
            // SAFETY: the caller's promises about input and output, which `data` resolves; that
            // windows are mapped in every slot was promised to `new`. As in all that follow.
            (Way::OneShot, _) => unsafe { one_shot::run(self, &work) },
            // SAFETY: as above.
            (Way::TwoShot, Some((from, to))) => unsafe { two_shot::direct(self, &work, from, to) },
            // SAFETY: as above.
            (Way::TwoShot, None) => unsafe { two_shot::staged(self, &work) },
            // SAFETY: as above.
            (Way::CubeMesh(halves), Some(places)) => unsafe {
                cube_mesh::direct(self, &work, halves, places)
            },
            // SAFETY: as above.
            (Way::CubeMesh(halves), None) => unsafe { cube_mesh::staged(self, &work, halves) },
        }
    }

    /// The way that was asked for, or the best: from what is the same on every rank.
    fn choose(&self, asked: AllReduceAlgorithm, bytes: usize, windows: bool) -> Result<Way> {
        let one_shot = match asked {
            AllReduceAlgorithm::OneShot => true,
            AllReduceAlgorithm::TwoShot => false,
            AllReduceAlgorithm::CubeMesh => return self.cube_mesh(),
            AllReduceAlgorithm::Auto if self.cube_mesh => return self.cube_mesh(),
            AllReduceAlgorithm::Auto if windows => {
                one_shot_of_windows(bytes, self.world(), self.scratch_bytes())
            }
            // With two ranks both ways move the same bytes, and this one waits less.
            AllReduceAlgorithm::Auto => {
                self.world() <= 2
                    || bytes.saturating_mul(self.world() as usize) <= ONE_SHOT_PLAIN_BYTES
            }
            other => {
                return Err(Error::unsupported(format!(
                    "the all-reduce algorithm {} on rank {}: it is one of devices; in host memory \
                     there are one_shot, two_shot and cube_mesh",
                    other.name(),
                    self.rank()
                )));
            }
        };
        Ok(if one_shot { Way::OneShot } else { Way::TwoShot })
    }

    fn cube_mesh(&self) -> Result<Way> {
        self.halves.clone().map(Way::CubeMesh).map_err(|why| {
            Error::unsupported(format!(
                "the all-reduce algorithm cube_mesh on rank {}: {why}",
                self.rank()
            ))
        })
    }
}

/// What an all-reduce in host memory does.
#[derive(Clone, Copy, Debug)]
enum Way {
    OneShot,
    TwoShot,
    CubeMesh(Halves),
}

impl Way {
    fn name(self) -> &'static str {
        match self {
            Self::OneShot => "one_shot",
            Self::TwoShot => "two_shot",
            Self::CubeMesh(_) => "cube_mesh",
        }
    }
}

/// Whether windows of `bytes` bytes go through scratch.
fn one_shot_of_windows(bytes: usize, world: u32, scratch: usize) -> bool {
    bytes <= (ONE_SHOT_WINDOW_BYTES * (world as usize).pow(2)).min(scratch)
}

/// One all-reduce, checked and resolved.
struct Work {
    call: Call,
    data: Data,
    count: usize,
    /// Bytes of an element.
    size: usize,
    reduce: ReduceFn,
}

impl Work {
    fn bytes(&self) -> usize {
        self.count * self.size
    }
}

/// Pieces of `count` elements that go through scratch in turn: all at once if `room` bytes hold
/// them, else halves of the room alternate.
#[derive(Clone, Copy)]
pub(crate) struct Pieces {
    count: usize,
    each: usize,
    half: usize,
}

impl Pieces {
    /// `room` is a multiple of 16.
    pub(crate) fn new(count: usize, size: usize, room: usize) -> Self {
        let half = room / 2;
        Self { count, each: if count * size <= room { count } else { half / size }, half }
    }

    /// How many; none for no elements.
    pub(crate) fn len(&self) -> usize {
        if self.count == 0 { 0 } else { self.count.div_ceil(self.each) }
    }

    /// The elements of piece `index`; empty past the end.
    pub(crate) fn range(&self, index: usize) -> Range<usize> {
        let start = index.saturating_mul(self.each).min(self.count);
        start..start.saturating_add(self.each).min(self.count)
    }

    /// Where in scratch it goes, in bytes.
    pub(crate) fn offset(&self, index: usize) -> usize {
        (index & 1) * self.half
    }
}

/// The share of `count` elements that `rank` of `world` reduces; whole cache lines, so that no
/// two ranks write to one.
pub(crate) fn share(count: usize, size: usize, rank: u32, world: u32) -> Range<usize> {
    let each = count.div_ceil(world as usize).next_multiple_of((64 / size).max(1));
    let start = (rank as usize).saturating_mul(each).min(count);
    start..start.saturating_add(each).min(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_go_through_scratch_in_one_piece_or_not_at_all() {
        // The smallest scratch there can be, that of the tests, and the default.
        for scratch in [256, 4096, 2 << 20] {
            for world in [1, 2, 8, 63, 64, 65, 1024] {
                let square = ONE_SHOT_WINDOW_BYTES * (world as usize).pow(2);
                for bytes in [0, 1, scratch - 1, scratch, scratch + 1, square, square + 1] {
                    let one_shot = one_shot_of_windows(bytes, world, scratch);
                    let pieces = Pieces::new(bytes, 1, scratch).len();
                    assert!(!one_shot || pieces <= 1, "{bytes} bytes of {world} ranks");
                    assert_eq!(one_shot, bytes <= scratch && bytes <= square);
                }
            }
        }
    }

    #[test]
    fn pieces_and_shares_cover_everything_once() {
        for count in [0, 1, 63, 64, 65, 1000, 4096, 4097] {
            for size in [1, 2, 4, 8] {
                let pieces = Pieces::new(count, size, 1024);
                let mut next = 0;
                for i in 0..pieces.len() {
                    let range = pieces.range(i);
                    assert_eq!(range.start, next);
                    assert!(!range.is_empty());
                    assert!(pieces.offset(i) + range.len() * size <= 1024);
                    next = range.end;
                }
                assert_eq!(next, count);
                assert!(pieces.range(pieces.len()).is_empty());
                for world in 1..6 {
                    let mut next = 0;
                    for rank in 0..world {
                        let range = share(count, size, rank, world);
                        assert_eq!(range.start, next);
                        let at_line = (range.start * size).is_multiple_of(64);
                        assert!(at_line || range.is_empty(), "{range:?} of {size} bytes each");
                        next = range.end;
                    }
                    assert_eq!(next, count);
                }
            }
        }
    }
}
