//! Row exchanges, compared with a model that moves one row at a time. Ranks are threads; `cuda_collectives check` has
//! the same tests for devices.

mod contract;
#[path = "../pool_ranks/mod.rs"]
mod pool_ranks;

use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use symmpool_allocator::{Block, Pool, Stream};
use symmpool_collectives::{
    Communicator, DType, Element, RowExchange, RowLayout, RowShape, RowsAt,
};

const STREAM: &Stream = &Stream::DEFAULT;

/// Runs `body` as every rank.
fn ranks(world: usize, body: impl Fn(&Pool, &Communicator) + Sync) {
    pool_ranks::ranks(world as u32, |pool| body(pool, &Communicator::new(pool).unwrap()));
}

/// A call: the destinations of each rank's rows, and the capacity of each rank's output.
#[derive(Clone, Debug)]
struct Case {
    destinations: Vec<Vec<i64>>,
    capacities: Vec<usize>,
}

impl Case {
    fn world(&self) -> usize {
        self.destinations.len()
    }

    /// Whether a destination of a rank is invalid, so that it sends nothing.
    fn refused(&self, rank: usize) -> bool {
        let ranks = -1..self.world() as i64;
        self.destinations[rank].iter().any(|to| !ranks.contains(to))
    }

    /// The rows that a rank is sent, as (source, row of the source), including those without room.
    fn sent_to(&self, rank: usize) -> Vec<(usize, usize)> {
        let sources = (0..self.world()).filter(|source| !self.refused(*source));
        sources
            .flat_map(|source| {
                let rows = self.destinations[source].iter().enumerate();
                let own = rows.filter(|(_, to)| **to == rank as i64);
                own.map(move |(row, _)| (source, row)).collect::<Vec<_>>()
            })
            .collect()
    }

    /// Whether a row of a rank has arrived at its destination.
    fn arrived(&self, source: usize, row: usize) -> bool {
        let Ok(to) = usize::try_from(self.destinations[source][row]) else { return false };
        if self.refused(source) {
            return false;
        }
        let mut fitting = self.sent_to(to);
        fitting.truncate(self.capacities[to]);
        fitting.contains(&(source, row))
    }
}

fn element(source: usize, row: usize, at: usize) -> i32 {
    ((source * 1000 + row) * 100 + at) as i32 + 1
}

/// What a rank computes from an element that it received, before it sends it back.
fn processed(element: i32) -> i32 {
    -element
}

struct Rank<'a> {
    me: usize,
    row: usize,
    exchange: RowExchange<&'a Communicator>,
    input: Block<i32>,
    output: Block<i32>,
    back: Block<i32>,
    narrow: Block<i32>,
    wide: Block<i64>,
}

impl<'a> Rank<'a> {
    fn new(pool: &Pool, comm: &'a Communicator, rows: usize, row: usize) -> Self {
        let shape = RowShape { rows, row, dtype: i32::DTYPE };
        Self {
            me: pool.rank() as usize,
            row,
            exchange: RowExchange::new(comm, shape).unwrap(),
            input: pool.alloc(rows * row).unwrap(),
            output: pool.alloc(rows * row * pool.world() as usize).unwrap(),
            back: pool.alloc(rows * row).unwrap(),
            narrow: pool.alloc(rows).unwrap(),
            wide: pool.alloc(rows).unwrap(),
        }
    }

