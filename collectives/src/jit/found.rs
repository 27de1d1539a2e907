//! Which compiler and which cache kernels would use, for programs that report it.

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use symmpool_allocator::Result;

use super::JitOptions;
use super::nvrtc::Nvrtc;

/// The NVRTC library with which kernels would be compiled.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct KernelCompiler {
    /// Its version of CUDA.
    pub version: (u32, u32),
    /// Its file.
    pub place: String,
    /// The architectures of devices for which it compiles: 90 is 9.0.
    pub archs: Vec<u32>,
}

/// Searches for NVRTC as the first collective on a device does. `driver_major` is the major version of CUDA that the
/// driver supports: later ones are skipped.
///
/// # Errors
///
/// `is_unsupported` if there is none, with the reason for each place.
pub fn kernel_compiler(driver_major: Option<u32>) -> Result<KernelCompiler> {
    let options = JitOptions::from_env();
    let Nvrtc { version, archs, place, .. } = Nvrtc::open(&options.candidates(), driver_major)?;
    Ok(KernelCompiler { version, place, archs })
}

/// The folder in which compiled kernels are kept, or `None` if the environment says that they are not.
pub fn kernel_cache() -> Option<PathBuf> {
    JitOptions::from_env().cache
}

static PACKAGES: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Has NVRTC be searched in these folders of Python packages (`site-packages`) too, from the next search on. An
/// interpreter knows its folders, whether or not its environment is active.
pub fn search_packages(folders: Vec<PathBuf>) {
    *PACKAGES.lock().unwrap_or_else(PoisonError::into_inner) = folders;
}

/// The folders that were given to [`search_packages`].
pub(super) fn packages() -> Vec<PathBuf> {
    PACKAGES.lock().unwrap_or_else(PoisonError::into_inner).clone()
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
