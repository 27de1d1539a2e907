//! The floating-point environment of the loops: the default one, whatever the caller has set.
//!
//! A thread may have set subnormals to be flushed to zero, or another rounding mode. Ranks that reduce the same
//! elements would then get different bits (rule S7). So the loops run in the default environment, which the compiler
//! assumes for all code anyway, and restore the caller's environment after that.

/// Sets the default environment, and restores the former one when dropped.
///
/// Where the default is set already, as on most threads, this costs a read of the control register only.
pub(super) struct DefaultEnvironment {
    before: Option<ControlRegister>,
}

impl DefaultEnvironment {
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

impl Drop for DefaultEnvironment {
    #[inline]
    fn drop(&mut self) {
        if let Some(before) = self.before {
            set_control(before);
        }
    }
}

/// Whether the control register differs from the default in more than the flags of past exceptions.
#[inline]
fn is_special(control: ControlRegister) -> bool {
    control & !FLAGS != DEFAULT
}

#[cfg(target_arch = "x86_64")]
pub(super) use x86_64::{ControlRegister, DEFAULT, FLAGS, control, set_control};

#[cfg(target_arch = "x86_64")]
mod x86_64 {
    use std::arch::asm;

    /// MXCSR.
    pub(in super::super) type ControlRegister = u32;
    /// All exceptions masked, rounding to nearest, subnormals kept.
    pub(in super::super) const DEFAULT: ControlRegister = 0x1f80;
    /// The flags of past exceptions.
    pub(in super::super) const FLAGS: ControlRegister = 0x3f;

    #[inline]
    pub(in super::super) fn control() -> ControlRegister {
        let mut value = 0;
        // SAFETY: stores the register in a local of its size and changes nothing else.
        unsafe { asm!("stmxcsr [{}]", in(reg) &raw mut value, options(nostack, preserves_flags)) };
        value
    }

    /// No floating-point operation of the loops can be moved across this: all of them lie between loads and stores,
    /// which are not moved across code that may access memory.
    #[inline]
    pub(in super::super) fn set_control(value: ControlRegister) {
        // SAFETY: loads the register from a local of its size. The value is the default or was read from the register,
        // so no reserved bit is set. It applies either to the loops, which assume the default, or to the caller, who
        // had it before.
        unsafe { asm!("ldmxcsr [{}]", in(reg) &raw const value, options(nostack)) };
    }
}

#[cfg(target_arch = "aarch64")]
pub(super) use aarch64::{ControlRegister, DEFAULT, FLAGS, control, set_control};

#[cfg(target_arch = "aarch64")]
mod aarch64 {
    use std::arch::asm;

    /// FPCR.
    pub(in super::super) type ControlRegister = u64;
    /// Rounding to nearest, subnormals kept, NaNs propagated, no traps.
    pub(in super::super) const DEFAULT: ControlRegister = 0;
    /// The flags of past exceptions are in another register.
    pub(in super::super) const FLAGS: ControlRegister = 0;

    #[inline]
    pub(in super::super) fn control() -> ControlRegister {
        let value;
        // SAFETY: reads a register that every thread may read.
        unsafe { asm!("mrs {}, fpcr", out(reg) value, options(nostack, preserves_flags)) };
        value
    }

    /// No floating-point operation of the loops can be moved across this, as on x86-64.
    #[inline]
    pub(in super::super) fn set_control(value: ControlRegister) {
        // SAFETY: writes a register that every thread may write, with the default or a value that was read from it. It
        // applies either to the loops, which assume the default, or to the caller, who had it before.
        unsafe { asm!("msr fpcr, {}", in(reg) value, options(nostack, preserves_flags)) };
    }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
pub(super) use elsewhere::{ControlRegister, DEFAULT, FLAGS, control, set_control};

/// On other processors the environment is left as it is.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
mod elsewhere {
    pub(in super::super) type ControlRegister = u32;
    pub(in super::super) const DEFAULT: ControlRegister = 0;
    pub(in super::super) const FLAGS: ControlRegister = 0;

    pub(in super::super) fn control() -> ControlRegister {
        DEFAULT
    }

    pub(in super::super) fn set_control(_value: ControlRegister) {}
}
