//! Tests of other messages where one was declined or cancelled.

use super::state::UNRECEIVED;
use super::tests::{SOON, content, mailboxes, recv, send};
use super::*;

/// A message of bytes that no thread moves on, and what keeps them.
fn bare(direction: Direction, peer: u32, bytes: usize) -> (Arc<BegunMessage>, Arc<Vec<u8>>) {
    let mut data = content(7, bytes);
    let at = data.as_mut_ptr();
    let data = Arc::new(data);
    let payload = Payload::new("test", 0, bytes, DType::U8).unwrap();
    let op =
        BegunMessage::new((direction, Some(peer), 0), payload, at, Box::new(Arc::clone(&data)));
    (Arc::new(op), data)
}

#[test]
fn a_refused_message_leaves_a_large_one_alone() {
    let all = mailboxes(2, SOON);
    let bytes = 30_000_000;
    send(&all[0], vec![1; 12], 1, 1).unwrap().wait(None).unwrap();
    let innocent = recv(&all[0], bytes, Some(1), 2).unwrap();
    let sent = send(&all[1], content(3, bytes), 0, 2).unwrap();
    let refused = recv(&all[1], 11, Some(0), 1).unwrap().wait().unwrap_err();
    assert!(refused.is_diverged(), "{refused}");
    std::thread::scope(|scope| {
        let sender = scope.spawn(|| sent.wait(None));
        let told = innocent.wait().unwrap_err();
        assert!(told.is_diverged(), "{told}");
        assert_eq!(sender.join().unwrap().unwrap(), 0);
    });
    // The message has arrived whole, and so do later ones.
    assert_eq!(innocent.operation.outcome().unwrap().unwrap(), 1);
    assert_eq!(innocent.wait().unwrap(), (1, content(3, bytes)));
    send(&all[0], vec![9], 1, 3).unwrap().wait(None).unwrap();
    assert_eq!(recv(&all[1], 1, Some(0), 3).unwrap().wait().unwrap(), (0, vec![9]));
}

#[test]
fn a_wait_in_vain_says_what_was_refused() {
    let all = mailboxes(2, Duration::from_millis(300));
    send(&all[0], vec![1; 12], 1, 1).unwrap().wait(None).unwrap();
    assert!(recv(&all[1], 11, Some(0), 1).unwrap().wait().unwrap_err().is_diverged());
    let told = recv(&all[0], 5, Some(1), 2).unwrap().wait().unwrap_err();
    assert!(told.is_diverged(), "{told}");
    let later = recv(&all[0], 5, Some(1), 2).unwrap().wait().unwrap_err();
    assert!(later.is_timeout(), "{later}");
}

#[test]
fn what_was_cancelled_is_not_received_in_place_of_a_later_message() {
    let all = mailboxes(2, Duration::from_millis(300));
    let bytes = 1 << 20;
    // The receiver knows of the first one before it is given up, and of the second one not.
    let first = send(&all[0], content(1, bytes), 1, 0).unwrap();
    all[1].shared.lock().unwrap().accept();
    all[1].shared.lock().unwrap().advance();
    assert!(first.wait(None).unwrap_err().is_timeout());
    assert!(send(&all[0], content(2, bytes), 1, 0).unwrap().wait(None).unwrap_err().is_timeout());
    all.iter().for_each(|each| each.set_timeout(SOON));
    let good = send(&all[0], content(3, bytes), 1, 0).unwrap();
    let received = recv(&all[1], bytes, Some(0), 0).unwrap();
    assert_eq!(received.wait().unwrap(), (0, content(3, bytes)));
    assert_eq!(good.wait(None).unwrap(), 1);
}

#[test]
fn a_receiver_that_has_asked_is_told_at_once() {
    let all = mailboxes(2, SOON);
    let bytes = 1 << 20;
    let mut sender = all[0].shared.lock().unwrap();
    let mut receiver = all[1].shared.lock().unwrap();
    let pairs: Vec<_> = (0..3)
        .map(|_| (bare(Direction::Send, 1, bytes), bare(Direction::Receive, 0, bytes)))
        .collect();
    for ((sent, _), (received, _)) in &pairs {
        sender.begin(sent).unwrap();
        receiver.begin(received).unwrap();
    }
    // The first one's bytes fill the ring; none of the others' have passed.
    receiver.accept();
    receiver.advance();
    sender.accept();
    sender.advance();
    let cancelled = &pairs[1].0.0;
    sender.cancel(cancelled, &Error::interrupted("here"));
    assert!(cancelled.outcome().unwrap().as_ref().unwrap_err().is_interrupted());
    while receiver.is_busy() || sender.is_busy() {
        assert!(receiver.advance() | sender.advance(), "stuck");
    }
    let of = |at: usize| pairs[at].1.0.outcome().unwrap().clone();
    assert!(of(0).is_ok() && of(2).is_ok());
    let error = of(1).unwrap_err();
    assert!(error.to_string().contains("rank 0 has given up"), "{error}");
}

