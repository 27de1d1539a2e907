//! Exceptions of torch's, thrown from here: torch's callers have to get C++ exceptions.
//!
//! torch exports a function that throws its ordinary error. It has none that throws `c10::OutOfMemoryError`, which
//! becomes `torch.OutOfMemoryError` in Python. So that exception is made here, by the functions that a compiler would
//! call for `throw`: torch's constructor of the class from which it derives, and those of C++'s runtime library. It has
//! no fields of its own, so the object differs by its table of virtual functions alone.

use std::cell::RefCell;
use std::ffi::{CString, c_char, c_void};
use std::sync::OnceLock;

use symmpool_allocator::Error;

use crate::guard::{Status, last, status};

/// The type of torch's function that throws, which takes function, file, line and message.
type Throw = extern "C-unwind" fn(*const c_char, *const c_char, u32, *const c_char) -> !;

static THROW: OnceLock<Throw> = OnceLock::new();

/// Bytes of memory for an exception: `c10::Error` has 130 or so in all versions of torch until now.
const EXCEPTION_BYTES: usize = 1024;
/// Words of memory for a `std::string`, which has four.
const STRING_WORDS: usize = 8;

/// `c10::SourceLocation`.
#[repr(C)]
struct SourceLocation {
    function: *const c_char,
    file: *const c_char,
    line: u32,
}

/// Functions and tables by which `c10::OutOfMemoryError` is made and thrown.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct OutOfMemoryParts {
    /// `__cxa_allocate_exception`.
    allocate: extern "C" fn(usize) -> *mut c_void,
    /// `__cxa_throw`, of an object, its type, and its destructor.
    throw: extern "C-unwind" fn(*mut c_void, *const c_void, *const c_void) -> !,
    /// The constructor of a `std::string` of a C string and an allocator, which has no fields.
    string: extern "C" fn(*mut c_void, *const c_char, *const c_void),
    /// The constructor `c10::Error(SourceLocation, std::string)`, which takes what the string holds.
    error: extern "C-unwind" fn(*mut c_void, SourceLocation, *mut c_void),
    /// The virtual functions of `c10::OutOfMemoryError`, as its symbol has them: behind two words.
    table: *const *const c_void,
    /// `typeid(c10::OutOfMemoryError)`.
    kind: *const c_void,
}

// SAFETY: these are functions, and tables that nobody writes to, which stay until the process ends.
unsafe impl Send for OutOfMemoryParts {}
// SAFETY: these are functions, and tables that nobody writes to, so threads may read them at once.
unsafe impl Sync for OutOfMemoryParts {}

static OUT_OF_MEMORY: OnceLock<OutOfMemoryParts> = OnceLock::new();

/// Sets the address of torch's `c10::detail::torchCheckFail`, which throws.
///
/// torch would use a NULL that the process's allocator returned as memory, so errors must be C++ exceptions, which
/// unwind through this library.
///
/// # Safety
///
/// `address` is NULL (an error) or that function's, of the torch that calls the allocator.
#[unsafe(no_mangle)]
unsafe extern "C" fn symmpool_process_throw_by(address: *mut c_void) -> Status {
    status(|| {
        if address.is_null() {
            return Err(Error::invalid_argument("the address of the function that throws is NULL"));
        }
        // SAFETY: not NULL; the caller promised that it is this function.
        let throw = unsafe { std::mem::transmute::<*mut c_void, Throw>(address) };
        THROW.get_or_init(|| throw);
        Ok(())
    })
}

/// Sets what `c10::OutOfMemoryError` is made by: six addresses, in the order of `OutOfMemoryParts`' fields. Without them
/// running out of memory is torch's ordinary error.
///
/// # Safety
///
/// `addresses` is NULL (an error), or points to six words that are 0 (an error) or these addresses, of the torch that
/// calls the allocator and of the C++ library that it uses.
#[unsafe(no_mangle)]
unsafe extern "C" fn symmpool_process_throw_out_of_memory_by(addresses: *const usize) -> Status {
    status(|| {
        // SAFETY: six words, unless it is NULL: the caller promised that.
        let words =
            (!addresses.is_null()).then(|| unsafe { addresses.cast::<[usize; 6]>().read() });
        let words: [usize; 6] = words.filter(|words| !words.contains(&0)).ok_or_else(|| {
            Error::invalid_argument("an address that torch.OutOfMemoryError is made by is NULL")
        })?;
        // SAFETY: the struct has six words, none of these is 0, and the caller promised which functions they are.
        let parts = unsafe { std::mem::transmute::<[usize; 6], OutOfMemoryParts>(words) };
        OUT_OF_MEMORY.get_or_init(|| parts);
        Ok(())
    })
}

/// Throws this thread's last error as torch does. Returns where no function was set by which to throw.
///
/// Nothing in the frames of this library is dropped by the exception: what needs to be is in memory that stays.
pub(super) extern "C-unwind" fn throw_last() {
    thread_local! {
        static MESSAGE: RefCell<CString> = RefCell::new(CString::default());
    }
    let (is_out_of_memory, text) = last(|status, text| {
        let is_out_of_memory = status == Status::OutOfMemory;
        // torch's own message begins like this.
        let prefix = if is_out_of_memory { "CUDA out of memory. " } else { "" };
        (is_out_of_memory, format!("{prefix}{}", text.to_string_lossy()))
    })
    .unwrap_or_default();
    let text = CString::new(text).unwrap_or_default();
    let message = MESSAGE.with(|message| {
        *message.borrow_mut() = text;
        message.borrow().as_ptr()
    });
    if is_out_of_memory && let Some(parts) = OUT_OF_MEMORY.get() {
        // SAFETY: the message is the string of this thread's `MESSAGE`, which nobody changes before it is copied.
        unsafe { throw_out_of_memory(parts, message) };
    }
    if let Some(throw) = THROW.get() {
        // torch copies the message.
        throw(c"symmpool".as_ptr(), c"libsymmpool".as_ptr(), 0, message);
    }
}

/// Throws `c10::OutOfMemoryError` with a message, which is copied.
///
/// # Safety
///
/// You must pass a C string.
unsafe fn throw_out_of_memory(parts: &OutOfMemoryParts, message: *const c_char) {
    let location =
        SourceLocation { function: c"symmpool".as_ptr(), file: c"libsymmpool".as_ptr(), line: 0 };
    let mut string = [0u64; STRING_WORDS];
    let allocator = 0u8;
    let string = string.as_mut_ptr().cast();
    (parts.string)(string, message, (&raw const allocator).cast());
    let exception = (parts.allocate)(EXCEPTION_BYTES);
    // The constructor moves what the string holds, which then has nothing to free.
    (parts.error)(exception, location, string);
    // SAFETY: a symbol of virtual functions has them behind two words.
    let functions = unsafe { parts.table.add(2) };
    // SAFETY: an object begins with the address of its first virtual function, and this class has no fields of its own.
    unsafe { exception.cast::<*const *const c_void>().write(functions) };
    // SAFETY: the first virtual function is the destructor, as it is that of `std::exception`.
    let destructor = unsafe { functions.read() };
    (parts.throw)(exception, parts.kind, destructor);
}

/// Throws an error of too little memory, for tests without a device; returns where nothing was set to throw by.
#[cfg(feature = "testing")]
#[unsafe(no_mangle)]
extern "C-unwind" fn symmpool_process_runs_out_of_memory() {
    let out: symmpool_allocator::Result<()> =
        Err(Error::out_of_memory("a test asked for too much"));
    status(|| out);
    throw_last();
}
