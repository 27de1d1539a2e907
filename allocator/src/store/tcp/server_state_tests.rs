//! The server's decisions, without sockets.

use super::*;

const LIMIT: usize = 1 << 20;

struct StateBench {
    state: ServerState,
    meter: Meter,
}

impl StateBench {
    fn new(clients: u64) -> Self {
        let meter = Meter::new(LIMIT);
        let mut state = ServerState::new(meter.clone());
        for client in 0..clients {
            state.connect(client, None).unwrap();
        }
        Self { state, meter }
    }

    fn declared(ranks: u32) -> Self {
        let mut bench = Self::new(0);
        for rank in 0..ranks {
            bench.declare(u64::from(rank), rank, 0).unwrap();
        }
        bench
    }

    fn declare(&mut self, client: Client, rank: u32, session: u8) -> Result<()> {
        match self.connect(client, rank, session)? {
            Admission::Granted => Ok(()),
            Admission::Later(why) => panic!("not admitted yet: {why}"),
        }
    }

    fn connect(&mut self, client: Client, rank: u32, session: u8) -> Result<Admission> {
        self.state.connect(client, Some(Identity { rank, session: [session; 16] }))
    }

    fn ask(
        &mut self,
        client: Client,
        request: StoreRequest,
        value: &[u8],
    ) -> Vec<(Client, ToClient)> {
        let tail =
            self.meter.charge(value.len()).map(|room| MeteredPayload::new(value.to_vec(), room));
        self.state.request(client, request, tail);
        self.replies()
    }

    fn gather(&mut self, client: Client, rank: u32, world: u32) -> Vec<(Client, ToClient)> {
        let request = StoreRequest::AllGather { key: "g".into(), rank, world, wait_ms: 1000 };
        self.ask(client, request, b"part")
    }

    fn replies(&mut self) -> Vec<(Client, ToClient)> {
        let decode = |frame: &Frame| wire::decode(&frame.head.as_ref()[wire::HEADER..]).unwrap();
        self.state.take_replies().iter().map(|(client, frame)| (*client, decode(frame))).collect()
    }
}

fn error(reply: &(Client, ToClient)) -> Error {
    match &reply.1 {
        ToClient::Failed(kind) => Error::from_kind(kind.clone()),
        other => panic!("not an error: {other:?}"),
    }
}

#[test]
fn a_set_answers_those_who_wait_for_the_key() {
    let mut bench = StateBench::new(3);
    let get = || StoreRequest::Get { key: "k".into(), wait_ms: 9 };
    assert_eq!(bench.ask(0, get(), b""), []);
    assert_eq!(bench.ask(1, get(), b""), []);
    assert!(bench.state.is_waiting(1));
    let replies = bench.ask(2, StoreRequest::Set { key: "k".into() }, b"v");
    assert_eq!(replies, [(0, ToClient::Value), (1, ToClient::Value), (2, ToClient::Done)]);
    assert!(!bench.state.is_waiting(1));
    assert_eq!(bench.state.entries(), (1, 0, 0));
    let delete = || StoreRequest::Delete { key: "k".into() };
    assert_eq!(bench.ask(0, delete(), b""), [(0, ToClient::Deleted(true))]);
    assert_eq!(bench.ask(0, delete(), b""), [(0, ToClient::Deleted(false))]);
    assert_eq!(bench.meter.held(), 0);
}

#[test]
fn a_set_answers_nobody_who_has_stopped_waiting() {
    // It would be taken for the answer to the client's next request.
    let mut bench = StateBench::new(3);
    for client in [0, 1] {
        assert_eq!(bench.ask(client, StoreRequest::Get { key: "k".into(), wait_ms: 9 }, b""), []);
    }
    bench.state.expire(0);
    assert!(error(&bench.replies()[0]).is_timeout());
    bench.state.disconnect(1);
    assert_eq!(bench.state.entries(), (0, 0, 0));
    let replies = bench.ask(2, StoreRequest::Set { key: "k".into() }, b"v");
    assert_eq!(replies, [(2, ToClient::Done)]);
}

#[test]
fn a_gather_is_answered_once_all_are_there_and_forgotten() {
    let mut bench = StateBench::new(3);
    assert_eq!(bench.gather(1, 1, 3), []);
    assert_eq!(bench.gather(2, 2, 3), []);
    let replies = bench.gather(0, 0, 3);
    let reply = ToClient::Gathered { lengths: vec![4], runs: vec![(0, 3)] };
    assert_eq!(replies, [(0, reply.clone()), (1, reply.clone()), (2, reply)]);
    assert_eq!(bench.state.entries(), (0, 0, 0));
    assert_eq!(bench.meter.held(), 0);
}