    /// Sends the rows of a case, and checks what is received and the error. Output and destinations have the lengths of
    /// the case, inside of their blocks.
    fn send(&self, case: &Case, layout: &RowLayout, wide: bool) {
        let Self { me, row, .. } = *self;
        let destinations = &case.destinations[me];
        let data = |source: usize, index: usize| (0..row).map(move |at| element(source, index, at));
        let input: Vec<i32> = (0..destinations.len()).flat_map(|index| data(me, index)).collect();
        self.input.write(&input).unwrap();
        self.output.write(&vec![7; self.output.len()]).unwrap();
        let count = destinations.len();
        let given = if wide {
            self.wide.write(destinations).unwrap();
            (self.wide.as_ptr().cast::<u8>().cast_const(), count, DType::I64)
        } else {
            let narrow: Vec<i32> = destinations.iter().map(|to| *to as i32).collect();
            self.narrow.write(&narrow).unwrap();
            (self.narrow.as_ptr().cast::<u8>().cast_const(), count, DType::I32)
        };
        let capacity = case.capacities[me];
        let rows = RowsAt {
            input: self.input.as_ptr().cast::<u8>().cast_const(),
            length: count,
            output: self.output.as_ptr().cast(),
            capacity,
        };
        let layout_at = layout.counts().cast::<u8>().cast_mut();
        // SAFETY: the blocks have these lengths; the layout begins with its counts.
        let sent = unsafe { self.exchange.send_at(layout_at, &rows, given, STREAM) };

        let refused = (0..case.world()).find(|rank| case.refused(*rank));
        let overflows =
            (0..case.world()).any(|rank| case.sent_to(rank).len() > case.capacities[rank]);
        match &sent {
            Ok(()) => assert!(refused.is_none() && !overflows),
            // A rank with invalid destinations gets its own error, the others get that of the first such rank.
            Err(error) if error.is_invalid_argument() => {
                let text = error.to_string();
                let first = refused.unwrap_or_else(|| panic!("{text}"));
                let of = if case.refused(me) { me } else { first };
                let mut row = case.destinations[of].iter();
                let bad = row.position(|to| !(-1..case.world() as i64).contains(to)).unwrap();
                let own = format!("row {bad} has destination");
                let why = if of == me { own } else { format!("splits of rank {of}") };
                assert!(text.contains(&why), "{text}");
            }
            Err(error) => assert!(error.is_overflow() && overflows, "{error}"),
        }
        let sent = case.sent_to(me);
        let fitting = &sent[..sent.len().min(capacity)];
        let mut wanted: Vec<i32> =
            fitting.iter().flat_map(|(source, index)| data(*source, *index)).collect();
        wanted.resize(self.output.len(), 7);
        assert_eq!(self.output.read().unwrap(), wanted, "rank {me}");
        let received = layout.read().unwrap();
        let counts: Vec<i64> = (0..case.world())
            .map(|rank| sent.iter().filter(|(source, _)| *source == rank).count() as i64)
            .collect();
        let begins = counts.iter().scan(0, |sum, count| {
            *sum += count;
            Some(*sum - count)
        });
        assert_eq!(received.offsets, begins.collect::<Vec<_>>());
        assert_eq!(received.counts, counts);
        let indices: Vec<i32> = sent.iter().map(|(_, index)| *index as i32).collect();
        assert_eq!(received.source_index, indices);
    }

    /// Processes the rows that were received in a case, sends them back, and checks what comes back.
    fn send_back(&self, case: &Case, layout: &RowLayout) {
        let Self { me, row, .. } = *self;
        let mut fitting = case.sent_to(me);
        fitting.truncate(case.capacities[me]);
        let data = |source: usize, index: usize| {
            (0..row).map(move |at| processed(element(source, index, at)))
        };
        let processed: Vec<i32> =
            fitting.iter().flat_map(|(source, index)| data(*source, *index)).collect();
        self.output.write(&processed).unwrap();
        self.back.write(&vec![7; self.back.len()]).unwrap();
        self.exchange.send_back(layout, &self.back, &self.output, STREAM).unwrap();
        let sent = case.destinations[me].len();
        let mut wanted: Vec<i32> = (0..sent)
            .flat_map(|index| {
                let there = case.arrived(me, index);
                data(me, index).map(move |element| if there { element } else { 0 })
            })
            .collect();
        wanted.resize(self.back.len(), 0);
        assert_eq!(self.back.read().unwrap(), wanted, "rank {me}");
    }
}

fn check(cases: &[Case], rows: usize, row: usize) {
    ranks(cases[0].world(), |pool, comm| {
        let rank = Rank::new(pool, comm, rows, row);
        let layouts = [(); 2].map(|()| rank.exchange.layout().unwrap());
        for (nth, case) in cases.iter().enumerate() {
            rank.send(case, &layouts[nth % 2], nth % 3 == 0);
            if nth % 2 == 1 {
                // The exchange before this one is sent back after this one, with its own layout.
                rank.send_back(case, &layouts[1]);
                rank.send_back(&cases[nth - 1], &layouts[0]);
            }
        }
    });
}

/// A call of `world` ranks with up to 40 rows each. A few destinations are invalid.
fn case(world: usize) -> impl Strategy<Value = Case> {
    let to = prop_oneof![8 => -1..world as i64, 3 => Just(0), 3 => Just(-1)];
    let destinations = proptest::collection::vec(to, 0..=40);
    let bad = prop_oneof![9 => Just(None), 1 => (0..world, 0usize..40, -9i64..99).prop_map(Some)];
    let capacity = prop_oneof![3 => Just(40 * world), 2 => 0usize..60];
    (
        proptest::collection::vec(destinations, world),
        bad,
        proptest::collection::vec(capacity, world),
    )
        .prop_map(|(mut destinations, bad, capacities)| {
            if let Some((rank, row, to)) = bad
                && let Some(at) = destinations[rank].get_mut(row)
            {
                *at = to;
            }
            let capacities = capacities.iter().map(|rows| *rows.min(&(40 * capacities.len())));
            Case { destinations, capacities: capacities.collect() }
        })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 25, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_rows_arrive_and_come_back(
        cases in (1usize..=4).prop_flat_map(|world| proptest::collection::vec(case(world), 6)),
        row in prop_oneof![3 => 1usize..5, 1 => Just(500usize)],
    ) {
        check(&cases, 40, row);
    }
}