#[test]
fn a_cancelled_message_that_is_refused_is_reported_to_nobody() {
    let all = mailboxes(2, SOON);
    let mut sender = all[0].shared.lock().unwrap();
    let mut receiver = all[1].shared.lock().unwrap();
    let ((sent, _a), (received, _b)) =
        (bare(Direction::Send, 1, 1 << 20), bare(Direction::Receive, 0, 1 << 19));
    receiver.begin(&received).unwrap();
    sender.begin(&sent).unwrap();
    sender.cancel(&sent, &Error::interrupted("here"));
    receiver.accept();
    receiver.advance();
    assert!(received.outcome().unwrap().as_ref().unwrap_err().is_diverged());
    sender.accept();
    assert!(sender.advance(), "the refusal");
    assert!(sender.report(1).is_none());
}

#[test]
fn a_peer_is_told_why_bytes_that_were_passing_ended() {
    for is_sender in [true, false] {
        let all = mailboxes(2, SOON);
        let bytes = 1 << 22;
        let mut sender = all[0].shared.lock().unwrap();
        let mut receiver = all[1].shared.lock().unwrap();
        let ((sent, _a), (received, _b)) =
            (bare(Direction::Send, 1, bytes), bare(Direction::Receive, 0, bytes));
        sender.begin(&sent).unwrap();
        receiver.begin(&received).unwrap();
        receiver.accept();
        receiver.advance();
        sender.accept();
        assert!(sender.advance() && sender.is_passing());
        receiver.advance();
        let why = Error::interrupted("here");
        let (giver, other, open) = if is_sender {
            sender.cancel(&sent, &why);
            (0, &mut receiver, &received)
        } else {
            receiver.cancel(&received, &why);
            (1, &mut sender, &sent)
        };
        other.look_at_sockets();
        let error = open.outcome().unwrap().clone().unwrap_err();
        let expected = format!("rank {giver} has given up a large message");
        assert!(error.is_peer_lost() && error.ranks() == [giver], "{error}");
        assert!(error.to_string().contains(&expected), "{error}");
        assert!(error.to_string().contains("was interrupted"), "{error}");
    }
}

#[test]
fn an_ended_mailbox_leaves_nothing_behind() {
    let mut all = mailboxes(3, SOON);
    // Who connects later finds nobody, also while the object is still there.
    all[2].end();
    let error = send(&all[1], vec![1], 2, 0).unwrap_err();
    assert!(error.is_peer_lost() && error.to_string().contains("or has destroyed"), "{error}");
    assert!(all[2].address().unwrap_err().is_invalid_state());
    // A message of a lost rank is refused, which nobody is told.
    send(&all[0], vec![1; 12], 1, 1).unwrap().wait(None).unwrap();
    all[1].shared.lock().unwrap().accept();
    all[1].shared.lock().unwrap().advance();
    all.remove(0);
    all[0].shared.lock().unwrap().look_at_sockets();
    assert!(recv(&all[0], 11, Some(0), 1).unwrap().wait().unwrap_err().is_diverged());
    assert!(!all[0].shared.lock().unwrap().is_busy());
}

#[test]
fn small_messages_that_were_cancelled_leave_their_room() {
    let all = mailboxes(2, SOON);
    let mut sender = all[0].shared.lock().unwrap();
    for _ in 0..100 {
        let (op, _held) = bare(Direction::Send, 1, 1 << 16);
        sender.begin(&op).unwrap();
        // One that the ring has no room for has not been sent.
        sender.cancel(&op, &Error::interrupted("here"));
    }
    let used = sender.peer(1).sent_whole;
    assert!(used < UNRECEIVED / 2, "{used} bytes");
}
