//! Mailboxes of threads, which are ranks.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Barrier;
use std::time::Instant;

use proptest::prelude::*;

use super::state::WHOLE;
use super::*;

pub(super) const SOON: Duration = Duration::from_secs(20);

/// Connected mailboxes of `world` ranks.
pub(super) fn mailboxes(world: u32, timeout: Duration) -> Vec<Mailbox> {
    let made = |rank| Mailbox::new(rank, world, timeout, None).expect("made");
    let all: Vec<Mailbox> = (0..world).map(made).collect();
    let addresses: Vec<_> = all.iter().map(|each| each.address().expect("known")).collect();
    for each in &all {
        assert_eq!(each.connect(&addresses).expect("addresses"), None);
    }
    all
}

/// Sends bytes, which the operation keeps.
pub(super) fn send(from: &Mailbox, data: Vec<u8>, peer: u32, tag: i64) -> Result<PendingMessage> {
    let (at, count) = (data.as_ptr(), data.len());
    // SAFETY: the operation keeps the data, which nobody writes.
    unsafe { from.send((at, count, DType::U8), peer, tag, Box::new(data)) }
}

/// A receive, and where it writes.
pub(super) struct Receive {
    pub(super) operation: PendingMessage,
    data: Arc<Vec<u8>>,
}

pub(super) fn recv(to: &Mailbox, count: usize, peer: Option<u32>, tag: i64) -> Result<Receive> {
    let mut data = vec![0; count];
    let at = data.as_mut_ptr();
    let data = Arc::new(data);
    // SAFETY: the operation keeps the data, which nobody reads before it has ended.
    let operation =
        unsafe { to.recv((at, count, DType::U8), peer, tag, Box::new(Arc::clone(&data))) }?;
    Ok(Receive { operation, data })
}

impl Receive {
    pub(super) fn wait(&self) -> Result<(u32, Vec<u8>)> {
        let source = self.operation.wait(None)?;
        Ok((source, self.data.as_ref().clone()))
    }
}

pub(super) fn content(number: usize, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| (number * 31 + at * 7) as u8).collect()
}

#[test]
fn a_message_waits_for_its_receive_whatever_its_length() {
    for bytes in [0, 1, 4, 1000, WHOLE as usize, WHOLE as usize + 1, 3_000_001] {
        let all = mailboxes(3, SOON);
        let sent = send(&all[0], content(1, bytes), 2, 5).unwrap();
        assert_eq!(sent.is_done(), bytes as u64 <= WHOLE, "{bytes}");
        std::thread::scope(|scope| {
            let receiver = scope.spawn(|| recv(&all[2], bytes, Some(0), 5).unwrap().wait());
            assert_eq!(sent.wait(None).unwrap(), 2);
            assert_eq!(receiver.join().unwrap().unwrap(), (0, content(1, bytes)));
        });
    }
}

