//! DLPack's table of C functions (its "C exchange API"): where a tensor lies, in one call.
//!
//! A type of tensors that has the table names it `__dlpack_c_exchange_api__`: torch's do from 2.10
//! on. Reading a tensor through it costs a tenth of reading its attributes; where it is missing, or
//! declines a tensor, attributes are read.

#![allow(unsafe_code)] // calls C functions of a table that another library gives

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr;

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyCapsule;

use crate::dlpack::DlTensor;

/// The name of capsules that hold a table.
const NAME: &std::ffi::CStr = c"dlpack_exchange_api";

/// Head of the table, which stays the same in every version.
#[repr(C)]
struct Header {
    major: u32,
    minor: u32,
    previous: *const Header,
}

type FromObject = unsafe extern "C" fn(*mut c_void, *mut DlTensor) -> c_int;
type CurrentStream = unsafe extern "C" fn(c_int, i32, *mut *mut c_void) -> c_int;

/// `DLPackExchangeAPI` of major version 1.
#[repr(C)]
struct ExchangeTable {
    header: Header,
    allocator: *const c_void,
    managed_from_object: *const c_void,
    managed_to_object: *const c_void,
    tensor_from_object: Option<FromObject>,
    current_stream: Option<CurrentStream>,
}

/// The functions of a table that are used here.
#[derive(Clone, Copy)]
pub(crate) struct TensorExchange {
    from_object: FromObject,
    current_stream: Option<CurrentStream>,
}

impl TensorExchange {
    /// The functions that a type of tensors has, if it has them.
    pub(crate) fn of_type(kind: &Bound<'_, PyAny>) -> Option<Self> {
        let capsule = kind.getattr_opt("__dlpack_c_exchange_api__").ok()??;
        let capsule = capsule.cast::<PyCapsule>().ok()?;
        let mut header: *const Header =
            capsule.pointer_checked(Some(NAME)).ok()?.as_ptr().cast_const().cast();
        loop {
            // SAFETY: the protocol: not null (checked), and the header of a table that lives as
            // long as the process.
            let found = unsafe { header.as_ref() }?;
            if found.major == 1 {
                break;
            }
            header = found.previous;
        }
        // SAFETY: the header of a table of version 1 is followed by the rest of it.
        let table = unsafe { &*header.cast::<ExchangeTable>() };
        Some(Self { from_object: table.tensor_from_object?, current_stream: table.current_stream })
    }

    /// Reads a tensor's description in the protocol's words; `None` where the library declines it. The pointers in it
    /// are good as long as the tensor is there and is not changed.
    #[inline]
    pub(crate) fn read(&self, tensor: &Bound<'_, PyAny>) -> Option<DlTensor> {
        let mut found = MaybeUninit::<DlTensor>::uninit();
        // SAFETY: the object is of the type that the functions are of, and the interpreter's lock
        // is held.
        let status = unsafe { (self.from_object)(tensor.as_ptr().cast(), found.as_mut_ptr()) };
        if status != 0 {
            forget(tensor.py());
            return None;
        }
        // SAFETY: success filled it in.
        Some(unsafe { found.assume_init() })
    }

    /// The raw handle of a CUDA device's current stream.
    #[inline]
    pub(crate) fn current_stream(&self, py: Python<'_>, ordinal: u32) -> Option<u64> {
        let current = self.current_stream?;
        let mut stream = ptr::null_mut();
        // SAFETY: the interpreter's lock is held; 2 is the protocol's number of CUDA.
        let status = unsafe { current(2, ordinal as i32, &raw mut stream) };
        if status != 0 {
            forget(py);
            return None;
        }
        Some(stream as u64)
    }
}

/// Drops the exception that a function of the table left: the tensor's attributes are asked what is wrong.
#[cold]
fn forget(_py: Python<'_>) {
    // SAFETY: the interpreter's lock is held.
    unsafe { ffi::PyErr_Clear() };
}
