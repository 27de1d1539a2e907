//! The floating-point environment of the loops: the default one, whatever the caller set.
//!
//! A rank may run with subnormals flushed to zero, or with another rounding mode; programs set
//! both, a thread at a time. Ranks that reduce the same elements would then get different bits
//! (rule S7). So the loops run with the default environment, which is also what the compiler
//! assumes of all code, and the caller's comes back after them.

/// The default environment while this lives; then the one before.
///
/// Costs a read of the control register where it holds the default, as it does on most threads.
pub(super) struct Defaults {
    before: Option<Control>,
}

impl Defaults {
    #[inline]
    pub(super) fn enter() -> Self {
        let before = control();
        let differs = is_special(before);
        if differs {
            set_control(DEFAULT);
        }
        Self { before: differs.then_some(before) }
    }
}

impl Drop for Defaults {
    #[inline]
    fn drop(&mut self) {
        if let Some(before) = self.before {
            set_control(before);
        }
    }
}

/// Whether the register asks for anything but the defaults. Flags of what has happened do not
/// count.
#[inline]
fn is_special(control: Control) -> bool {
    control & !FLAGS != DEFAULT
}

#[cfg(target_arch = "x86_64")]
pub(super) use x86_64::{Control, DEFAULT, FLAGS, control, set_control};

#[cfg(target_arch = "x86_64")]
mod x86_64 {
    use std::arch::asm;

    /// MXCSR.
    pub(in super::super) type Control = u32;
    /// All exceptions masked, rounding to nearest, subnormals kept.
    pub(in super::super) const DEFAULT: Control = 0x1f80;
    /// Exceptions that have happened.
    pub(in super::super) const FLAGS: Control = 0x3f;

    #[inline]
    pub(in super::super) fn control() -> Control {
        let mut value = 0;
        // SAFETY: stores the register in a local of its size and changes nothing else.
        unsafe { asm!("stmxcsr [{}]", in(reg) &raw mut value, options(nostack, preserves_flags)) };
        value
    }

    /// No operation on floats moves across this in the loops: all of theirs lie between loads and
    /// stores, and those do not move across what may touch memory.
    #[inline]
    pub(in super::super) fn set_control(value: Control) {
        // SAFETY: loads the register from a local of its size. The value is the default or was
        // read from the register, so no reserved bit is set, and it is in force either for the
        // loops, which may assume the default, or for the caller, who had it before.
        unsafe { asm!("ldmxcsr [{}]", in(reg) &raw const value, options(nostack)) };
    }
}

#[cfg(target_arch = "aarch64")]
pub(super) use aarch64::{Control, DEFAULT, FLAGS, control, set_control};

#[cfg(target_arch = "aarch64")]
mod aarch64 {
    use std::arch::asm;

    /// FPCR.
    pub(in super::super) type Control = u64;
    /// Rounding to nearest, subnormals kept, NaNs passed on, no traps.
    pub(in super::super) const DEFAULT: Control = 0;
    /// Exceptions that have happened are in another register.
    pub(in super::super) const FLAGS: Control = 0;

    #[inline]
    pub(in super::super) fn control() -> Control {
        let value;
        // SAFETY: reads a register that every thread may read.
        unsafe { asm!("mrs {}, fpcr", out(reg) value, options(nostack, preserves_flags)) };
        value
    }

    /// As on other processors: nothing of the loops moves across this.
    #[inline]
    pub(in super::super) fn set_control(value: Control) {
        // SAFETY: writes a register that every thread may write, with the default or a value that
        // was read from it; in force either for the loops, which may assume the default, or for
        // the caller, who had it before.
        unsafe { asm!("msr fpcr, {}", in(reg) value, options(nostack, preserves_flags)) };
    }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
pub(super) use elsewhere::{Control, DEFAULT, FLAGS, control, set_control};

/// Other processors keep what they have.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
mod elsewhere {
    pub(in super::super) type Control = u32;
    pub(in super::super) const DEFAULT: Control = 0;
    pub(in super::super) const FLAGS: Control = 0;

    pub(in super::super) fn control() -> Control {
        DEFAULT
    }

    pub(in super::super) fn set_control(_value: Control) {}
}
