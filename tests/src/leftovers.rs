//! Counts what a pool could leave behind in a process: descriptors, mappings, sockets, threads, children.

use std::fs;
use std::path::Path;

/// The resources of this process that a pool could leak. Take it twice and compare.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessResources {
    /// Open file descriptors.
    pub descriptors: usize,
    /// Descriptors of memory files.
    pub memory_files: usize,
    /// Mappings of memory files.
    pub mappings: usize,
    /// Abstract Unix sockets of this project that this process holds.
    pub sockets: usize,
    /// Threads.
    pub threads: usize,
    /// Child processes, including dead ones that are not reaped.
    pub children: usize,
    /// Entries of `/dev/shm` under this project's name, of any process. There should be none.
    pub shared_files: usize,
}

impl ProcessResources {
    /// Counts the resources of this process now.
    pub fn now() -> Self {
        let links = links_of("self");
        let mappings = fs::read_to_string("/proc/self/maps").unwrap_or_default();
        Self {
            // Reading the directory takes one descriptor itself.
            descriptors: links.len() - 1,
            memory_files: links.iter().filter(|link| link.starts_with("/memfd:")).count(),
            mappings: mappings.lines().filter(|line| line.contains("/memfd:")).count(),
            sockets: abstract_sockets_among(&links),
            threads: entries("/proc/self/task").len(),
            children: children(),
            shared_files: entries("/dev/shm").iter().filter(|name| ours(name)).count(),
        }
    }

    /// A text that says which resources are more than `before`, if any are.
    pub fn leaks_since(&self, before: &Self) -> Option<String> {
        let all = [
            ("descriptors", self.descriptors, before.descriptors),
            ("memory files", self.memory_files, before.memory_files),
            ("mappings", self.mappings, before.mappings),
            ("abstract sockets", self.sockets, before.sockets),
            ("threads", self.threads, before.threads),
            ("children", self.children, before.children),
            ("shared files", self.shared_files, before.shared_files),
        ];
        let more: Vec<String> = all
            .iter()
            .filter(|(_, now, before)| now > before)
            .map(|(what, now, before)| format!("{what}: {before} before, {now} now"))
            .collect();
        (!more.is_empty()).then(|| more.join("; "))
    }
}

fn ours(name: &str) -> bool {
    name.contains("symmpool")
}

fn entries(directory: impl AsRef<Path>) -> Vec<String> {
    let Ok(entries) = fs::read_dir(directory) else { return Vec::new() };
    entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

/// Targets that the descriptors of a process link to.
fn links_of(process: &str) -> Vec<String> {
    let directory = format!("/proc/{process}/fd");
    let link = |name: &String| {
        let link = fs::read_link(format!("{directory}/{name}"));
        link.map_or_else(|_| String::new(), |link| link.to_string_lossy().into_owned())
    };
    entries(&directory).iter().map(link).collect()
}

/// How many of these descriptors are abstract sockets under this project's name.
fn abstract_sockets_among(links: &[String]) -> usize {
    let table = fs::read_to_string("/proc/net/unix").unwrap_or_default();
    let named = table.lines().filter_map(|line| {
        let fields: Vec<&str> = line.split_ascii_whitespace().collect();
        let (inode, name) = (fields.get(6)?, fields.get(7)?);
        (name.starts_with('@') && ours(name)).then(|| format!("socket:[{inode}]"))
    });
    named.filter(|socket| links.contains(socket)).count()
}

/// The number of processes whose parent is this one.
fn children() -> usize {
    let own = std::process::id().to_string();
    let is_child = |name: &String| {
        // The parent is the second field after the program's name in parentheses.
        let stat = fs::read_to_string(format!("/proc/{name}/stat")).unwrap_or_default();
        stat.rsplit_once(')').and_then(|(_, rest)| rest.split_ascii_whitespace().nth(1))
            == Some(&own)
    };
    entries("/proc")
        .iter()
        .filter(|name| name.parse::<u32>().is_ok())
        .filter(|n| is_child(n))
        .count()
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn leaked_resources_are_counted() {
        let before = ProcessResources::now();
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let file = rustix::fs::memfd_create("symmpool-leftovers", flags).unwrap();
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let now = ProcessResources::now();
        assert_eq!(now.memory_files, before.memory_files + 1);
        assert_eq!(now.children, before.children + 1);
        let leaks = now.leaks_since(&before).expect("a difference");
        assert!(leaks.contains("memory files") && leaks.contains("children"), "{leaks}");
        drop(file);
        child.kill().unwrap();
        // Dead, but not reaped.
        assert_eq!(ProcessResources::now().children, before.children + 1);
        child.wait().unwrap();
        drop(child);
        let after = ProcessResources::now();
        assert_eq!(after.children, before.children);
        assert_eq!(after.memory_files, before.memory_files);
    }

    #[test]
    fn abstract_sockets_are_attributed_to_their_holder() {
        use std::os::linux::net::SocketAddrExt;
        use std::os::unix::net::{SocketAddr, UnixListener};
        let name = format!("symmpool-leftovers-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(name.as_bytes()).unwrap();
        let listener = UnixListener::bind_addr(&address).unwrap();
        let listening = ProcessResources::now().sockets;
        assert!(listening >= 1);
        drop(listener);
        assert_eq!(ProcessResources::now().sockets, listening - 1);
    }
}