#[test]
fn a_timeout_names_the_missing_and_takes_the_part_back() {
    let mut bench = StateBench::new(2);
    bench.gather(0, 0, 3);
    bench.state.expire(0);
    let replies = bench.replies();
    assert!(error(&replies[0]).is_timeout());
    assert_eq!(error(&replies[0]).ranks(), [1, 2]);
    assert_eq!(bench.state.entries(), (0, 0, 0));
    assert_eq!(bench.meter.held(), 0);
    bench.state.expire(0);
    assert_eq!(bench.replies(), []);
}

#[test]
fn two_ranks_with_one_number_fail_the_gather_for_all() {
    let mut bench = StateBench::new(4);
    bench.gather(0, 0, 4);
    bench.gather(1, 1, 4);
    let replies = bench.gather(2, 1, 4);
    assert_eq!(replies.iter().map(|reply| reply.0).collect::<Vec<_>>(), [0, 1, 2]);
    for reply in &replies {
        assert!(error(reply).to_string().contains("two ranks with number 1"));
    }
    let replies = bench.gather(3, 3, 4);
    assert!(error(&replies[0]).to_string().contains("two ranks with number 1"));
    assert_eq!(bench.state.entries(), (0, 0, 0));
    assert_eq!(bench.meter.held(), 0);
}

#[test]
fn a_lost_rank_fails_what_needs_it_and_nothing_else() {
    let mut bench = StateBench::declared(3);
    bench.state.connect(9, None).unwrap();
    // A gather among clients that declared nothing, with other numbers.
    let other = StoreRequest::AllGather { key: "other".into(), rank: 0, world: 3, wait_ms: 9 };
    assert_eq!(bench.ask(9, other, b""), []);
    // Rank 2 contributed to "g" before it went; rank 0 waits in "later", which needs it.
    assert_eq!(bench.gather(2, 2, 3), []);
    let later = |rank| StoreRequest::AllGather { key: "later".into(), rank, world: 3, wait_ms: 9 };
    assert_eq!(bench.ask(0, later(0), b""), []);
    bench.state.disconnect(2);
    let replies = bench.replies();
    assert_eq!(replies.len(), 1);
    assert_eq!(replies[0].0, 0);
    assert!(error(&replies[0]).is_peer_lost());
    assert_eq!(error(&replies[0]).ranks(), [2]);
    // "g" has its part and completes.
    assert_eq!(bench.gather(0, 0, 3), []);
    assert_eq!(bench.gather(1, 1, 3).len(), 2);
    // A later gather fails at once, until the rank is back.
    assert_eq!(error(&bench.ask(1, later(1), b"")[0]).ranks(), [2]);
    bench.declare(12, 2, 7).unwrap();
    assert_eq!(bench.ask(1, later(1), b""), []);
    assert!(bench.state.is_waiting(9));
}

#[test]
fn a_rank_that_is_back_fails_nothing_more_and_what_is_under_way_goes_on() {
    let mut bench = StateBench::declared(3);
    for client in 7..9 {
        bench.state.connect(client, None).unwrap();
    }
    // Clients that declared no rank are not affected.
    let other = |rank| StoreRequest::AllGather { key: "other".into(), rank, world: 2, wait_ms: 9 };
    assert_eq!(bench.ask(7, other(0), b""), []);
    assert_eq!(bench.gather(0, 0, 3), []);
    bench.state.disconnect(2);
    assert_eq!(error(&bench.replies()[0]).ranks(), [2]);
    // Rank 1 has not received the failure, and need not any more.
    bench.declare(12, 2, 7).unwrap();
    assert_eq!(bench.gather(1, 1, 3), []);
    assert_eq!(bench.gather(0, 0, 3), []);
    assert_eq!(bench.gather(12, 2, 3).len(), 3);
    assert_eq!(bench.ask(8, other(1), b"").len(), 2);
    assert_eq!(bench.state.entries(), (0, 0, 0));
}

#[test]
fn ranks_that_leave_because_another_is_lost_are_not_lost() {
    let mut bench = StateBench::declared(4);
    assert_eq!(bench.gather(1, 1, 4), []);
    bench.state.disconnect(0);
    assert_eq!(error(&bench.replies()[0]).ranks(), [0]);
    // Rank 1 leaves with its error before the others come.
    bench.state.disconnect(1);
    assert_eq!(error(&bench.gather(2, 2, 4)[0]).ranks(), [0]);
    bench.state.disconnect(2);
    assert_eq!(error(&bench.gather(3, 3, 4)[0]).ranks(), [0]);
    assert_eq!(bench.state.entries(), (0, 0, 0));
    assert_eq!(bench.meter.held(), 0);
}

