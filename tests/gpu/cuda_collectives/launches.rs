//! Checks calls that one rank cannot make, or cannot finish, as its device has no resources left: a launch, a copy or a memory
//! operation fails, or a kernel cannot be loaded. That rank gets the driver's error, and the others one that names it; no
//! later call of it is taken for what it has not done. Emulated devices alone fail when they are asked to.

use std::ffi::{c_int, c_void};
use std::mem::transmute;
use std::ptr::NonNull;
use std::time::{Duration, Instant};

use symmpool_allocator::driver::CudaDriver;
use symmpool_allocator::{Pool, Result, Stream};
use symmpool_collectives::{Communicator, CommunicatorOptions};

use crate::cuda::{CallGraph, stream};
use crate::every_kind::{CallKind, EveryKind};
use crate::{MAX_LATE, Options, expect_error};

/// Driver call that fails: `Failing` in `tests/emulator/driver.cpp`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Failing {
    Launch = 0,
    Load = 1,
    Copy = 2,
    MemoryOperation = 3,
    Create = 4,
    Mapping = 5,
}

/// First step of a rank after a capture in which its call failed.
#[derive(Clone, Copy, Debug)]
enum Then {
    Synchronizes,
    MakesTheCall,
    Drops,
}

impl Then {
    const ALL: [Self; 3] = [Self::Synchronizes, Self::MakesTheCall, Self::Drops];
}

/// An emulated device's calls, of which some may be made to fail.
#[derive(Clone, Copy)]
pub(crate) struct Emulated(unsafe extern "C" fn(c_int, c_int) -> c_int);

impl Emulated {
    pub(crate) fn find() -> Option<Self> {
        let address: NonNull<c_void> = CudaDriver::function("emulatedFail").ok()?;
        // SAFETY: the emulator's function of this name has this type.
        Some(Self(unsafe {
            transmute::<NonNull<c_void>, unsafe extern "C" fn(c_int, c_int) -> c_int>(address)
        }))
    }

    /// Makes the `nth` driver call of this kind from now on fail; none if it is 0. Returns how many there were since
    /// the last request.
    pub(crate) fn fail(self, what: Failing, nth: i32) -> i32 {
        // SAFETY: takes two numbers.
        unsafe { (self.0)(what as c_int, nth) }
    }
}

struct Launches<'a> {
    pool: &'a Pool,
    emulated: Emulated,
    stream: Stream,
    /// The communicator with which ranks wait for each other.
    meeting: Communicator,
    timeout: Duration,
    wrong: u32,
}

/// Runs the checks. Returns how many of them were wrong.
pub(crate) fn run(pool: &Pool, options: &Options, timeout: Duration) -> Result<u32> {
    let Some(emulated) = Emulated::find() else {
        if pool.rank() == 0 {
            println!("launches: skipped, as devices that are not emulated fail at no request");
        }
        return Ok(0);
    };
    let usual = CommunicatorOptions { timeout, ..options.communicator() };
    let every = EveryKind::new(pool, options, usual)?;
    let meeting = Communicator::new(pool)?;
    meeting.set_timeout(20 * timeout)?;
    let mut launches =
        Launches { pool, emulated, stream: stream(pool)?, meeting, timeout, wrong: 0 };
    for kind in every.all(true)? {
        // One kind, if it is named.
        if options.kind.as_ref().is_none_or(|name| kind.name.contains(name)) {
            launches.kind(&kind)?;
        }
    }
    Ok(launches.wrong)
}

