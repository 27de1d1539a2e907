//! Lives of a pool between processes, from the group to the last drop: after thousands of them a process has not one
//! descriptor, thread, mapping, socket or byte more than after the first ones.
//!
//! `SYMMPOOL_LIVES=10000` makes so many instead of 200; `make test-long-lives` does.

mod held_bytes;

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use symmpool_allocator::driver::{FaultDriver, FaultPlan, HostDriver, HostOptions};
use symmpool_allocator::store::tcp::TcpOptions;
use symmpool_allocator::store::{FileStore, TcpServer, TcpStore};
use symmpool_allocator::{Deadline, Driver, Group, Pool, Stream};
use symmpool_collectives::{Communicator, ReduceOp};
use symmpool_tests::launch::{Host, Job};
use symmpool_tests::leftovers::ProcessResources;
use symmpool_tests::rank_process::{PATIENCE, RankProcess};

use held_bytes::held_bytes;

const STREAM: &Stream = &Stream::DEFAULT;
const WORLD: u32 = 2;
/// Lives before anything is compared: all ways through a life, more than twice.
const WARM_UP: u32 = 40;
/// One life of so many ends with a commit that fails.
const FAILS: u32 = 10;
/// Bytes of the heap that tables of a process may have grown by: less than a byte for each of 10,000 lives.
const HEAP_SLACK: usize = 1 << 10;
/// Growth of the memory that a process has in use, and of its addresses: less than the smallest segment and reservation.
const RESIDENT_SLACK: u64 = 8 << 20;
const ADDRESS_SLACK: u64 = 256 << 20;
/// How long threads may take to end that have nothing to do any more.
const ENDING: Duration = Duration::from_secs(5);

/// Resources and memory that a process holds between two lives.
#[derive(Debug)]
struct Holdings {
    resources: ProcessResources,
    mappings: usize,
    heap: usize,
    /// Bytes.
    resident: u64,
    addresses: u64,
}

impl Holdings {
    fn now() -> Self {
        let status = fs::read_to_string("/proc/self/status").unwrap();
        let kib = |field: &str| -> u64 {
            let line = status.lines().find_map(|line| line.strip_prefix(field)).unwrap();
            line.trim().trim_end_matches(" kB").parse().unwrap()
        };
        let (resident, addresses) = (kib("VmRSS:") << 10, kib("VmSize:") << 10);
        drop(status);
        let heap = held_bytes();
        let maps = fs::read_to_string("/proc/self/maps").unwrap();
        // Stacks of threads that have ended are kept by the C library, which joins and splits their mappings.
        let mappings = maps.lines().filter(|line| line.contains('/')).count();
        Self { resources: ProcessResources::now(), mappings, heap, resident, addresses }
    }

    /// Text that says what is more than `before`, if anything is.
    fn leaks_since(&self, before: &Self) -> Option<String> {
        let mut leaks: Vec<String> =
            self.resources.leaks_since(&before.resources).into_iter().collect();
        let mut compare = |what: &str, now: u64, before: u64, slack: u64| {
            if now > before + slack {
                leaks.push(format!("{what}: {before} before, {now} now"));
            }
        };
        compare("mappings of files", self.mappings as u64, before.mappings as u64, 0);
        compare("bytes of the heap", self.heap as u64, before.heap as u64, HEAP_SLACK as u64);
        compare("bytes in use", self.resident, before.resident, RESIDENT_SLACK);
        compare("bytes of addresses", self.addresses, before.addresses, ADDRESS_SLACK);
        (!leaks.is_empty()).then(|| leaks.join("; "))
    }

    /// Leaks since `before` that do not go away.
    fn lasting_leaks_since(before: &Self) -> (Self, Option<String>) {
        let begun = Instant::now();
        loop {
            let now = Self::now();
            let leaks = now.leaks_since(before);
            if leaks.is_none() || begun.elapsed() > ENDING {
                return (now, leaks);
            }
            thread::sleep(Duration::from_millis(10));
        }
    }
}

/// The test function that every rank runs.
#[test]
fn rank() {
    let Some(process) = RankProcess::from_env() else { return };
    let (lives, directory) = process.scenario.split_once(' ').unwrap();
    let lives: u32 = lives.parse().unwrap();
    let member = process.join();
    let one = |life| live_and_meet(&process, &member.group, life, Path::new(directory));
    (0..WARM_UP).for_each(one);
    let before = Holdings::now();
    for tenth in 0..10 {
        (WARM_UP + lives * tenth / 10..WARM_UP + lives * (tenth + 1) / 10).for_each(one);
        let (now, leaks) = Holdings::lasting_leaks_since(&before);
        if let Some(leaks) = leaks {
            return process
                .report("leaks", format!("after {} lives: {leaks}", lives * (tenth + 1) / 10));
        }
        process.report("now", format!("{now:?}"));
    }
    process.report("before", format!("{before:?}"));
    process.report("leaks", "none");
}

