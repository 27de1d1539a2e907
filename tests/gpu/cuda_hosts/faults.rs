//! Faults of NCCL, which are typed errors on all ranks, within a deadline.

#![allow(unsafe_code)] // names blocks by their addresses, and calls the fake NCCL

use std::env;
use std::time::{Duration, Instant};

use libloading::os::unix::Library;
use symmpool_allocator::{Error, Result, Stream};
use symmpool_collectives::{Outers, Transfer};

use crate::HostsOptions;
use crate::job::{RankOfJob, ensure, run as run_job};

/// The rank that has the fault.
const FAULTY: usize = 1;
/// Timeout of all that waits.
const LIMIT: Duration = Duration::from_secs(4);
/// Longest time until all ranks have their error.
const MAX_FAULT: Duration = Duration::from_secs(25);

/// A fault, what `FAKE_NCCL` calls it, and how errors of all ranks are.
struct FaultCase {
    name: &'static str,
    variable: &'static str,
    is: fn(&Error) -> bool,
    says: &'static str,
}

const CASES: [FaultCase; 8] = [
    FaultCase {
        name: "versions_differ",
        variable: "version=22703",
        is: |error| error.is_diverged() && error.ranks() == [0, 1],
        says: "has NCCL 2.28.9, and rank 1 (host",
    },
    FaultCase {
        name: "too_old",
        variable: "version=21203",
        is: |error| error.is_unsupported() && error.ranks() == [1],
        says: "NCCL 2.12.3",
    },
    FaultCase {
        name: "lacks_a_function",
        variable: "",
        is: |error| error.is_unsupported() && error.ranks() == [1],
        says: "has no function ncclBroadcast",
    },
    FaultCase {
        name: "init_never_ends",
        variable: "init=hangs",
        is: Error::is_timeout,
        says: "for NCCL to connect the ranks",
    },
    FaultCase {
        name: "init_blocks",
        variable: "init=blocks",
        is: Error::is_timeout,
        // The rank that it blocks names another function than those that wait for it.
        says: "timed out after 4.0s for",
    },
    FaultCase {
        name: "a_transfer_fails",
        variable: "transfer=fails",
        is: is_of_nccl,
        says: "NCCL error",
    },
    FaultCase {
        name: "a_transfer_never_ends",
        variable: "transfer=hangs",
        is: is_of_nccl,
        says: "",
    },
    FaultCase {
        name: "an_abort_blocks",
        variable: "transfer=hangs,abort=blocks",
        is: is_of_nccl,
        says: "",
    },
];

/// Whether a transfer took too long, or NCCL said that it failed.
fn is_of_nccl(error: &Error) -> bool {
    error.is_timeout() || error.to_string().contains("NCCL error")
}

/// Has each fault happen on one rank.
pub(crate) fn check(options: &HostsOptions) -> bool {
    let older = env::var("LD_LIBRARY_PATH").map(|path| {
        let first = path.split(':').next().unwrap_or_default();
        format!("{first}/older:{path}")
    });
    let mut passed = true;
    for case in &CASES {
        let variables = |rank: usize| match (rank == FAULTY, case.variable, &older) {
            (false, ..) => Vec::new(),
            (true, "", Ok(path)) => vec![("LD_LIBRARY_PATH", path.clone())],
            (true, fault, _) => vec![("FAKE_NCCL", fault.to_owned())],
        };
        passed &= run_job(options, &format!("fault:{}", case.name), variables);
    }
    passed
}

/// A rank's part in a fault.
pub(crate) fn run(rank: &RankOfJob, name: &str) -> Result<()> {
    let case = CASES.iter().find(|case| case.name == name);
    let case = case.ok_or_else(|| Error::invalid_argument(format!("no fault {name}")))?;
    let pool = rank.pool()?;
    // All ranks begin at once.
    pool.commit()?;
    let began = Instant::now();
    let is_late = |error: &Error| {
        ensure(began.elapsed() < MAX_FAULT, || {
            format!("{:?} until rank {} had: {error}", began.elapsed(), rank.rank)
        })
    };
    let is_as_said = |error: &Error| {
        println!("rank {}: {error}", rank.rank);
        is_late(error)?;
        ensure((case.is)(error) && error.to_string().contains(case.says), || {
            format!("another error was expected than: {error}")
        })
    };
    let made = Outers::nccl(&pool, LIMIT);
    let Outers { mut rail, mut flat } = match made {
        Ok(_) if !case.variable.contains("transfer") => {
            return Err(Error::invalid_state("the engines were made in spite of the fault"));
        }
        Ok(outers) => outers,
        Err(error) => return is_as_said(&error),
    };
    // SAFETY: the library is loaded already, so no code of it runs here.
    let library = unsafe { Library::new("libnccl.so.2") };
    let library = library.map_err(|error| Error::system("opening NCCL again", error))?;
    // SAFETY: the fake library's function of this name takes nothing.
    let faults = unsafe { library.get::<extern "C" fn()>(b"fakeNcclFaults") };
    faults.map_err(|error| Error::system("NCCL is not the one of tests/emulator", error))?();
    let (from, to) = (pool.alloc::<u8>(64)?, pool.alloc::<u8>(64 * rank.world())?);
    let gather = |outer: &mut Box<dyn symmpool_collectives::Outer>| {
        outer.set_timeout(LIMIT);
        let transfer = Transfer::AllGather { output: to.as_ptr(), input: from.as_ptr(), bytes: 64 };
        // SAFETY: both blocks have room for it, and live until the engines have ended.
        let ticket = unsafe { outer.begin(transfer, &Stream::DEFAULT) }?;
        outer.finish(ticket, &Stream::DEFAULT)
    };
    // Both engines have a transfer under way when it fails, if that takes so long.
    let began_both = gather(&mut flat).and_then(|()| rail.as_mut().map_or(Ok(()), gather));
    let error = loop {
        match (flat.failure(), &began_both) {
            (Some(why), _) => break why,
            (None, Err(why)) => break why.clone(),
            (None, Ok(())) => std::thread::sleep(Duration::from_millis(20)),
        }
        ensure(began.elapsed() < MAX_FAULT, || "no failure was seen".to_owned())?;
    };
    is_as_said(&error)?;
    let ended = rail.as_mut().map_or(Ok(()), |rail| rail.abort()).and(flat.abort());
    let blocks = case.variable.contains("abort=blocks") && rank.rank as usize == FAULTY;
    ensure(ended.is_err() == blocks, || format!("the abort: {ended:?}"))?;
    is_late(&error)?;
    let again = gather(&mut flat);
    ensure(again.is_err(), || "a transfer was begun behind the abort".to_owned())?;
    if blocks {
        // NCCL still has the streams: the process ends as a program would that cannot wait.
        std::process::exit(0);
    }
    drop((rail, flat));
    is_late(&error)
}