impl Launches<'_> {
    fn kind(&mut self, kind: &CallKind<'_>) -> Result<()> {
        let began = Instant::now();
        self.not_loaded(kind)?;
        let comm = self.begin(kind)?;
        comm.set_timeout(20 * self.timeout)?;
        // Whatever is made in a first call is there then.
        kind.call(&comm, &self.stream)?;
        comm.synchronize(&self.stream)?;
        let wanted = kind.written(self.pool)?;
        let mut counts = Vec::new();
        for what in [Failing::Launch, Failing::Copy, Failing::MemoryOperation] {
            self.emulated.fail(what, 0);
            kind.call(&comm, &self.stream)?;
            let count = self.emulated.fail(what, 0);
            comm.synchronize(&self.stream)?;
            let mut some =
                if what == Failing::Launch { vec![1, 2, count] } else { vec![2.min(count)] };
            some.retain(|nth| (1..=count).contains(nth));
            some.dedup();
            for nth in &some {
                self.one_rank(kind, (what, *nth), &wanted)?;
            }
            if what == Failing::Launch && count > 1 {
                for then in Then::ALL {
                    self.in_a_capture(kind, then)?;
                }
            }
            counts.push(count);
        }
        self.all_ranks(kind, &wanted)?;
        if self.pool.rank() == 0 {
            let took = began.elapsed();
            println!("{}: {counts:?} launches, copies, memory operations, {took:.1?}", kind.name);
        }
        Ok(())
    }

    fn expect(&mut self, what: &str, right: bool) {
        if !right {
            self.wrong += 1;
            println!("rank {}: {what}", self.pool.rank());
        }
    }

    /// A communicator for calls of a kind, whose ranks begin together.
    fn begin(&self, kind: &CallKind<'_>) -> Result<Communicator> {
        let comm = Communicator::with_options(self.pool, &kind.options)?;
        kind.reset(self.pool)?;
        self.meet()?;
        Ok(comm)
    }

    fn meet(&self) -> Result<()> {
        self.meeting.barrier(&self.stream)?;
        self.meeting.synchronize(&self.stream)
    }

    /// The kernels of the first call of a kind cannot be loaded on the last rank, if any is to be loaded.
    fn not_loaded(&mut self, kind: &CallKind<'_>) -> Result<()> {
        let comm = self.begin(kind)?;
        self.emulated.fail(Failing::Load, i32::from(self.is_last()));
        let began = Instant::now();
        let called = kind.call(&comm, &self.stream);
        let loads = self.emulated.fail(Failing::Load, 0);
        // Ranks have loaded the same kernels before.
        if loads == 0 {
            return called.and_then(|()| comm.synchronize(&self.stream));
        }
        self.judge(kind, (Failing::Load, 1), (called, began), (&comm, &[]))
    }

    fn is_last(&self) -> bool {
        self.pool.rank() == self.pool.world() - 1
    }

    /// A call of which a part fails on the last rank.
    fn one_rank(
        &mut self,
        kind: &CallKind<'_>,
        (what, nth): (Failing, i32),
        wanted: &[u8],
    ) -> Result<()> {
        let comm = self.begin(kind)?;
        comm.set_timeout(20 * self.timeout)?;
        kind.poison(self.pool)?;
        self.meet()?;
        self.emulated.fail(what, if self.is_last() { nth } else { 0 });
        let began = Instant::now();
        let called = kind.call(&comm, &self.stream);
        self.emulated.fail(what, 0);
        self.judge(kind, (what, nth), (called, began), (&comm, wanted))
    }

    /// The error of such a call, and of the next one, which is the same.
    fn judge(
        &mut self,
        kind: &CallKind<'_>,
        (what, nth): (Failing, i32),
        (called, began): (Result<()>, Instant),
        (comm, wanted): (&Communicator, &[u8]),
    ) -> Result<()> {
        let last = self.pool.world() - 1;
        let name = format!("{}: {what:?} {nth} fails", kind.name);
        if self.is_last() {
            match called {
                Ok(()) => self.expect(&format!("{name}: no error"), false),
                Err(error) => {
                    let right = !error.is_diverged() && !error.is_timeout();
                    self.expect(&format!("{name}: {error}"), right);
                }
            }
        } else {
            match called.and_then(|()| comm.synchronize(&self.stream)) {
                // The last launch of a rank may be for itself alone. Then the next call says that it failed.
                Ok(()) => {
                    let right = nth > 1 && kind.written(self.pool)? == wanted;
                    self.expect(&format!("{name}: the others get no error"), right);
                }
                Err(error) => {
                    let took = began.elapsed();
                    // Also where data of the call is on its way already, and streams wait for what does not come.
                    let right = error.is_diverged() && error.ranks().contains(&last);
                    // The others may have to compile what cannot be loaded here.
                    let in_time = what == Failing::Load || took < self.timeout + MAX_LATE;
                    self.expect(&format!("{name}: after {took:?}: {error}"), right && in_time);
                }
            }
        }
        // No rank takes an equal call for the one before.
        let again = kind.call(comm, &self.stream).and_then(|()| comm.synchronize(&self.stream));
        self.expect(&format!("{name}: the next call succeeds"), again.is_err());
        self.meet()
    }

    /// A call whose second launch fails on the last rank while it is captured. The others have captured and launched theirs,
    /// and get an error as soon as the last rank does anything else, and not when their waits have ended.
    fn in_a_capture(&mut self, kind: &CallKind<'_>, then: Then) -> Result<()> {
        let comm = self.begin(kind)?;
        let name = format!("{}: launch 2 fails in a capture, {then:?}", kind.name);
        comm.set_timeout(20 * self.timeout)?;
        let stream = self.stream;
        self.emulated.fail(Failing::Launch, if self.is_last() { 2 } else { 0 });
        let graph = CallGraph::capture(self.pool, stream, || kind.call(&comm, &stream));
        self.emulated.fail(Failing::Launch, 0);
        let began = Instant::now();
        if self.is_last() {
            self.expect(&format!("{name}: a graph of a part"), graph.is_err());
            let next = match then {
                Then::Synchronizes => comm.synchronize(&stream),
                Then::MakesTheCall => kind.call(&comm, &stream),
                Then::Drops => {
                    drop(comm);
                    return self.meet();
                }
            };
            // A failure of the first launch of a second call closes nothing on this rank yet.
            let right = next.as_ref().err().is_none_or(|why| why.to_string().contains("halfway"));
            self.expect(&format!("{name}: {next:?} afterwards"), right);
        } else {
            let graph = graph?;
            graph.launch(self.pool, stream)?;
            let ended = comm.synchronize(&stream);
            graph.destroy(self.pool)?;
            let (took, last) = (began.elapsed(), self.pool.world() - 1);
            let right = ended.as_ref().is_err_and(|error| error.ranks().contains(&last));
            let in_time = took < self.timeout + MAX_LATE;
            self.expect(&format!("{name}: {ended:?} after {took:?}"), right && in_time);
        }
        self.meet()
    }

    /// All ranks decline the call alike, and the communicator stays usable.
    fn all_ranks(&mut self, kind: &CallKind<'_>, wanted: &[u8]) -> Result<()> {
        let comm = self.begin(kind)?;
        self.emulated.fail(Failing::Launch, 1);
        let called = kind.call(&comm, &self.stream);
        self.emulated.fail(Failing::Launch, 0);
        expect_error(called, "a call without resources")?;
        kind.poison(self.pool)?;
        self.meet()?;
        let next = kind.call(&comm, &self.stream).and_then(|()| comm.synchronize(&self.stream));
        let right = next.is_ok() && kind.written(self.pool)? == wanted;
        self.expect(&format!("{}: after all declined: {next:?}", kind.name), right);
        self.meet()
    }
}
