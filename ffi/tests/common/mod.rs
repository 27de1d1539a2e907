//! Finds the library under test.

use std::path::PathBuf;

/// `libsymmpool.so`, which is built with the tests.
pub(crate) fn library() -> PathBuf {
    let test = std::env::current_exe().expect("this test");
    let folder = test.parent().expect("the build's folder");
    let library = folder.join("libsymmpool.so");
    assert!(library.exists(), "no {}", library.display());
    library
}
