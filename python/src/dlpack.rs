//! The structures of DLPack, and capsules of them: how tensors pass from one library to another.
//!
//! Two layouts exist. The older has no version in it; consumers that can read the newer one say so
//! (`max_version`), and are given version 1.0.

#![allow(unsafe_code)] // structures of a C protocol, and capsules that hold pointers to them

use std::ffi::{CStr, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyCapsule;
use symmpool_collectives::DType;

use crate::convert::MemoryDevice;

const UNVERSIONED: &CStr = c"dltensor";
const VERSIONED: &CStr = c"dltensor_versioned";

#[repr(C)]
pub(crate) struct DlDevice {
    pub(crate) kind: i32,
    pub(crate) id: i32,
}

#[repr(C)]
pub(crate) struct DlDataType {
    pub(crate) code: u8,
    pub(crate) bits: u8,
    pub(crate) lanes: u16,
}

#[repr(C)]
pub(crate) struct DlTensor {
    pub(crate) data: *mut c_void,
    pub(crate) device: DlDevice,
    pub(crate) ndim: i32,
    pub(crate) dtype: DlDataType,
    pub(crate) shape: *mut i64,
    pub(crate) strides: *mut i64,
    pub(crate) byte_offset: u64,
}

/// `DLManagedTensor`.
#[repr(C)]
struct Managed {
    tensor: DlTensor,
    manager: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Managed)>,
}

/// `DLManagedTensorVersioned`.
#[repr(C)]
struct ManagedVersioned {
    major: u32,
    minor: u32,
    manager: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut ManagedVersioned)>,
    flags: u64,
    tensor: DlTensor,
}

/// Owner that keeps the memory of a tensor that is handed out.
pub(crate) type Owner = Arc<dyn Send + Sync>;

/// Data that a consumer's tensor points into; kept alive, not read by us.
struct HeldData<T> {
    managed: T,
    _lengths: Vec<i64>,
    _strides: Vec<i64>,
    _owner: Owner,
}

/// A tensor to be handed out.
#[derive(Clone, Copy)]
pub(crate) struct Description<'a> {
    pub(crate) address: usize,
    pub(crate) device: MemoryDevice,
    pub(crate) dtype: DType,
    pub(crate) shape: &'a [i64],
}

/// A device as DLPack numbers them.
pub(crate) fn device(device: MemoryDevice) -> (i32, i32) {
    match device {
        MemoryDevice::Cpu => (1, 0),
        MemoryDevice::Cuda(ordinal) => (2, ordinal as i32),
    }
}

/// The element type that DLPack's words mean, if it is one of ours.
#[inline]
pub(crate) fn element(found: &DlDataType) -> Option<DType> {
    Some(match (found.code, found.bits, found.lanes) {
        (0, 8, 1) => DType::I8,
        (0, 16, 1) => DType::I16,
        (0, 32, 1) => DType::I32,
        (0, 64, 1) => DType::I64,
        (1, 8, 1) => DType::U8,
        (1, 16, 1) => DType::U16,
        (1, 32, 1) => DType::U32,
        (1, 64, 1) => DType::U64,
        (2, 16, 1) => DType::F16,
        (2, 32, 1) => DType::F32,
        (2, 64, 1) => DType::F64,
        (4, 16, 1) => DType::Bf16,
        (5, 32, 1) => DType::Complex32,
        (5, 64, 1) => DType::Complex64,
        (5, 128, 1) => DType::Complex128,
        (6, 8, 1) => DType::Bool,
        (10, 8, 1) => DType::F8E4m3,
        (11, 8, 1) => DType::F8E4m3Fnuz,
        (12, 8, 1) => DType::F8E5m2,
        (13, 8, 1) => DType::F8E5m2Fnuz,
        (14, 8, 1) => DType::F8E8m0,
        // Two to a byte.
        (17, 4, 2) => DType::F4E2m1x2,
        _ => return None,
    })
}

