//! Which process a rank is, on which host, and whether handles can travel to it.

use std::cell::RefCell;
use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::host_id::{self, HOST_ID};
use crate::{Error, Result};

/// A process and the machine and namespaces it runs in.
///
/// Ranks publish this at rendezvous. It decides which ranks can be reached over an abstract Unix socket, and
/// names hosts and processes in messages. A namespace that cannot be read (no `/proc/self/ns`) is 0, and two
/// unknown namespaces count as the same one: if they are not, the system call will fail.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct HostIdentity {
    /// Random id of this boot of the kernel; shared by all containers of a machine.
    pub(crate) boot_id: String,
    /// The name of the machine or container.
    pub(crate) hostname: String,
    /// Id of the host that the process pretends to be on (`SYMMPOOL_HOST_ID`).
    pub(crate) host_id: Option<String>,
    /// Inode of the pid namespace.
    pub(crate) pid_namespace: u64,
    /// Inode of the mount namespace.
    pub(crate) mount_namespace: u64,
    /// Inode of the network namespace; abstract Unix sockets belong to it.
    pub(crate) net_namespace: u64,
    /// Effective user id, which peers see as the socket's credentials.
    pub(crate) uid: u32,
    /// Process id in its own pid namespace.
    pub(crate) pid: u32,
    /// When the process started, in clock ticks since boot: a recycled pid has another one.
    pub(crate) start_time: u64,
}

/// Key that is equal for the processes of one host, and for them alone.
///
/// A host is where file descriptors can travel from each process to each other one: one kernel, one network
/// namespace (abstract Unix sockets belong to it) and one user (whom sockets check). Containers of one machine may
/// therefore be several hosts. A pretended host is always a part of a real one.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct HostKey {
    boot_id: String,
    net_namespace: u64,
    uid: u32,
    host_id: Option<String>,
}

impl HostIdentity {
    /// The identity of this process. An [`Error::is_invalid_argument`] if `SYMMPOOL_HOST_ID` makes no sense, and an
    /// [`Error::is_invalid_state`] if it changed since this process first read it.
    pub(crate) fn current() -> Result<Self> {
        let Birth { boot_id, start_time, .. } = Birth::of_this_process()?;
        Ok(Self {
            boot_id,
            hostname: rustix::system::uname().nodename().to_string_lossy().into_owned(),
            host_id: host_id::of_this_process()?,
            pid_namespace: namespace("/proc/self/ns/pid"),
            mount_namespace: namespace("/proc/self/ns/mnt"),
            net_namespace: namespace("/proc/self/ns/net"),
            uid: rustix::process::geteuid().as_raw(),
            pid: std::process::id(),
            start_time,
        })
    }

    /// Whether both processes run under one kernel, and none pretends otherwise.
    pub(crate) fn same_host(&self, other: &Self) -> bool {
        self.boot_id == other.boot_id && self.host_id == other.host_id
    }

    /// Key that groups processes to hosts. Two have equal keys where there is no [`obstacle`](Self::obstacle) between them.
    pub(crate) fn host_key(&self) -> HostKey {
        HostKey {
            boot_id: self.boot_id.clone(),
            net_namespace: self.net_namespace,
            uid: self.uid,
            host_id: self.host_id.clone(),
        }
    }

    /// Name of the host for messages, behind the word "host": `node7`, or `a (SYMMPOOL_HOST_ID)`.
    pub(crate) fn host_name(&self) -> String {
        match &self.host_id {
            Some(id) => format!("{id} ({HOST_ID})"),
            None => self.hostname.clone(),
        }
    }

    /// Whether both are the very same process.
    #[cfg(test)]
    pub(crate) fn same_process(&self, other: &Self) -> bool {
        self.same_host(other)
            && self.pid_namespace == other.pid_namespace
            && self.pid == other.pid
            && self.start_time == other.start_time
    }