#[test]
fn all_to_one_none_at_all_and_nowhere() {
    let even = |world: usize, rows: usize, to: i64| Case {
        destinations: vec![vec![to; rows]; world],
        capacities: vec![40 * world; world],
    };
    for world in [1, 3, 8] {
        let last = world as i64 - 1;
        check(
            &[even(world, 40, last), even(world, 40, -1), even(world, 0, 0), even(world, 7, 0)],
            40,
            3,
        );
    }
    // Rows that are so long that, by load balancing, senders write them, as far as there is room.
    let short = Case { capacities: vec![130; 4], ..even(4, 40, 0) };
    check(&[even(4, 40, 3), short.clone(), even(4, 40, 0), short], 40, 900);
    // An exchange of no rows.
    check(&[even(2, 0, 0), even(2, 0, 0)], 0, 3);
}

#[test]
fn output_and_input_may_be_the_same() {
    ranks(2, |pool, comm| {
        let rank = Rank::new(pool, comm, 4, 1);
        let layout = rank.exchange.layout().unwrap();
        let me = pool.rank() as i32;
        let x = pool.alloc::<i32>(4).unwrap();
        x.write(&[10, 11, 12, 13].map(|value| value + 100 * me)).unwrap();
        let destinations = pool.alloc::<i64>(4).unwrap();
        destinations.write(&[1, 0, 1, 0]).unwrap();
        rank.exchange.send(&layout, &x, &x, &destinations, STREAM).unwrap();
        let received = [[11, 13, 111, 113], [10, 12, 110, 112]];
        assert_eq!(x.read().unwrap(), received[me as usize]);
        rank.exchange.send_back(&layout, &x, &x, STREAM).unwrap();
        assert_eq!(x.read().unwrap(), [10, 11, 12, 13].map(|value| value + 100 * me));
    });
}

#[test]
fn destinations_that_change_meanwhile_send_rows_that_are_whole_or_nothing() {
    const ROWS: usize = 4096;
    ranks(2, |pool, comm| {
        let rank = Rank::new(pool, comm, ROWS, 1);
        let layout = rank.exchange.layout().unwrap();
        let me = rank.me as i32;
        rank.input.write(&(0..ROWS as i32).map(|row| 1000 * me + row).collect::<Vec<_>>()).unwrap();
        let destinations = &rank.narrow;
        destinations.write(&[0; ROWS]).unwrap();
        let (running, end) =
            (pool.alloc::<i32>(1).unwrap(), Instant::now() + Duration::from_secs(1));
        let ended = AtomicBool::new(false);
        let (mut succeeded, mut refused) = (0, 0);
        thread::scope(|scope| {
            scope.spawn(|| {
                // The thread ends even if the rank panics.
                let ending = end + Duration::from_secs(1);
                for round in 0.. {
                    if ended.load(Ordering::Relaxed) || Instant::now() > ending {
                        break;
                    }
                    for row in 0..ROWS {
                        let at = destinations.as_ptr().wrapping_add(row);
                        // SAFETY: a live, aligned element of the block.
                        let at = unsafe { AtomicI32::from_ptr(at) };
                        at.store([0, 1, -1, 1][(round + row) % 4], Ordering::Relaxed);
                    }
                    if round % 16 == 0 {
                        thread::sleep(Duration::from_millis(2));
                    }
                }
            });
            loop {
                // Rank 0 decides when the test ends.
                running.write(&[i32::from(Instant::now() < end)]).unwrap();
                comm.broadcast(&running, 0, STREAM).unwrap();
                if running.read().unwrap() == [0] {
                    break;
                }
                let sent =
                    rank.exchange.send(&layout, &rank.output, &rank.input, destinations, STREAM);
                match sent {
                    Ok(()) => succeeded += 1,
                    Err(error) => {
                        refused += 1;
                        assert!(error.is_invalid_argument(), "{error}");
                        let text = error.to_string();
                        assert!(text.contains("changed meanwhile") || text.contains("written"));
                    }
                }
                let received = layout.read().unwrap();
                let sources = (0..).zip(&received.counts);
                let sources = sources.flat_map(|(from, count)| vec![from; *count as usize]);
                let wanted: Vec<i32> = sources
                    .zip(&received.source_index)
                    .map(|(from, row)| 1000 * from + row)
                    .collect();
                assert_eq!(rank.output.read().unwrap()[..wanted.len()], wanted);
                rank.exchange.send_back(&layout, &rank.back, &rank.output, STREAM).unwrap();
            }
            ended.store(true, Ordering::Relaxed);
        });
        // Which of the two happens depends on timing; a unit test of the steps covers refusals deterministically.
        assert!(succeeded + refused > 0);
    });
}
