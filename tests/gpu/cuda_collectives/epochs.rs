//! Checks every kind of call at the numbers of calls at which old flags are overwritten, and at which the numbers begin anew,
//! with graphs that are replayed over them and eager calls in between (S2). Results have the same bits as those of first calls.

use std::time::Instant;

use symmpool_allocator::{Error, Pool, Result};
use symmpool_collectives::{Communicator, CommunicatorOptions};

use crate::Options;
use crate::cuda::{CallGraph, stream};
use crate::every_kind::{CallKind, EveryKind};
use crate::tally::Tally;

/// How many calls are made around each of the numbers.
const CALLS: u32 = 9;

pub(crate) fn run(pool: &Pool, options: &Options) -> Result<(u64, u64)> {
    let every = EveryKind::new(pool, options, options.communicator())?;
    let meeting = Communicator::new(pool)?;
    let stream = stream(pool)?;
    let mut tally = Tally::new(pool);
    for kind in every.all(false)? {
        if options.kind.as_ref().is_some_and(|name| !kind.name.contains(name)) {
            continue;
        }
        let began = Instant::now();
        let begin = |first_epoch: u32| {
            let comm = CommunicatorOptions { first_epoch, ..kind.options.clone() };
            let comm = Communicator::with_options(pool, &comm)?;
            kind.reset(pool)?;
            meeting.barrier(&stream)?;
            meeting.synchronize(&stream)?;
            Ok(comm)
        };
        let comm = begin(1)?;
        let refused = kind.call(&comm, &stream);
        comm.synchronize(&stream)?;
        if refused.as_ref().is_err_and(Error::is_unsupported) {
            // All ranks alike.
            continue;
        }
        refused?;
        let wanted = kind.written(pool)?;
        let most = options.few(3, 2) as usize;
        for first_epoch in [(1 << 30) - 4, u32::MAX - 4, (3 << 30) - 5].into_iter().take(most) {
            around(pool, &kind, (&begin(first_epoch)?, first_epoch), &wanted, &mut tally)?;
        }
        if pool.rank() == 0 {
            println!("epochs of {}: {:.1?}", kind.name, began.elapsed());
        }
    }
    let (cases, wrong) = tally.counts();
    if pool.rank() == 0 {
        println!("epochs: {cases} cases, {wrong} wrong");
    }
    Ok((cases, wrong))
}

/// Replays of two graphs in turn, with an eager call now and then. The first one's is the communicator's first call.
fn around(
    pool: &Pool,
    kind: &CallKind<'_>,
    (comm, first): (&Communicator, u32),
    wanted: &[u8],
    tally: &mut Tally,
) -> Result<()> {
    let stream = stream(pool)?;
    let one = CallGraph::capture(pool, stream, || kind.call(comm, &stream))?;
    let two = CallGraph::capture(pool, stream, || {
        kind.call(comm, &stream)?;
        kind.call(comm, &stream)
    })?;
    for nth in 0..CALLS {
        kind.poison(pool)?;
        match nth % 4 {
            1 => two.launch(pool, stream)?,
            3 => kind.call(comm, &stream)?,
            _ => one.launch(pool, stream)?,
        }
        comm.synchronize(&stream)?;
        let right = kind.written(pool)? == wanted;
        tally.expect(&format!("{} from call {first} on: launch {nth}", kind.name), right);
    }
    one.destroy(pool)?;
    two.destroy(pool)?;
    crate::cuda::destroy(pool, stream)
}