#[test]
fn ranks_that_leave_because_another_is_silent_are_not_lost() {
    let mut bench = StateBench::declared(3);
    assert_eq!(bench.gather(1, 1, 3), []);
    assert_eq!(bench.gather(2, 2, 3), []);
    bench.state.expire(1);
    assert_eq!(error(&bench.replies()[0]).ranks(), [0]);
    bench.state.disconnect(1);
    assert_eq!(bench.replies(), [], "rank 2 still waits for rank 0");
    bench.state.expire(2);
    assert_eq!(error(&bench.replies()[0]).ranks(), [0]);
    assert_eq!(bench.state.entries(), (0, 0, 0));
}

#[test]
fn a_rank_is_lost_with_its_last_connection() {
    let mut bench = StateBench::declared(2);
    bench.declare(5, 1, 0).unwrap();
    assert!(bench.declare(6, 1, 1).unwrap_err().is_refused());
    assert_eq!(bench.gather(0, 0, 2), []);
    bench.state.disconnect(1);
    assert_eq!(bench.replies(), []);
    bench.state.disconnect(5);
    assert_eq!(error(&bench.replies()[0]).ranks(), [1]);
}

#[test]
fn a_declared_client_speaks_for_its_own_rank_only() {
    let mut bench = StateBench::declared(2);
    assert!(error(&bench.gather(0, 1, 2)[0]).is_invalid_argument());
    assert_eq!(bench.state.entries(), (0, 0, 0));
}

#[test]
fn worlds_and_ranks_that_cannot_be_are_refused() {
    let mut bench = StateBench::new(1);
    for (rank, world) in [(0, 0), (0, u32::MAX), (3, 3), (u32::MAX, 4)] {
        assert!(error(&bench.gather(0, rank, world)[0]).is_invalid_argument());
    }
    assert!(bench.declare(1, u32::MAX, 0).unwrap_err().is_invalid_argument());
    assert_eq!(bench.meter.held(), 0);
}

#[test]
fn no_room_is_an_error_that_changes_nothing() {
    let mut bench = StateBench::new(2);
    let set = |key: &str| StoreRequest::Set { key: key.into() };
    bench.ask(0, set("a"), &[1; LIMIT - 1000]);
    assert!(error(&bench.ask(0, set("b"), &[0; 2000])[0]).is_out_of_memory());
    assert!(error(&bench.ask(0, set("a"), &[0; 2000])[0]).is_out_of_memory());
    assert_eq!(bench.state.values["a"].value.as_ref(), [1; LIMIT - 1000]);
    // A part without room fails the gather for who waits in it.
    bench.gather(0, 0, 2);
    let request = StoreRequest::AllGather { key: "g".into(), rank: 1, world: 2, wait_ms: 9 };
    let replies = bench.ask(1, request, &[0; 2000]);
    assert_eq!(replies.len(), 2);
    assert!(replies.iter().all(|reply| error(reply).is_out_of_memory()));
    bench.ask(0, StoreRequest::Delete { key: "a".into() }, b"");
    assert_eq!(bench.meter.held(), 0);
}

#[test]
fn counters_count_and_refuse_what_is_no_number() {
    let mut bench = StateBench::new(1);
    let add = |delta| StoreRequest::Add { key: "n".into(), delta };
    assert_eq!(bench.ask(0, add(5), b""), [(0, ToClient::Sum(5))]);
    assert_eq!(bench.ask(0, add(-7), b""), [(0, ToClient::Sum(-2))]);
    assert!(error(&bench.ask(0, add(i64::MIN), b"")[0]).is_invalid_argument());
    bench.ask(0, StoreRequest::Set { key: "n".into() }, b"x");
    assert!(error(&bench.ask(0, add(1), b"")[0]).is_invalid_argument());
}

#[test]
fn a_rank_that_has_left_a_group_does_not_come_back_to_its_store() {
    let mut bench = StateBench::new(0);
    bench.state = ServerState::new(bench.meter.clone()).for_one_group();
    (0..2).for_each(|rank| bench.declare(u64::from(rank), rank, 0).unwrap());
    // Before ranks have met, another client may take the place of one that left.
    bench.state.disconnect(1);
    bench.declare(11, 1, 1).unwrap();
    bench.gather(0, 0, 2);
    assert_eq!(bench.gather(11, 1, 2).len(), 2);
    // A client that lost its connection may come back.
    bench.state.disconnect(11);
    bench.declare(12, 1, 1).unwrap();
    bench.state.disconnect(12);
    let Admission::Later(why) = bench.connect(13, 1, 2).unwrap() else { panic!("admitted") };
    assert!(why.contains("rank 1 has left the group"), "{why}");
    // It does not affect clients that are still connected.
    assert_eq!(error(&bench.gather(0, 0, 2)[0]).ranks(), [1]);
    // A rank that has not connected before may still come.
    bench.declare(14, 2, 0).unwrap();
}