    /// Why file descriptors cannot be sent between the two over an abstract Unix socket; `None` if they can.
    /// Different pid or mount namespaces are no obstacle: neither sockets nor descriptors belong to them.
    pub(crate) fn obstacle(&self, other: &Self) -> Option<String> {
        if self.boot_id != other.boot_id {
            return Some(format!(
                "they run on different machines ({} with boot id {}, {} with boot id {})",
                self.host_name(),
                self.boot_id,
                other.host_name(),
                other.boot_id
            ));
        }
        if self.host_id != other.host_id {
            let shown = |identity: &Self| match &identity.host_id {
                Some(id) => format!("{HOST_ID}={id}"),
                None => format!("{HOST_ID} not set"),
            };
            return Some(format!(
                "they pretend to run on different hosts ({} on one, {} on the other); to run them on one host, \
                 give both the same {HOST_ID}, or unset it for both",
                shown(self),
                shown(other)
            ));
        }
        if self.net_namespace != other.net_namespace {
            return Some(format!(
                "they run in different network namespaces of one machine (net:[{}] on {}, \
                 net:[{}] on {}), and abstract Unix sockets do not cross those; run both in one \
                 container, or both with the host's network",
                self.net_namespace, self.hostname, other.net_namespace, other.hostname
            ));
        }
        if self.uid != other.uid {
            return Some(format!(
                "they run as different users (uid {} and uid {})",
                self.uid, other.uid
            ));
        }
        None
    }
}

/// When a process began, which does not change.
#[derive(Clone)]
struct Birth {
    pid: u32,
    boot_id: String,
    start_time: u64,
}

impl Birth {
    /// Read once by each thread that asks: a forked child cannot find a lock held.
    fn of_this_process() -> Result<Self> {
        thread_local!(static READ: RefCell<Option<Birth>> = const { RefCell::new(None) });
        let known = READ.with_borrow(Clone::clone);
        if let Some(birth) = known.filter(|birth| birth.pid == std::process::id()) {
            return Ok(birth);
        }
        let boot_id = read("/proc/sys/kernel/random/boot_id")?.trim().to_owned();
        let stat = read("/proc/self/stat")?;
        let start_time = start_time(&stat).ok_or_else(|| {
            Error::system("reading this process's start time", "unexpected form of /proc/self/stat")
        })?;
        let birth = Self { pid: std::process::id(), boot_id, start_time };
        READ.set(Some(birth.clone()));
        Ok(birth)
    }
}

fn read(path: &str) -> Result<String> {
    fs::read_to_string(path).map_err(|error| Error::system(format!("reading {path}"), error))
}

/// The inode in a link such as `net:[4026531840]`.
fn namespace(path: &str) -> u64 {
    fs::read_link(Path::new(path))
        .ok()
        .and_then(|link| parse_namespace(&link.to_string_lossy()))
        .unwrap_or(0)
}

fn parse_namespace(link: &str) -> Option<u64> {
    link.split_once(":[")?.1.strip_suffix(']')?.parse().ok()
}

