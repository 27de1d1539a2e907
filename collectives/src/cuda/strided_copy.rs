//! Several stretches at equal distances, which one copy by a copy engine moves.
//!
//! Copies one after the other leave 4.3 us between them in which an H200's links are idle; within one
//! there is nothing between (three of 16 MiB: 141 and 133 us).

use cudarc::driver::sys;

/// Rows are no wider than need be, and engines are slow with those that are narrower: 133 us are 141
/// with 128 bytes, and 1,068 with 16.
const WIDEST: u64 = 1 << 20;
const NARROWEST: u64 = 512;

/// What is copied: `count` times `bytes`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Slices {
    pub(super) from: u64,
    pub(super) from_distance: u64,
    pub(super) to: u64,
    pub(super) to_distance: u64,
    pub(super) bytes: u64,
    pub(super) count: u64,
}

impl Slices {
    /// As the driver takes it: boxes of rows that lie one behind the other. `None` if their lengths have
    /// too little in common, or stretches overlap.
    pub(super) fn shape(&self) -> Option<sys::CUDA_MEMCPY3D> {
        let Self { from, from_distance, to, to_distance, bytes, count } = *self;
        let width = 1 << (from_distance | to_distance | bytes | WIDEST).trailing_zeros();
        if width < NARROWEST || bytes > from_distance.min(to_distance) || bytes * count == 0 {
            return None;
        }
        let device = sys::CUmemorytype_enum::CU_MEMORYTYPE_DEVICE;
        let rows = |bytes: u64| (bytes / width) as usize;
        Some(sys::CUDA_MEMCPY3D {
            srcXInBytes: 0,
            srcY: 0,
            srcZ: 0,
            srcLOD: 0,
            srcMemoryType: device,
            srcHost: std::ptr::null(),
            srcDevice: from,
            srcArray: std::ptr::null_mut(),
            reserved0: std::ptr::null_mut(),
            srcPitch: width as usize,
            srcHeight: rows(from_distance),
            dstXInBytes: 0,
            dstY: 0,
            dstZ: 0,
            dstLOD: 0,
            dstMemoryType: device,
            dstHost: std::ptr::null_mut(),
            dstDevice: to,
            dstArray: std::ptr::null_mut(),
            reserved1: std::ptr::null_mut(),
            dstPitch: width as usize,
            dstHeight: rows(to_distance),
            WidthInBytes: width as usize,
            Height: rows(bytes),
            Depth: count as usize,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slices(from_distance: u64, to_distance: u64, bytes: u64) -> Slices {
        Slices { from: 3, from_distance, to: 5, to_distance, bytes, count: 2 }
    }

    #[test]
    fn boxes_are_what_was_asked_for() {
        let many = [
            slices(1 << 24, 1 << 30, 1 << 24),
            slices(1 << 24, 96 << 20, (1 << 24) - (3 << 18)),
            slices(5 << 11, 2 << 20, 3 << 10),
            slices(48 << 30, 64 << 30, 48 << 30),
        ];
        for slices in many {
            let shape = slices.shape().expect("they have enough in common");
            let size = |rows: usize| shape.WidthInBytes as u64 * rows as u64;
            assert_eq!((shape.srcPitch, shape.dstPitch), (shape.WidthInBytes, shape.WidthInBytes));
            assert_eq!(size(shape.srcHeight), slices.from_distance);
            assert_eq!(size(shape.dstHeight), slices.to_distance);
            assert_eq!((size(shape.Height), shape.Depth), (slices.bytes, 2));
            assert_eq!((shape.srcDevice, shape.dstDevice), (3, 5));
        }
    }

    #[test]
    fn what_engines_are_slow_with_is_refused() {
        assert!(slices((1 << 24) + 256, 1 << 30, 1 << 24).shape().is_none());
        assert!(slices(1 << 24, 1 << 30, (1 << 24) - 16).shape().is_none());
        assert!(slices(1 << 24, 1 << 23, 1 << 24).shape().is_none(), "they overlap");
        assert!(slices(1 << 24, 1 << 30, 0).shape().is_none());
    }
}