#[test]
fn a_cancelled_wait_names_who_is_missing_and_takes_its_part_back() {
    let mut bench = StateBench::declared(3);
    assert_eq!(bench.gather(0, 0, 3), []);
    assert_eq!(bench.gather(1, 1, 3), []);
    bench.state.cancel(0);
    assert_eq!(bench.replies(), [(0, ToClient::Cancelled { missing: vec![2] })]);
    // There is nothing to cancel any more, and nobody gets a reply.
    bench.state.cancel(0);
    assert_eq!(bench.gather(2, 2, 3), [], "rank 0 is not in it");
    assert_eq!(bench.gather(0, 0, 3).len(), 3);
    let get = StoreRequest::Get { key: "k".into(), wait_ms: 9 };
    assert_eq!(bench.ask(1, get, b""), []);
    bench.state.cancel(1);
    assert_eq!(bench.replies(), [(1, ToClient::Cancelled { missing: vec![] })]);
    assert_eq!(bench.state.entries(), (0, 0, 0));
    assert_eq!(bench.meter.held(), 0);
}

/// The shortest time of several runs of `run`.
fn shortest(run: impl Fn() -> std::time::Duration) -> std::time::Duration {
    (0..5).map(|_| run()).min().unwrap()
}

/// How long this thread has run: other programs on the machine take no part of it.
fn thread_time() -> std::time::Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    std::time::Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

#[test]
fn a_rank_costs_a_gather_as_much_in_a_large_world_as_in_a_small_one() {
    let gathers = |world: u32| {
        shortest(|| {
            let mut bench = StateBench::declared(world);
            let begun = thread_time();
            for rank in 0..world {
                bench.gather(rank.into(), rank, world);
            }
            thread_time() - begun
        })
    };
    let gives_up = |world: u32| {
        shortest(|| {
            let mut bench = StateBench::declared(world);
            for rank in 1..world {
                let request =
                    StoreRequest::AllGather { key: "g".into(), rank, world, wait_ms: 1000 };
                bench.ask(rank.into(), request, &rank.to_le_bytes());
            }
            let begun = thread_time();
            for rank in 1..world {
                bench.state.expire(rank.into());
                assert_eq!(error(&bench.replies()[0]).ranks(), [0]);
            }
            thread_time() - begun
        })
    };
    let (few, many) = (gathers(256), gathers(4096));
    println!("256 ranks gather in {few:?}, 4096 in {many:?}");
    let (few_left, many_left) = (gives_up(256), gives_up(4096));
    println!("255 ranks give up in {few_left:?}, 4095 in {many_left:?}");
    // Sixteen times as many ranks take 16 times as long, and a little more for sorting; not 256 times.
    assert!(many < few * 64, "{few:?} and {many:?}");
    // Each rank that gives up looks for the missing ones, which is one pass over all others: 256 times as long, not 4,096.
    assert!(many_left < few_left * 1024, "{few_left:?} and {many_left:?}");
}

#[test]
fn the_rank_that_left_first_is_announced_until_it_is_back() {
    let mut bench = StateBench::declared(4);
    assert_eq!(bench.state.news(), None);
    bench.state.disconnect(2);
    assert_eq!(bench.state.news(), Some(Some(2)));
    bench.state.disconnect(1);
    assert_eq!((bench.state.news(), bench.state.first_left()), (None, Some(2)));
    bench.declare(12, 2, 1).unwrap();
    assert_eq!(bench.state.news(), Some(Some(1)));
    bench.declare(11, 1, 1).unwrap();
    assert_eq!((bench.state.news(), bench.state.news()), (Some(None), None));
}

#[test]
fn ranks_of_a_gather_count_where_their_parts_are_empty() {
    // Equal parts are held once, so memory grows with the ranks that came, which a client can make up.
    let mut bench = StateBench::new(1);
    let before = bench.meter.held();
    let mut came = 0;
    loop {
        let key = format!("g{}", came / 1000);
        let request = StoreRequest::AllGather { key, rank: came % 1000, world: 1001, wait_ms: 9 };
        let replies = bench.ask(0, request, b"");
        if !replies.is_empty() {
            assert!(error(&replies[0]).is_out_of_memory());
            break;
        }
        // Its part stays, and it comes again.
        bench.state.disconnect(0);
        bench.state.connect(0, None).unwrap();
        came += 1;
        assert!(came < 100_000, "{} bytes are counted", bench.meter.held() - before);
    }
    assert!(came > 10_000, "{came}");
}

#[test]
fn a_rank_that_comes_and_goes_counts_once() {
    let mut bench = StateBench::new(1);
    assert_eq!(bench.gather(0, 0, 3), []);
    let held = bench.meter.held();
    for _ in 0..1000 {
        bench.state.expire(0);
        bench.replies();
        assert_eq!(bench.gather(0, 0, 3), []);
        assert!(bench.meter.held() <= held + 64);
    }
}
