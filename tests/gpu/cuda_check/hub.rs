//! The process that starts the ranks, forwards their handles, and collects their reports.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::process::{Child, Command};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::{Value, json};
use symmpool_allocator::Deadline;
use symmpool_allocator::driver::DeviceIdentity;
use symmpool_allocator::topology::Topology;

use super::CheckOptions;
use super::rank::{BARRIERS, SEGMENTS};
use super::wire::{self, MessageKind, WireMessage};

/// Runs the whole exchange and returns its report.
pub(crate) fn run(options: &CheckOptions, device_count: u32, deadline: Deadline) -> Value {
    println!("{} rank(s) on {device_count} device(s)", options.ranks);
    let mut children = Vec::new();
    let outcome = exchange(options, &mut children, deadline);
    let exits = reap(children, if outcome.is_ok() { deadline } else { Deadline::seconds(5) });
    let mut report = json!({
        "mode": "exchange",
        "ranks": options.ranks,
        "device_count": device_count,
        "segment_mib": options.segment_mib,
        "stride_gib": options.stride_gib,
    });
    let outcome = outcome.and_then(|reports| match exits {
        Ok(()) => Ok(reports),
        Err(error) => Err(error),
    });
    match outcome {
        Ok(reports) => {
            let devices: Result<Vec<DeviceIdentity>, _> = reports
                .iter()
                .map(|report| serde_json::from_value(report["device"].clone()))
                .collect();
            let topology = devices
                .map_err(|error| error.to_string())
                .and_then(|devices| Topology::detect(&devices).map_err(|e| e.to_string()));
            report["ok"] = json!(topology.is_ok());
            match topology {
                Ok(topology) => {
                    println!("{topology}");
                    report["mesh"] = json!(topology.kind().to_string());
                    report["topology"] = json!(topology);
                    report["topology_text"] = json!(topology.to_string());
                }
                Err(error) => report["error"] = json!(error),
            }
            print(&reports);
            report["per_rank"] = json!(reports);
        }
        Err(error) => {
            report["ok"] = json!(false);
            report["error"] = json!(error);
        }
    }
    report
}

fn exchange(
    options: &CheckOptions,
    children: &mut Vec<Child>,
    deadline: Deadline,
) -> Result<Vec<Value>, String> {
    let name = format!("symmpool-cuda-check-{}", std::process::id());
    let address = SocketAddr::from_abstract_name(&name).map_err(|error| error.to_string())?;
    let listener = UnixListener::bind_addr(&address).map_err(|error| error.to_string())?;
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    for rank in 0..options.ranks {
        let mut command = Command::new(&program);
        command
            .args(["--child", &rank.to_string(), &name])
            .args(["--ranks", &options.ranks.to_string()])
            .args(["--timeout", &options.timeout.as_secs().to_string()])
            .args(["--segment-mib", &options.segment_mib.to_string()])
            .args(["--stride-gib", &options.stride_gib.to_string()]);
        if options.prefer_fabric {
            command.arg("--prefer-fabric");
        }
        let child = command.spawn().map_err(|error| format!("starting rank {rank}: {error}"))?;
        children.push(child);
    }
    let mut ranks = gather(&listener, options.ranks, deadline)?;
    forward_segments(&mut ranks, deadline)?;
    for barrier in 0..BARRIERS {
        for (rank, socket) in ranks.iter_mut().enumerate() {
            let message = from_rank(socket, rank, MessageKind::Barrier, deadline)?;
            if message.index != barrier {
                return Err(format!("rank {rank} is at barrier {}, not {barrier}", message.index));
            }
        }
        for (rank, socket) in ranks.iter_mut().enumerate() {
            wire::send(socket, &WireMessage::new(MessageKind::Barrier, 0, barrier), deadline)
                .map_err(|error| format!("to rank {rank}: {error}"))?;
        }
    }
    let mut reports = Vec::new();
    for (rank, socket) in ranks.iter_mut().enumerate() {
        let message = from_rank(socket, rank, MessageKind::Report, deadline)?;
        let report = serde_json::from_slice(&message.payload)
            .map_err(|error| format!("the report of rank {rank}: {error}"))?;
        reports.push(report);
    }
    Ok(reports)
}