/// Field 22 of `/proc/<pid>/stat`. The second field is the program's name in parentheses, which
/// may itself contain spaces and parentheses, so fields are counted from the last one.
fn start_time(stat: &str) -> Option<u64> {
    let (_, after_name) = stat.rsplit_once(')')?;
    // The field after the name is number 3.
    after_name.split_ascii_whitespace().nth(22 - 3)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_can_reach_itself() {
        let me = HostIdentity::current().unwrap();
        assert_eq!(me, HostIdentity::current().unwrap());
        assert!(me.same_process(&me.clone()));
        assert_eq!(me.obstacle(&me), None);
        assert!(!me.boot_id.is_empty() && me.start_time > 0);
    }

    #[test]
    fn obstacles_say_what_differs() {
        let me = HostIdentity::current().unwrap();
        let boot = HostIdentity { boot_id: "other".into(), ..me.clone() };
        assert!(me.obstacle(&boot).unwrap().contains("different machines"));
        let net = HostIdentity { net_namespace: me.net_namespace + 1, ..me.clone() };
        assert!(me.obstacle(&net).unwrap().contains("network namespaces"));
        let user = HostIdentity { uid: me.uid + 1, ..me.clone() };
        assert!(me.obstacle(&user).unwrap().contains("different users"));
        let pid = HostIdentity { pid_namespace: 1, mount_namespace: 1, ..me.clone() };
        assert_eq!(me.obstacle(&pid), None);
    }

    #[test]
    fn pretended_hosts_are_told_apart_with_both_ids() {
        let node = HostIdentity { host_id: None, ..HostIdentity::current().unwrap() };
        let on = |id: &str| HostIdentity { host_id: Some(id.into()), ..node.clone() };
        let text = on("a").obstacle(&on("b")).unwrap();
        assert!(
            text.contains("SYMMPOOL_HOST_ID=a on one, SYMMPOOL_HOST_ID=b on the other"),
            "{text}"
        );
        assert!(text.contains("give both the same SYMMPOOL_HOST_ID, or unset it"), "{text}");
        let text = node.obstacle(&on("b")).unwrap();
        assert!(text.contains("SYMMPOOL_HOST_ID not set on one, SYMMPOOL_HOST_ID=b on"), "{text}");
        assert!(on("a").same_host(&on("a")) && on("a").obstacle(&on("a")).is_none());
        assert!(!on("a").same_host(&on("b")) && !on("a").same_host(&node));
        assert_eq!(
            (on("a").host_name(), node.host_name()),
            ("a (SYMMPOOL_HOST_ID)".into(), node.hostname.clone())
        );
        // One id on two machines does not make them one.
        let elsewhere = HostIdentity { boot_id: "other".into(), ..on("a") };
        assert!(
            on("a")
                .obstacle(&elsewhere)
                .unwrap()
                .contains("different machines (a (SYMMPOOL_HOST_ID) with boot")
        );
    }

    #[test]
    fn keys_are_equal_where_nothing_is_in_the_way() {
        let me = HostIdentity { host_id: None, ..HostIdentity::current().unwrap() };
        let mut all = Vec::new();
        for bits in 0..32_u32 {
            let other = |bit: u32| bits >> bit & 1 != 0;
            all.push(HostIdentity {
                boot_id: if other(0) { "other".into() } else { me.boot_id.clone() },
                net_namespace: me.net_namespace + u64::from(other(1)),
                uid: me.uid + u32::from(other(2)),
                host_id: other(3).then(|| "a".into()),
                // The rest does not tell hosts apart.
                pid: me.pid + u32::from(other(4)),
                hostname: format!("name{}", bits >> 4),
                pid_namespace: me.pid_namespace + u64::from(other(4)),
                ..me.clone()
            });
        }
        for (one, other) in all.iter().flat_map(|one| all.iter().map(move |other| (one, other))) {
            let is_one = one.host_key() == other.host_key();
            assert_eq!(is_one, one.obstacle(other).is_none(), "{one:?} {other:?}");
            assert_eq!(is_one, other.obstacle(one).is_none(), "{one:?} {other:?}");
        }
    }

    #[test]
    fn a_recycled_pid_is_another_process() {
        let me = HostIdentity::current().unwrap();
        let later = HostIdentity { start_time: me.start_time + 1, ..me.clone() };
        assert!(!me.same_process(&later));
    }

    #[test]
    fn program_names_cannot_confuse_the_stat_parser() {
        let mut stat = String::from("7 (a) R 1 (b)) S");
        for field in 4..=30 {
            stat.push_str(&format!(" {field}"));
        }
        assert_eq!(start_time(&stat), Some(22));
        assert_eq!(start_time("7 (a"), None);
        assert_eq!(start_time(""), None);
        assert_eq!(parse_namespace("net:[4026531840]"), Some(4_026_531_840));
        assert_eq!(parse_namespace("net"), None);
    }
}
