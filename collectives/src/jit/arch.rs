//! Which machine code a device runs, and which of it a compiler can make.

use std::fmt;

use symmpool_allocator::{Error, Result};

/// The compute capability of the oldest devices that have all instructions of the kernels.
const OLDEST: Arch = Arch { major: 8, minor: 0 };

/// A device's compute capability.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Arch {
    major: u32,
    minor: u32,
}

/// Output that a compiler is to make.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Target {
    /// Machine code of one kind of device: `sm_90a`.
    Cubin(String),
    /// Code that the driver translates for the device at hand: `compute_90`.
    Ptx(String),
}

impl Arch {
    /// The capability `major.minor`, as the driver's attributes give it.
    ///
    /// # Errors
    ///
    /// `is_unsupported` below 8.0.
    pub(crate) fn new(major: u32, minor: u32) -> Result<Self> {
        let arch = Self { major, minor };
        if arch < OLDEST {
            return Err(Error::unsupported(format!(
                "a device of compute capability {arch}: the kernels need {OLDEST} or newer"
            )));
        }
        Ok(arch)
    }

    /// The best target for this device of a compiler for the architectures `supported` (90 is 9.0): the device's own
    /// machine code, else the newest intermediate code that the device's driver can translate.
    pub(super) fn target(self, supported: &[u32]) -> Result<Target> {
        let number = self.number();
        if supported.contains(&number) {
            // 9.0 has instructions that its successors need not have.
            let suffix = if number == 90 { "a" } else { "" };
            return Ok(Target::Cubin(format!("sm_{number}{suffix}")));
        }
        let older = supported.iter().filter(|&&known| OLDEST.number() <= known && known < number);
        older.max().map(|known| Target::Ptx(format!("compute_{known}"))).ok_or_else(|| {
            Error::unsupported(format!(
                "NVRTC makes code for compute capabilities {supported:?} (90 is 9.0), none of which \
                 is from {OLDEST} to the device's {self}"
            ))
        })
    }

    fn number(self) -> u32 {
        self.major.saturating_mul(10).saturating_add(self.minor)
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

impl Target {
    /// The name that `--gpu-architecture` takes.
    pub(super) fn name(&self) -> &str {
        match self {
            Self::Cubin(name) | Self::Ptx(name) => name,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CUDA_12_4: &[u32] = &[50, 60, 70, 75, 80, 86, 87, 89, 90];

    fn target(major: u32, minor: u32, supported: &[u32]) -> String {
        let arch = Arch::new(major, minor).expect("new enough");
        arch.target(supported).expect("a target").name().to_owned()
    }

    #[test]
    fn known_devices_get_their_own_code_and_newer_ones_the_newest_that_can_be_made() {
        assert_eq!(target(8, 0, CUDA_12_4), "sm_80");
        assert_eq!(target(8, 9, CUDA_12_4), "sm_89");
        assert_eq!(target(9, 0, CUDA_12_4), "sm_90a");
        assert_eq!(target(10, 0, CUDA_12_4), "compute_90");
        assert_eq!(target(10, 0, &[80, 90, 100, 120]), "sm_100");
        assert_eq!(target(11, 0, &[80, 90, 100, 120]), "compute_100");
        assert_eq!(target(8, 8, &[90, 80, 86]), "compute_86");
        assert_eq!(target(8, 6, &[75, 80]), "compute_80");
        assert_eq!(target(u32::MAX, u32::MAX, CUDA_12_4), "compute_90");
    }

    #[test]
    fn what_cannot_be_compiled_for_is_said() {
        let old = Arch::new(7, 5).expect_err("too old");
        assert!(old.is_unsupported() && old.to_string().contains("7.5"), "{old}");
        let newer = Arch::new(8, 0).and_then(|arch| arch.target(&[60, 75, 90]));
        let newer = newer.expect_err("no compiler for it");
        assert!(newer.is_unsupported() && newer.to_string().contains("75"), "{newer}");
    }
}