/// One life, in one of three stores in turn: that of the job, a server of its own, or a directory. Ranks leave it together.
fn live_and_meet(process: &RankProcess, job: &Group, life: u32, directory: &Path) {
    let deadline = Deadline::after(PATIENCE);
    let is_first = process.rank == 0;
    match life % 3 {
        0 => live(job.child("life"), life),
        1 => {
            let server =
                is_first.then(|| TcpServer::bind("127.0.0.1:0", TcpOptions::default()).unwrap());
            let key = format!("server of life {life}");
            if let Some(server) = &server {
                job.store()
                    .set(&key, server.local_addr().to_string().as_bytes(), deadline)
                    .unwrap();
            }
            let address = String::from_utf8(job.store().get(&key, deadline).unwrap()).unwrap();
            let options = TcpOptions::default();
            let store = TcpStore::connect_as(&*address, options, process.rank, deadline).unwrap();
            live(Group::new(process.rank, process.world, Arc::new(store)).unwrap(), life);
            job.all_gather("life", b"", deadline).unwrap();
            if is_first {
                job.store().delete(&key, deadline).unwrap();
            }
        }
        _ => {
            let directory = directory.join(life.to_string());
            let store = FileStore::open(&directory).unwrap();
            live(Group::new(process.rank, process.world, Arc::new(store)).unwrap(), life);
            job.all_gather("life", b"", deadline).unwrap();
            if is_first {
                fs::remove_dir_all(directory).unwrap();
            }
        }
    }
    job.all_gather("life", b"", deadline).unwrap();
}

fn live(group: Group, life: u32) {
    let (rank, fails) = (group.rank(), life % FAILS == FAILS - 1);
    let faults = match rank {
        1 if fails => FaultPlan::parse("fail-oom@step:commit-map:3").unwrap(),
        _ => FaultPlan::new(),
    };
    let options = HostOptions { populate: false, ..HostOptions::default() };
    let host = Driver::new(HostDriver::with_options(options).unwrap());
    let driver = FaultDriver::new(host, faults);
    let pool = Pool::builder(group.with_timeout(PATIENCE))
        .driver(Driver::new(driver.clone()))
        .stride(1 << 30)
        .build()
        .unwrap();
    let comm = Communicator::new(&pool).unwrap();
    let x = pool.alloc::<i32>(1000 + life as usize % 7 * 10_000).unwrap();
    x.write(&vec![(life + rank) as i32; x.len()]).unwrap();
    comm.all_reduce(&x, ReduceOp::Sum, STREAM).unwrap();
    assert!(x.read().unwrap().iter().all(|sum| *sum == 2 * life as i32 + 1));
    // More than a segment has left, so the next call commits another one.
    let room = pool.alloc::<u8>(20 << 20).unwrap();
    let (parts, part) = (pool.alloc::<i32>(2000).unwrap(), pool.alloc::<i32>(1000).unwrap());
    let gathered = comm.all_gather_into(&parts, &part, STREAM);
    assert_eq!(gathered.is_err(), fails, "{gathered:?}");
    drop((part, room));
    let (mine, theirs) = (pool.alloc::<u64>(1).unwrap(), pool.alloc::<u64>(1).unwrap());
    mine.write(&[u64::from(life + rank)]).unwrap();
    comm.send(&mine, 1 - rank, STREAM).unwrap();
    comm.recv(&theirs, 1 - rank, STREAM).unwrap();
    assert_eq!(theirs.read().unwrap(), [u64::from(life + 1 - rank)]);
    // The last of them to go takes the memory along, whichever it is.
    match life % 4 {
        0 => drop((pool, comm, x, parts, mine, theirs)),
        1 => drop((x, parts, mine, theirs, comm, pool)),
        2 => {
            x.free_unordered().unwrap();
            drop((comm, parts, pool, mine, theirs));
        }
        _ => {
            parts.free_unordered().unwrap();
            drop(x);
            if !fails {
                pool.commit().unwrap();
            }
            drop((mine, comm, theirs, pool));
        }
    }
    assert_eq!(driver.counts().leaks(), None, "life {life}");
}

#[test]
fn lives_of_a_pool_leave_nothing_behind() {
    if RankProcess::from_env().is_some() {
        return;
    }
    let lives = std::env::var("SYMMPOOL_LIVES").map_or(200_u32, |lives| lives.parse().unwrap());
    let directory = tempfile::tempdir().unwrap();
    let mut job = Job::new("rank", format!("{lives} {}", directory.path().display()), WORLD);
    job.host = Host::RankZero;
    job.limit = Duration::from_secs(120 + u64::from(lives) / 5);
    let begun = Instant::now();
    let reports = job.run();
    for report in &reports {
        assert!(report.status.success(), "{report:?}");
        assert_eq!(report.value("leaks"), "none", "rank {}", report.rank);
        println!("rank {}, before: {}", report.rank, report.value("before"));
        println!("rank {}, after:  {}", report.rank, report.value("now"));
    }
    println!("{lives} lives of {WORLD} ranks in {:?}", begun.elapsed());
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
}

#[test]
fn a_leak_is_told() {
    if RankProcess::from_env().is_some() {
        return;
    }
    let before = Holdings::now();
    // More than other tests of this program give back meanwhile.
    let kept = vec![1_u8; 1 << 20];
    let files: Vec<_> = (0..100).map(|_| fs::File::open("/proc/self/exe").unwrap()).collect();
    let leaks = Holdings::now().leaks_since(&before).unwrap();
    assert!(leaks.contains("descriptors") && leaks.contains("bytes of the heap"), "{leaks}");
    drop((kept, files));
}
