//! What the compiler of kernels would be, for those who ask before they need it.

use std::path::PathBuf;

use symmpool_allocator::Result;

use super::nvrtc::Nvrtc;
use super::{JitOptions, search};

/// The NVRTC library that kernels would be compiled with.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct KernelCompiler {
    /// The version of CUDA that it is of.
    pub version: (u32, u32),
    /// Its file.
    pub place: String,
    /// Architectures of devices that it compiles for: 90 is 9.0.
    pub archs: Vec<u32>,
}

/// Looks for NVRTC as the first collective on a device does. `driver_major` is the major version of
/// CUDA that the driver serves: later ones are passed over.
///
/// # Errors
///
/// `is_unsupported`, saying what became of each place, if there is none.
pub fn kernel_compiler(driver_major: Option<u32>) -> Result<KernelCompiler> {
    let options = JitOptions::from_env();
    let candidates = search::candidates(options.nvrtc.as_deref(), &options.packages, |name| {
        std::env::var_os(name)
    });
    let Nvrtc { version, archs, place, .. } = Nvrtc::open(&candidates, driver_major)?;
    Ok(KernelCompiler { version, place, archs })
}

/// The folder in which compiled kernels are kept, unless the environment says nowhere.
pub fn kernel_cache() -> Option<PathBuf> {
    JitOptions::from_env().cache
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_compiler_is_found_or_its_absence_explained() {
        match kernel_compiler(None) {
            Ok(found) => assert!(found.version.0 >= 12 && !found.archs.is_empty(), "{found:?}"),
            Err(error) => {
                assert!(error.is_unsupported());
                assert!(error.to_string().contains("SYMMPOOL_NVRTC"), "{error}");
            }
        }
    }
}
