//! The machine and the command with which the numbers were measured.

use std::fs;

use serde_json::{Value, json};

pub(crate) fn facts() -> Value {
    let read = |path: &str| fs::read_to_string(path).map(|text| text.trim().to_owned()).ok();
    let field = |path: &str, name: &str| {
        let text = fs::read_to_string(path).ok()?;
        let line = text.lines().find(|line| line.starts_with(name))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    json!({
        "command": command(),
        "version": env!("CARGO_PKG_VERSION"),
        "commit": option_env!("SYMMPOOL_COMMIT").filter(|commit| !commit.is_empty()),
        "optimised": !cfg!(debug_assertions),
        "architecture": std::env::consts::ARCH,
        "cpu": field("/proc/cpuinfo", "model name"),
        "cpus": std::thread::available_parallelism().map(usize::from).ok(),
        "memory": field("/proc/meminfo", "MemTotal"),
        "kernel": read("/proc/sys/kernel/osrelease"),
        "huge_pages_for_shared_memory": read("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        "load_average": read("/proc/loadavg"),
    })
}

/// The command line, without the folders of this machine.
fn command() -> String {
    let names = std::env::args().map(|argument| {
        let path = std::path::Path::new(&argument);
        let name = path.file_name().filter(|_| path.is_absolute());
        name.map_or(argument.clone(), |name| name.to_string_lossy().into_owned())
    });
    names.collect::<Vec<_>>().join(" ")
}