impl DlTensor {
    /// The number of elements, if they lie one after the other, the last dimension running
    /// fastest.
    ///
    /// # Safety
    ///
    /// `shape` and `strides` point to `ndim` numbers; `strides` may be null.
    #[inline]
    pub(crate) unsafe fn contiguous_count(&self) -> Option<usize> {
        let dimensions = usize::try_from(self.ndim).ok()?;
        let (mut count, mut dense) = (1_i64, true);
        for at in (0..dimensions).rev() {
            // SAFETY: the caller promised that `shape` points to `ndim` numbers, and `at` is below `ndim`.
            let length = unsafe { self.shape.add(at) };
            // SAFETY: one of the `ndim` lengths, which the caller promised are there.
            let length = unsafe { length.read() };
            if !self.strides.is_null() && length != 1 {
                // SAFETY: the caller promised that `strides`, which is not null, points to `ndim` numbers, and `at`
                // is below `ndim`.
                let stride = unsafe { self.strides.add(at) };
                // SAFETY: one of the `ndim` strides, which the caller promised are there.
                dense &= unsafe { stride.read() } == count;
            }
            count = count.checked_mul(length)?;
        }
        // Where there is nothing, strides say nothing.
        (dense || count == 0).then_some(usize::try_from(count).ok()?)
    }
}

fn data_type(dtype: DType) -> DlDataType {
    let code = match dtype {
        DType::I8 | DType::I16 | DType::I32 | DType::I64 => 0,
        DType::U8 | DType::U16 | DType::U32 | DType::U64 => 1,
        DType::F16 | DType::F32 | DType::F64 => 2,
        // The code has no meaning to others.
        DType::Bytes1 | DType::Bytes2 | DType::Bytes4 | DType::Bytes8 | DType::Bytes16 => 3,
        DType::Bf16 => 4,
        DType::Complex32 | DType::Complex64 | DType::Complex128 => 5,
        DType::Bool => 6,
        DType::F8E4m3 => 10,
        DType::F8E4m3Fnuz => 11,
        DType::F8E5m2 => 12,
        DType::F8E5m2Fnuz => 13,
        DType::F8E8m0 => 14,
        DType::F4E2m1x2 => return DlDataType { code: 17, bits: 4, lanes: 2 },
    };
    DlDataType { code, bits: dtype.size() as u8 * 8, lanes: 1 }
}

/// In elements, the last dimension running fastest.
fn contiguous(shape: &[i64]) -> Vec<i64> {
    let mut strides = vec![1_i64; shape.len()];
    for at in (1..shape.len()).rev() {
        // Where one length is zero, the product of the others may be anything.
        strides[at - 1] = strides[at].saturating_mul(shape[at].max(1));
    }
    strides
}

impl Description<'_> {
    fn tensor(&self, lengths: &mut [i64], strides: &mut [i64]) -> DlTensor {
        let (kind, id) = device(self.device);
        DlTensor {
            data: self.address as *mut c_void,
            device: DlDevice { kind, id },
            ndim: lengths.len() as i32,
            dtype: data_type(self.dtype),
            shape: lengths.as_mut_ptr(),
            strides: strides.as_mut_ptr(),
            byte_offset: 0,
        }
    }
}

/// A capsule that holds the tensor until a consumer takes it. Whoever has it last lets go of
/// `owner`.
pub(crate) fn capsule<'py>(
    py: Python<'py>,
    description: Description<'_>,
    versioned: bool,
    owner: Owner,
) -> PyResult<Bound<'py, PyAny>> {
    let mut lengths = description.shape.to_vec();
    let mut strides = contiguous(&lengths);
    // A vector's elements stay where they are when the vector itself moves.
    let tensor = description.tensor(&mut lengths, &mut strides);
    if versioned {
        let managed = ManagedVersioned {
            major: 1,
            minor: 0,
            manager: ptr::null_mut(),
            deleter: Some(delete_versioned),
            flags: 0,
            tensor,
        };
        let held = Box::into_raw(Box::new(HeldData {
            managed,
            _lengths: lengths,
            _strides: strides,
            _owner: owner,
        }));
        // SAFETY: freshly made above, and reached by nobody else yet.
        unsafe { (*held).managed.manager = held.cast() };
        // SAFETY: `held` comes from a box that nobody else has reached yet, so the field's place is valid.
        let pointer = unsafe { &raw mut (*held).managed };
        // SAFETY: `held` stays until `drop_versioned` or the consumer gives it back, and is of the kind with a version.
        unsafe { wrap(py, pointer.cast(), VERSIONED, drop_versioned) }
    } else {
        let managed = Managed { tensor, manager: ptr::null_mut(), deleter: Some(delete) };
        let held = Box::into_raw(Box::new(HeldData {
            managed,
            _lengths: lengths,
            _strides: strides,
            _owner: owner,
        }));
        // SAFETY: freshly made above, and reached by nobody else yet.
        unsafe { (*held).managed.manager = held.cast() };
        // SAFETY: `held` comes from a box that nobody else has reached yet, so the field's place is valid.
        let pointer = unsafe { &raw mut (*held).managed };
        // SAFETY: `held` stays until `drop_unversioned` or the consumer gives it back, and is of the kind without a version.
        unsafe { wrap(py, pointer.cast(), UNVERSIONED, drop_unversioned) }
    }
}