#[test]
fn messages_pass_while_both_ranks_are_elsewhere() {
    let all = mailboxes(2, SOON);
    for bytes in [10, 1 << 21] {
        let received = recv(&all[1], bytes, None, 0).unwrap();
        let sent = send(&all[0], content(3, bytes), 1, 0).unwrap();
        let since = Instant::now();
        while sent.outcome().is_none() || received.operation.outcome().is_none() {
            assert!(since.elapsed() < SOON);
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(received.wait().unwrap(), (0, content(3, bytes)));
    }
}

#[test]
fn what_nobody_receives_takes_bounded_memory() {
    let all = mailboxes(2, SOON);
    let bytes = 1 << 16;
    let sent: Vec<_> =
        (0..200).map(|number| send(&all[0], content(number, bytes), 1, 0).unwrap()).collect();
    // The receiver looks for a message that has not been sent, and takes what has.
    let last = recv(&all[1], 1, Some(0), 9).unwrap();
    for _ in 0..50 {
        assert!(!last.operation.is_done());
        for each in &sent {
            let _ = each.is_done();
        }
    }
    let done = sent.iter().filter(|each| each.is_done()).count();
    assert_eq!(done, 64, "4 MiB");
    std::thread::scope(|scope| {
        let receiver = scope.spawn(|| {
            for number in 0..200 {
                let received = recv(&all[1], bytes, Some(0), 0).unwrap().wait().unwrap();
                assert!(received == (0, content(number, bytes)), "message {number}");
            }
        });
        for each in &sent {
            each.wait(None).unwrap();
        }
        receiver.join().unwrap();
    });
    send(&all[0], vec![7], 1, 9).unwrap();
    assert_eq!(last.wait().unwrap(), (0, vec![7]));
}

#[test]
fn ends_that_differ_are_an_error_on_both() {
    for bytes in [12, 100_000] {
        let all = mailboxes(2, SOON);
        let sent = send(&all[0], content(0, bytes), 1, 4).unwrap();
        let error = recv(&all[1], bytes - 1, Some(0), 4).unwrap().wait().unwrap_err();
        let expected = format!("rank 0 sends {bytes} u8 ({bytes} bytes) to rank 1, which expects");
        assert!(error.is_diverged() && error.ranks() == [0, 1], "{error}");
        assert!(error.to_string().contains(&expected), "{error}");
        // A message that was sent whole is done before it is refused.
        let told = if bytes < 100 {
            sent.wait(None).unwrap();
            send(&all[1], vec![3], 0, 0).unwrap();
            recv(&all[0], 1, Some(1), 0).unwrap().wait()
        } else {
            sent.wait(None).map(|rank| (rank, Vec::new()))
        };
        let told = told.unwrap_err();
        assert!(told.is_diverged() && told.to_string().contains(&expected), "{told}");
        // The next ones arrive.
        send(&all[0], vec![1], 1, 4).unwrap().wait(None).unwrap();
        assert_eq!(recv(&all[1], 1, Some(0), 4).unwrap().wait().unwrap(), (0, vec![1]));
    }
}

#[test]
fn a_rank_that_ends_is_named() {
    let mut all = mailboxes(3, SOON);
    // A message that it sent before arrives.
    send(&all[2], vec![3], 0, 0).unwrap();
    let directed = recv(&all[0], 1, Some(2), 1).unwrap();
    let any = recv(&all[0], 1, None, 1).unwrap();
    let large = send(&all[0], content(0, 1 << 20), 2, 0).unwrap();
    drop(all.pop());
    for outcome in [directed.wait().map(drop), large.wait(None).map(drop)] {
        let error = outcome.unwrap_err();
        assert!(error.is_peer_lost() && error.ranks() == [2], "{error}");
        assert!(error.to_string().contains("destroyed the group"), "{error}");
    }
    assert_eq!(recv(&all[0], 1, None, 0).unwrap().wait().unwrap(), (2, vec![3]));
    let later = send(&all[0], vec![1], 2, 0).unwrap_err();
    assert!(later.is_peer_lost() && later.ranks() == [2], "{later}");
    // Rank 1 may still send what any rank may.
    send(&all[1], vec![4], 0, 1).unwrap();
    assert_eq!(any.wait().unwrap(), (1, vec![4]));
    let open = recv(&all[0], 1, Some(1), 0).unwrap();
    all[0].end();
    assert!(open.wait().unwrap_err().is_invalid_state());
    assert!(recv(&all[0], 1, Some(1), 0).err().unwrap().to_string().contains("destroyed"));
}

#[test]
fn a_rank_that_does_not_come_is_named_in_time() {
    let all = mailboxes(3, Duration::from_millis(300));
    let received = recv(&all[0], 3, Some(2), -7).unwrap();
    let error = received.operation.wait(Some(Duration::from_millis(50))).unwrap_err();
    assert!(error.is_timeout() && error.ranks() == [2], "{error}");
    assert!(error.to_string().contains("recv of 3 u8 (3 bytes), tag -7, from rank 2 on rank 0"));
    assert!(received.operation.outcome().is_none(), "a limit of the wait alone");
    let since = Instant::now();
    for error in [
        received.wait().map(drop).unwrap_err(),
        recv(&all[0], 1, None, 0).unwrap().wait().map(drop).unwrap_err(),
        send(&all[0], vec![0; 1 << 20], 1, 0).unwrap().wait(None).map(drop).unwrap_err(),
    ] {
        assert!(error.is_timeout() && !error.ranks().is_empty(), "{error}");
    }
    assert!(since.elapsed() < SOON / 4);
    // Nobody receives what was given up: not even the bytes that the receiver asks for.
    let cancelled = recv(&all[1], 1 << 20, Some(0), 0).unwrap();
    let error = cancelled.wait().map(drop).unwrap_err();
    assert!(error.is_timeout() || error.to_string().contains("given up"), "{error}");
    send(&all[2], vec![1, 2, 3], 0, -7).unwrap();
    assert_eq!(recv(&all[0], 3, Some(2), -7).unwrap().wait().unwrap(), (2, vec![1, 2, 3]));
}

#[test]
fn wrong_ranks_and_calls_too_early_are_refused() {
    assert!(Mailbox::new(2, 2, SOON, None).unwrap_err().is_invalid_argument());
    let early = Mailbox::new(0, 2, SOON, None).unwrap();
    assert!(send(&early, vec![1], 1, 0).unwrap_err().is_invalid_state());
    assert!(early.connect(&[]).unwrap_err().is_invalid_argument());
    assert!(early.connect(&[vec![1], vec![2]]).unwrap_err().is_diverged());
    let all = mailboxes(2, SOON);
    assert!(send(&all[0], vec![1], 2, 0).unwrap_err().is_invalid_argument());
    assert!(recv(&all[0], 1, Some(2), 0).err().unwrap().is_invalid_argument());
}

#[test]
fn a_rank_receives_what_it_sends_itself() {
    let all = mailboxes(2, Duration::from_millis(200));
    let me = &all[1];
    for bytes in [0, 40, 1 << 17] {
        let early = recv(me, bytes, Some(1), 3).unwrap();
        let sent = send(me, content(1, bytes), 1, 3).unwrap();
        assert_eq!((early.wait().unwrap(), sent.wait(None).unwrap()), ((1, content(1, bytes)), 1));
        let first = send(me, content(2, bytes), 1, 3).unwrap();
        assert_eq!(first.is_done(), bytes as u64 <= WHOLE);
        let other = recv(me, bytes, Some(1), 4).unwrap();
        assert_eq!(recv(me, bytes, Some(1), 3).unwrap().wait().unwrap(), (1, content(2, bytes)));
        assert_eq!(first.wait(None).unwrap(), 1);
        assert!(other.wait().unwrap_err().is_timeout());
        // Another rank's message is none of this rank's own.
        send(&all[0], content(5, bytes), 1, 4).unwrap();
        let sent = send(me, content(6, bytes), 1, 4).unwrap();
        let error = recv(me, bytes + 1, Some(1), 4).unwrap().wait().unwrap_err();
        assert!(error.is_diverged() && error.ranks() == [1], "{error}");
        assert!(bytes as u64 <= WHOLE || sent.wait(None).unwrap_err().is_diverged());
        let any = recv(me, bytes, None, 4).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !any.operation.is_done() {
                    all[0].shared.lock().unwrap().advance();
                }
            });
            assert_eq!(any.wait().unwrap(), (0, content(5, bytes)));
        });
    }
    let open =
        [recv(me, 1, Some(1), 8).unwrap().operation, send(me, vec![0; 1 << 17], 1, 7).unwrap()];
    me.end();
    open.iter().for_each(|each| assert!(each.wait(None).unwrap_err().is_invalid_state()));
}