/// One connection a rank, in rank order.
fn gather(
    listener: &UnixListener,
    world: u32,
    deadline: Deadline,
) -> Result<Vec<UnixStream>, String> {
    let mut ranks: Vec<Option<UnixStream>> = (0..world).map(|_| None).collect();
    while let Some(missing) = ranks.iter().position(Option::is_none) {
        let left = Timespec::try_from(deadline.remaining()).map_err(|error| error.to_string())?;
        let mut ready = [PollFd::new(listener, PollFlags::IN)];
        match poll(&mut ready, Some(&left)) {
            Ok(0) => return Err(format!("rank {missing} did not come in time")),
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => continue,
            Err(error) => return Err(format!("waiting for ranks: {error}")),
        }
        let (mut socket, _) = listener.accept().map_err(|error| error.to_string())?;
        let hello = wire::expect(&mut socket, MessageKind::Hello, deadline)?;
        match ranks.get_mut(hello.rank as usize) {
            Some(place @ None) => *place = Some(socket),
            _ => return Err(format!("rank {} came twice, or is none of {world}", hello.rank)),
        }
    }
    Ok(ranks.into_iter().flatten().collect())
}

/// Receives every rank's segments and sends each rank those of all others. The descriptors received here are
/// closed on return; the ranks keep theirs until all have mapped.
fn forward_segments(ranks: &mut [UnixStream], deadline: Deadline) -> Result<(), String> {
    let mut segments = Vec::new();
    for (rank, socket) in ranks.iter_mut().enumerate() {
        for _ in 0..SEGMENTS {
            segments.push(from_rank(socket, rank, MessageKind::Segment, deadline)?);
        }
    }
    for (rank, socket) in ranks.iter_mut().enumerate() {
        for segment in segments.iter().filter(|segment| segment.rank as usize != rank) {
            wire::send(socket, segment, deadline)
                .map_err(|error| format!("to rank {rank}: {error}"))?;
        }
    }
    Ok(())
}

fn from_rank(
    socket: &mut UnixStream,
    rank: usize,
    kind: MessageKind,
    deadline: Deadline,
) -> Result<WireMessage, String> {
    wire::expect(socket, kind, deadline)
        .map_err(|error| format!("rank {rank}, waiting for its {kind:?}: {error}"))
}

/// Waits until the processes have ended, and kills those that do not end in time.
pub(super) fn reap(children: Vec<Child>, deadline: Deadline) -> Result<(), String> {
    let mut wrong = Vec::new();
    for (rank, mut child) in children.into_iter().enumerate() {
        let status = loop {
            match child.try_wait() {
                Ok(Some(status)) => break status.to_string(),
                Ok(None) if deadline.expired() => {
                    // Killing a child that has just ended is no error worth reporting.
                    let _ = child.kill();
                    let _ = child.wait();
                    break "did not end".to_owned();
                }
                Ok(None) => std::thread::sleep(Duration::from_millis(5)),
                Err(error) => break error.to_string(),
            }
        };
        if status != "exit status: 0" {
            wrong.push(format!("rank {rank}: {status}"));
        }
    }
    if wrong.is_empty() { Ok(()) } else { Err(wrong.join("; ")) }
}

fn print(reports: &[Value]) {
    let Some(first) = reports.first() else { return };
    let facts = &first["facts"];
    for name in ["driver_version", "granularity", "posix_fd", "fabric", "gpu_direct_rdma"] {
        println!("{name}: {}", facts[name]);
    }
    println!("transport: {}", first["transport"]);
    for (rank, report) in reports.iter().enumerate() {
        println!("rank {rank} on {} ({})", report["device"]["name"], report["device"]["uuid"]);
        let steps: Vec<(String, f64)> =
            serde_json::from_value(report["steps_us"].clone()).unwrap_or_default();
        let mut shown: Vec<&str> = Vec::new();
        for (name, first) in &steps {
            if shown.contains(&name.as_str()) {
                continue;
            }
            shown.push(name);
            let mut times: Vec<f64> =
                steps.iter().filter(|step| step.0 == *name).map(|step| step.1).collect();
            times.sort_by(f64::total_cmp);
            let median = times[times.len() / 2];
            match times.len() {
                1 => println!("  {first:>10.1} us  {name}"),
                n => println!("  {first:>10.1} us  {name} (median of {n}: {median:.1})"),
            }
        }
    }
}
