//! Registering windows with NCCL, here a fake library that records its calls.

use std::ffi::c_int;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use libloading::os::unix::{Library, RTLD_NOW, Symbol};
use symmpool_allocator::lane::{LaneConfig, WindowPolicy};
use symmpool_allocator::testing::on_each;
use symmpool_allocator::{Driver, Error, Group, Pool, Result};

const WORLD: u32 = 2;
const MIB: usize = 1 << 20;

#[repr(C)]
struct FakeNcclComm {
    rank: c_int,
    count: c_int,
    state: c_int,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct FakeNcclCall {
    rank: c_int,
    what: u8,
    address: u64,
    bytes: usize,
}

/// The fake library, loaded as a program would have loaded NCCL.
struct Fake {
    _folder: tempfile::TempDir,
    library: Library,
}

impl Fake {
    fn load() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let path: PathBuf = folder.path().join("anything.so");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/nccl/fake.c");
        let compiled = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()))
            .args(["-shared", "-fPIC", "-Wall", "-Werror", "-Wl,-soname,libnccl.so.2", "-o"])
            .arg(&path)
            .arg(source)
            .output()
            .expect("a C compiler");
        assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
        // SAFETY: loading the fake library runs no code.
        let library = unsafe { Library::open(Some(path), RTLD_NOW) }.expect("the library");
        Self { _folder: folder, library }
    }

    fn set(&self, version: c_int, mode: c_int, rank: c_int) {
        // SAFETY: the function has this type.
        let set: Symbol<extern "C" fn(c_int, c_int, c_int)> =
            unsafe { self.library.get(b"fake_set") }.expect("fake_set");
        set(version, mode, rank);
    }

    /// Calls that have not returned.
    fn held(&self) -> c_int {
        // SAFETY: the function has this type.
        let held: Symbol<extern "C" fn() -> c_int> =
            unsafe { self.library.get(b"fake_held") }.expect("fake_held");
        held()
    }

    /// The calls of a rank, in order: '+' (register) or '-' (deregister), the offset in its slot, and the length.
    fn calls(&self, pools: &[Pool], rank: u32) -> Vec<(char, u64, usize)> {
        // SAFETY: the function has this type.
        let calls: Symbol<extern "C" fn(*mut FakeNcclCall, c_int) -> c_int> =
            unsafe { self.library.get(b"fake_calls") }.expect("fake_calls");
        let mut all = vec![FakeNcclCall { rank: 0, what: 0, address: 0, bytes: 0 }; 4096];
        let made = calls(all.as_mut_ptr(), 4096);
        all.truncate(made as usize);
        let layout = pools[rank as usize].layout();
        all.iter()
            .filter(|call| call.rank == rank as c_int)
            .map(|call| {
                let (slot, offset) = layout.locate(call.address).expect("of the heap");
                assert_eq!(slot, rank, "its own memory");
                (call.what as char, offset, call.bytes)
            })
            .collect()
    }
}

fn comms() -> Vec<FakeNcclComm> {
    (0..WORLD as c_int).map(|rank| FakeNcclComm { rank, count: WORLD as c_int, state: 0 }).collect()
}

fn pools(policy: WindowPolicy) -> Vec<Pool> {
    pools_that_wait(policy, Duration::from_secs(20))
}