/// One message of a random program.
#[derive(Clone, Debug)]
struct RandomMessage {
    from: u32,
    to: u32,
    tag: i64,
    bytes: usize,
    /// Whether the receiver names its sender.
    directed: bool,
    /// Where in the receiver's program its receive lies.
    place: u64,
}

fn programs(world: u32) -> impl Strategy<Value = Vec<RandomMessage>> {
    let bytes =
        prop_oneof![8 => 0_usize..300, 2 => 60_000_usize..70_000, 1 => 70_000_usize..600_000];
    let message = (0..world, 1..world, 0..3_i64, bytes, any::<bool>(), any::<u64>()).prop_map(
        move |(from, step, tag, bytes, directed, place)| {
            let to = (from + step) % world;
            // All messages of a tag that any rank may send have one length.
            let (bytes, tag) = if directed { (bytes, tag) } else { (5000, tag + 10) };
            RandomMessage { from, to, tag, bytes, directed, place }
        },
    );
    prop::collection::vec(message, 1..60)
}

/// Posts the receive of a message: of the next one from its sender, whose length the model knows.
fn post(
    mailbox: &Mailbox,
    message: &RandomMessage,
    queues: &mut BTreeMap<(u32, u32, i64), VecDeque<usize>>,
    program: &[RandomMessage],
) -> Receive {
    let RandomMessage { from, to, tag, directed, .. } = *message;
    let number = queues.get_mut(&(from, to, tag)).and_then(VecDeque::pop_front).expect("sent");
    recv(mailbox, program[number].bytes, directed.then_some(from), tag).unwrap()
}

/// The contents that were received, in the order of the receives, as a naive model has them: a queue for each sender,
/// receiver and tag.
fn run(world: u32, program: &[RandomMessage]) {
    let all = mailboxes(world, SOON);
    let mut queues: BTreeMap<(u32, u32, i64), VecDeque<usize>> = BTreeMap::new();
    for (number, message) in program.iter().enumerate() {
        let queue = queues.entry((message.from, message.to, message.tag)).or_default();
        queue.push_back(number);
    }
    let start = Barrier::new(world as usize);
    std::thread::scope(|scope| {
        for rank in 0..world {
            let (all, start, mut queues) = (&all, &start, queues.clone());
            scope.spawn(move || {
                start.wait();
                let mailbox = &all[rank as usize];
                let mut mine: Vec<&RandomMessage> =
                    program.iter().filter(|m| m.to == rank).collect();
                mine.sort_by_key(|message| message.place);
                // Half of the receives are posted before this rank sends.
                let early = mine.len() / 2;
                let mut received: Vec<(&RandomMessage, Receive)> = Vec::new();
                let mut pops = queues.clone();
                for message in &mine[..early] {
                    received.push((message, post(mailbox, message, &mut pops, program)));
                }
                let sends: Vec<PendingMessage> = program
                    .iter()
                    .enumerate()
                    .filter(|(_, message)| message.from == rank)
                    .map(|(number, m)| {
                        send(mailbox, content(number, m.bytes), m.to, m.tag).unwrap()
                    })
                    .collect();
                for message in &mine[early..] {
                    received.push((message, post(mailbox, message, &mut pops, program)));
                }
                for (message, receive) in received {
                    let (source, data) = receive.wait().unwrap();
                    assert!(!message.directed || source == message.from);
                    let queue = queues.get_mut(&(source, rank, message.tag)).expect("sent");
                    let number = queue.pop_front().expect("sent");
                    assert!(data == content(number, program[number].bytes), "message {number}");
                }
                for sent in &sends {
                    sent.wait(None).unwrap();
                }
                start.wait();
            });
        }
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn random_programs_receive_what_a_naive_model_does(program in programs(3)) {
        run(3, &program);
    }
}