/// A capsule of a managed tensor.
///
/// # Safety
///
/// You must pass a live managed tensor of the kind that the name says, which the destructor gives back.
unsafe fn wrap<'py>(
    py: Python<'py>,
    pointer: *mut c_void,
    name: &'static CStr,
    destructor: unsafe extern "C" fn(*mut ffi::PyObject),
) -> PyResult<Bound<'py, PyAny>> {
    let pointer = NonNull::new(pointer).expect("a field of a box");
    // SAFETY: the caller promised a live managed tensor of the kind that the name says, and the destructor of both.
    let capsule =
        unsafe { PyCapsule::new_with_pointer_and_destructor(py, pointer, name, Some(destructor)) };
    Ok(capsule?.into_any())
}

/// Gives back what a managed tensor holds. A panic would unwind into C; what caused it is lost.
///
/// # Safety
///
/// `manager` is of `Held<T>`, from `Box::into_raw`, and nobody uses it any more.
unsafe fn give_back<T>(manager: *mut c_void) {
    // SAFETY: the caller promised that `manager` is a `Held<T>` from `Box::into_raw` which nobody uses any more.
    let held: Box<HeldData<T>> = unsafe { Box::from_raw(manager.cast()) };
    let _ = catch_unwind(AssertUnwindSafe(|| drop(held)));
}

unsafe extern "C" fn delete(managed: *mut Managed) {
    if managed.is_null() {
        return;
    }
    // SAFETY: a consumer passes the structure that it took, once.
    let manager = unsafe { (*managed).manager };
    // SAFETY: `capsule` has put a `Held<Managed>` from `Box::into_raw` there, and a consumer calls this once.
    unsafe { give_back::<Managed>(manager) };
}

unsafe extern "C" fn delete_versioned(managed: *mut ManagedVersioned) {
    if managed.is_null() {
        return;
    }
    // SAFETY: a consumer passes the structure that it took, once.
    let manager = unsafe { (*managed).manager };
    // SAFETY: `capsule` has put a `Held<ManagedVersioned>` from `Box::into_raw` there, and a consumer calls this
    // once.
    unsafe { give_back::<ManagedVersioned>(manager) };
}

/// The pointer in a capsule that no consumer has taken: taking one changes its name.
///
/// # Safety
///
/// `capsule` is a capsule, and the interpreter's lock is held.
unsafe fn untaken(capsule: *mut ffi::PyObject, name: &CStr) -> *mut c_void {
    // SAFETY: the caller promised that `capsule` is a capsule and that the interpreter's lock is held.
    let valid = unsafe { ffi::PyCapsule_IsValid(capsule, name.as_ptr()) };
    if valid == 0 {
        return ptr::null_mut();
    }
    // SAFETY: the caller promised that `capsule` is a capsule and that the lock is held; the name was just compared.
    unsafe { ffi::PyCapsule_GetPointer(capsule, name.as_ptr()) }
}

unsafe extern "C" fn drop_unversioned(capsule: *mut ffi::PyObject) {
    // SAFETY: Python calls a destructor with its own capsule, holding the lock.
    let managed = unsafe { untaken(capsule, UNVERSIONED) };
    // SAFETY: null, or what `capsule` made and nobody took.
    unsafe { delete(managed.cast()) };
}

unsafe extern "C" fn drop_versioned(capsule: *mut ffi::PyObject) {
    // SAFETY: Python calls a destructor with its own capsule, holding the lock.
    let managed = unsafe { untaken(capsule, VERSIONED) };
    // SAFETY: null, or what `capsule` made and nobody took.
    unsafe { delete_versioned(managed.cast()) };
}