fn pools_that_wait(policy: WindowPolicy, timeout: Duration) -> Vec<Pool> {
    let groups = Group::in_process(WORLD).unwrap();
    thread::scope(|scope| {
        let ranks: Vec<_> = groups
            .into_iter()
            .map(|group| {
                scope.spawn(move || {
                    let seed = u64::from(group.rank());
                    Pool::builder(group.with_timeout(timeout))
                        .driver(Driver::sim(seed))
                        .lane(LaneConfig::symmetric("default").window_policy(policy))
                        .build()
                        .unwrap()
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Calls `body` for every rank's pool, on a thread each.
fn each<R: Send>(pools: &[Pool], body: impl Fn(&Pool, u32) -> R + Sync) -> Vec<R> {
    on_each(pools, |pool| body(pool, pool.rank()))
}

fn register(pools: &[Pool], comms: &[FakeNcclComm]) -> Vec<Result<u64>> {
    let addresses: Vec<usize> = comms.iter().map(|c| std::ptr::from_ref(c) as usize).collect();
    // SAFETY: communicators of the fake library, which outlive the call and the use of the pools.
    each(pools, |pool, rank| unsafe { pool.register_nccl(addresses[rank as usize]) })
}

fn unregister(pools: &[Pool], comms: &[FakeNcclComm]) -> Vec<Result<()>> {
    let addresses: Vec<usize> = comms.iter().map(|c| std::ptr::from_ref(c) as usize).collect();
    each(pools, |pool, rank| pool.unregister_nccl(addresses[rank as usize]))
}

fn all_failed<T>(outcomes: Vec<Result<T>>, is: fn(&Error) -> bool, what: &str) {
    for outcome in outcomes {
        let Err(error) = outcome else { panic!("it succeeded; {what:?} was expected") };
        assert!(is(&error) && error.to_string().contains(what), "{error}");
    }
}

// A single test, because the process has one fake library.
#[test]
fn windows_are_registered_with_nccl() {
    let fake = Fake::load();
    let per_segment = || pools(WindowPolicy::PerSegment);
    fake.set(22809, 0, -1);

    // Pools and communicators that do not fit are refused on all ranks, before NCCL is called.
    let crossing = pools(WindowPolicy::Contiguous);
    all_failed(register(&crossing, &comms()), Error::is_invalid_argument, "per-segment");
    let ready = per_segment();
    let mut other = comms();
    other[1].rank = 0;
    all_failed(register(&ready, &other), Error::is_invalid_argument, "rank 0 of 2");
    fake.set(22609, 0, -1);
    all_failed(register(&ready, &comms()), Error::is_unsupported, "2.26.9");
    fake.set(22809, 0, -1);
    all_failed(unregister(&ready, &comms()), Error::is_invalid_argument, "not given");
    // SAFETY: `register_nccl` refuses 0 before it uses it as a communicator.
    let none = each(&ready, |pool, _| unsafe { pool.register_nccl(0) });
    all_failed(none, Error::is_invalid_argument, "no NCCL communicator");
    assert_eq!(fake.calls(&ready, 0), []);

    // Present windows, later ones, and removed ones: in the same order on all ranks.
    let comms = comms();
    let first = each(&ready, |pool, _| {
        let block = pool.alloc::<u8>(40 * MIB).unwrap();
        pool.alloc::<u8>(MIB).unwrap().into_address();
        pool.commit().unwrap();
        block
    });
    let counts: Vec<u64> = register(&ready, &comms).into_iter().map(Result::unwrap).collect();
    all_failed(register(&ready, &comms), Error::is_invalid_argument, "already");
    let windows = ready[0].windows();
    let own: Vec<_> = windows.list().iter().filter(|window| window.lane == "default").collect();
    assert_eq!(counts, [own.len() as u64; 2]);
    let before = fake.calls(&ready, 0);
    assert_eq!(before.len(), own.len());
    for (call, window) in before.iter().zip(&own) {
        assert_eq!(*call, ('+', window.offset, window.bytes as usize));
    }
    each(&ready, |pool, _| {
        pool.alloc::<u8>(100 * MIB).unwrap().into_address();
        pool.commit().unwrap();
        // A commit without new windows calls nothing.
        pool.commit().unwrap();
    });
    let grown = fake.calls(&ready, 0);
    assert!(grown.len() > before.len() && grown.iter().all(|(what, ..)| *what == '+'));
    for block in first {
        block.free().unwrap();
    }
    each(&ready, |pool, _| {
        assert!(pool.default_lane().trim().unwrap() > 0);
        pool.commit().unwrap();
    });
    let trimmed = fake.calls(&ready, 0);
    assert_eq!((trimmed[grown.len()].0, trimmed[grown.len()].1), ('-', grown[0].1));
    assert_eq!(trimmed.len(), grown.len() + 1);
    unregister(&ready, &comms).into_iter().for_each(Result::unwrap);
    let ended = fake.calls(&ready, 0);
    assert_eq!(ended, fake.calls(&ready, 1), "the same on all ranks");
    assert_eq!(ended.iter().filter(|(what, ..)| *what == '-').count(), grown.len());
    each(&ready, |pool, _| {
        pool.alloc::<u8>(300 * MIB).unwrap().into_address();
        pool.commit().unwrap();
    });
    assert_eq!(fake.calls(&ready, 0).len(), ended.len(), "no communicator, no windows");

    // Success without a window is an error.
    fake.set(22809, 1, -1);
    all_failed(register(&ready, &comms), Error::is_unsupported, "no window");

    // A failure of one rank is an error on all, and the others' windows are deregistered.
    fake.set(22809, 2, 1);
    all_failed(
        register(&ready, &comms),
        |error| !error.is_timeout(),
        "a registration that must fail",
    );
    let calls = fake.calls(&ready, 0);
    let added = calls.iter().filter(|(what, ..)| *what == '+').count();
    assert!(added > 0 && calls.len() == 2 * added, "{calls:?}");

    // Non-blocking communicators.
    fake.set(23003, 3, -1);
    register(&ready, &comms).into_iter().for_each(|done| assert!(done.unwrap() > 0));

    // A failure in a commit: the commit holds, and NCCL gets no more windows.
    fake.set(23003, 2, 0);
    let grow = |pool: &Pool, _: u32| {
        pool.alloc::<u8>(600 * MIB).unwrap().into_address();
        pool.commit()
    };
    all_failed(each(&ready, grow), |error| !error.is_timeout(), "the memory is committed");
    fake.set(23003, 0, -1);
    each(&ready, |pool, _| {
        assert!(!pool.is_commit_due());
        pool.alloc::<u8>(1200 * MIB).unwrap().into_address();
        assert!(pool.commit().unwrap().windows_added > 0);
    });
    assert_eq!(fake.calls(&ready, 0), []);

    a_failure_at_a_commit_forgets_no_window(&fake);
    a_call_that_does_not_return_ends_by_the_timeout(&fake);

    // A rank that does not call: the rank that waited cannot know what it will do, so no later commit succeeds.
    let apart = pools_that_wait(WindowPolicy::PerSegment, Duration::from_millis(300));
    let address = std::ptr::from_ref(&comms[0]) as usize;
    // SAFETY: a communicator of the fake library, which outlives the pools.
    let alone = unsafe { apart[0].register_nccl(address) }.unwrap_err();
    assert!(alone.is_timeout() && alone.to_string().contains("rank 1"), "{alone}");
    let after = apart[0].commit().unwrap_err();
    assert!(after.is_timeout() && after.to_string().contains("build a new one"), "{after}");
}

/// NCCL has no deadline, but the pool has: every rank learns which rank and window NCCL holds, and nothing is unmapped
/// while it does.
fn a_call_that_does_not_return_ends_by_the_timeout(fake: &Fake) {
    let grow = |pool: &Pool, _: u32| {
        let block = pool.alloc::<u8>(40 * MIB).unwrap();
        (pool.commit(), block)
    };
    let limit = Duration::from_secs(2);
    let broken = |pools: &[Pool]| {
        for error in each(pools, |pool, _| pool.commit().unwrap_err()) {
            assert!(error.is_timeout() && error.to_string().contains("build a new one"), "{error}");
        }
    };
    let is_named = |error: &Error, call: &str| {
        let text = error.to_string();
        assert!(error.is_timeout() && error.ranks() == [1], "{error}");
        assert!(
            text.contains(call)
                && text.contains("rank 1's window")
                && text.contains("lane \"default\""),
            "{error}"
        );
    };
    let comms = comms();

    // While windows are registered: two at once, of which NCCL gets the first only.
    let stuck = pools_that_wait(WindowPolicy::PerSegment, limit);
    fake.set(22809, 0, -1);
    let blocks = each(&stuck, |pool, rank| [grow(pool, rank).1, grow(pool, rank).1]);
    fake.set(22809, 4, 1);
    let started = Instant::now();
    for outcome in register(&stuck, &comms) {
        is_named(&outcome.unwrap_err(), "ncclCommWindowRegister");
    }
    assert!(started.elapsed() < limit, "{:?}", started.elapsed());
    assert_eq!((fake.held(), fake.calls(&stuck, 1).len()), (1, 0), "no call while one is held");
    broken(&stuck);
    // Blocks that are dropped meanwhile stay mapped until NCCL returns, which is soon.
    drop((blocks, stuck));
    fake.set(22809, 0, -1);
    let returned = Instant::now();
    while fake.held() > 0 && returned.elapsed() < Duration::from_secs(20) {
        thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(fake.held(), 0);

    // In a commit, and where windows are taken back.
    let stuck = pools_that_wait(WindowPolicy::PerSegment, limit);
    register(&stuck, &comms).into_iter().for_each(|done| assert_eq!(done.unwrap(), 0));
    fake.set(22809, 4, 1);
    for (outcome, _) in each(&stuck, grow) {
        is_named(&outcome.unwrap_err(), "ncclCommWindowRegister");
    }
    broken(&stuck);
    fake.set(22809, 0, -1);
    let stuck = pools_that_wait(WindowPolicy::PerSegment, limit);
    each(&stuck, |pool, rank| grow(pool, rank).0.map(drop)).into_iter().for_each(Result::unwrap);
    register(&stuck, &comms).into_iter().for_each(|done| assert!(done.unwrap() > 0));
    fake.set(22809, 5, 1);
    for outcome in unregister(&stuck, &comms) {
        is_named(&outcome.unwrap_err(), "ncclCommWindowDeregister");
    }
    broken(&stuck);
    fake.set(22809, 0, -1);
}

/// Windows that were registered before the failure stay known, and are deregistered before their memory is
/// unmapped.
fn a_failure_at_a_commit_forgets_no_window(fake: &Fake) {
    let (pools, comms) = (pools(WindowPolicy::PerSegment), comms());
    fake.set(22809, 0, -1);
    let first = each(&pools, |pool, _| {
        let block = pool.alloc::<u8>(40 * MIB).unwrap();
        pool.commit().unwrap();
        block
    });
    let old = register(&pools, &comms).into_iter().map(Result::unwrap).max().unwrap() as usize;
    let registered = fake.calls(&pools, 1);
    assert_eq!((old, registered.len()), (1, 1));

    // Rank 0 fails. Rank 1 deregisters immediately what it registered in the same commit, and nothing else.
    fake.set(22809, 2, 0);
    let grown = each(&pools, |pool, _| {
        let block = pool.alloc::<u8>(600 * MIB).unwrap();
        let error = pool.commit().unwrap_err();
        assert!(error.to_string().contains("the memory is committed"), "{error}");
        block
    });
    assert_eq!(fake.calls(&pools, 0), []);
    let calls = fake.calls(&pools, 1);
    let (added, gone): (Vec<_>, Vec<_>) =
        calls.iter().copied().partition(|(what, ..)| *what == '+');
    assert!(!added.is_empty() && added.len() == gone.len(), "{calls:?}");
    assert!(calls.iter().all(|(_, offset, _)| *offset != registered[0].1), "{calls:?}");

    // The memory of both blocks is released. The window from before is deregistered first.
    fake.set(22809, 0, -1);
    drop((first, grown));
    each(&pools, |pool, _| {
        assert!(pool.default_lane().trim().unwrap() > 0);
        pool.commit().unwrap();
    });
    for rank in 0..WORLD {
        assert_eq!(fake.calls(&pools, rank), [('-', registered[0].1, 0)], "rank {rank}");
    }

    // The communicator gets no new windows until it is unregistered; registered again, it gets all.
    fake.set(22809, 0, -1);
    each(&pools, |pool, _| {
        pool.alloc::<u8>(MIB).unwrap().into_address();
        assert!(pool.commit().unwrap().windows_added > 0);
    });
    assert_eq!(fake.calls(&pools, 0), []);
    all_failed(register(&pools, &comms), Error::is_invalid_argument, "unregister");
    unregister(&pools, &comms).into_iter().for_each(Result::unwrap);
    assert_eq!(fake.calls(&pools, 0), []);
    let counts: Vec<u64> = register(&pools, &comms).into_iter().map(Result::unwrap).collect();
    assert_eq!(counts, [fake.calls(&pools, 0).len() as u64; 2]);
    assert!(counts[0] > 0);
    unregister(&pools, &comms).into_iter().for_each(Result::unwrap);
}
