//! What the numbers were measured on.

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
        "command": std::env::args().collect::<Vec<_>>().join(" "),
        "version": env!("CARGO_PKG_VERSION"),
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
