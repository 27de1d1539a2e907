//! One suite for all stores: ranks that meet through a store must not depend on which one it is.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use symmpool_allocator::store::tcp::TcpOptions;
use symmpool_allocator::store::{
    FileStore, Gathered, MAX_KEY, MAX_VALUE, MAX_WORLD, MemoryStore, Store, TcpServer, TcpStore,
};
use symmpool_allocator::testing::on_each;
use symmpool_allocator::{Deadline, Result};

/// Long enough for a loaded machine; only a broken test waits this long.
fn ample() -> Deadline {
    Deadline::seconds(60)
}

fn brief() -> Deadline {
    Deadline::after(Duration::from_millis(50))
}

/// A store under test: handles for as many ranks as a test wants.
trait Meeting: Sync {
    fn handle(&self) -> Box<dyn Store>;
}

struct Memory(MemoryStore);

impl Meeting for Memory {
    fn handle(&self) -> Box<dyn Store> {
        Box::new(self.0.clone())
    }
}

struct FileMeeting(tempfile::TempDir);

impl Meeting for FileMeeting {
    fn handle(&self) -> Box<dyn Store> {
        Box::new(FileStore::open(self.0.path()).unwrap())
    }
}

struct Server(TcpServer);

impl Meeting for Server {
    fn handle(&self) -> Box<dyn Store> {
        let addr: SocketAddr = self.0.local_addr();
        Box::new(TcpStore::connect(addr, TcpOptions::default(), ample()).unwrap())
    }
}

/// Runs `run` for each rank, on a thread and with a handle of its own; returns the results in rank order.
fn ranks<T: Send>(
    meeting: &dyn Meeting,
    numbers: &[u32],
    run: impl Fn(u32, &dyn Store) -> T + Sync,
) -> Vec<T> {
    on_each(numbers, |&rank| run(rank, &*meeting.handle()))
}

fn world(size: u32) -> Vec<u32> {
    (0..size).collect()
}

fn values_are_set_replaced_and_deleted(meeting: &dyn Meeting) {
    let (one, two) = (meeting.handle(), meeting.handle());
    one.set("k", b"first", ample()).unwrap();
    assert_eq!(two.get("k", ample()).unwrap(), b"first");
    two.set("k", b"2", ample()).unwrap();
    assert_eq!(one.get("k", ample()).unwrap(), b"2");
    assert!(one.delete("k", ample()).unwrap());
    assert!(!two.delete("k", ample()).unwrap());
    assert!(two.get("k", brief()).unwrap_err().is_timeout());
}

fn a_get_waits_until_its_key_is_set(meeting: &dyn Meeting) {
    let values = ranks(meeting, &world(8), |rank, store| {
        // Each waits for the next one's key, the last one starts the chain.
        if rank < 7 {
            store.get(&format!("k{}", rank + 1), ample()).unwrap();
        }
        store.set(&format!("k{rank}"), &rank.to_le_bytes(), ample()).unwrap();
        store.get("k0", ample()).unwrap()
    });
    assert!(values.iter().all(|value| value == &0u32.to_le_bytes()));
}

fn a_waiting_get_does_not_block_its_own_handle(meeting: &dyn Meeting) {
    let store: Arc<dyn Store> = meeting.handle().into();
    let getter = {
        let store = store.clone();
        std::thread::spawn(move || {
            store.set("started", b"", ample()).unwrap();
            store.get("later", ample())
        })
    };
    store.get("started", ample()).unwrap();
    store.set("later", b"x", ample()).unwrap();
    assert_eq!(getter.join().unwrap().unwrap(), b"x");
}

fn a_get_ends_at_its_deadline(meeting: &dyn Meeting) {
    let store = meeting.handle();
    let begun = Instant::now();
    let deadline = Deadline::after(Duration::from_millis(150));
    let error = store.get("никогда", deadline).unwrap_err();
    assert!(error.is_timeout());
    assert!(error.to_string().contains("никогда"), "{error}");
    assert!(error.to_string().contains("150"), "{error}");
    assert!(begun.elapsed() >= Duration::from_millis(150));
    assert!(begun.elapsed() < Duration::from_secs(30));
    // After its deadline a call still looks once.
    store.set("there", b"x", ample()).unwrap();
    assert_eq!(store.get("there", Deadline::after(Duration::ZERO)).unwrap(), b"x");
}

fn values_may_be_empty_and_large_but_not_larger(meeting: &dyn Meeting) {
    let store = meeting.handle();
    store.set("empty", b"", ample()).unwrap();
    assert_eq!(store.get("empty", ample()).unwrap(), b"");
    let mut large: Vec<u8> = (0..MAX_VALUE).map(|i| (i / 251) as u8).collect();
    store.set("large", &large, ample()).unwrap();
    assert!(store.get("large", ample()).unwrap() == large);
    large.push(0);
    assert!(store.set("large", &large, ample()).unwrap_err().is_invalid_argument());
    assert!(store.all_gather("large", 0, 1, &large, ample()).unwrap_err().is_invalid_argument());
    assert_eq!(store.get("large", ample()).unwrap().len(), MAX_VALUE);
}

fn keys_have_limits(meeting: &dyn Meeting) {
    let store = meeting.handle();
    let longest = "k".repeat(MAX_KEY);
    store.set(&longest, b"x", ample()).unwrap();
    assert_eq!(store.get(&longest, ample()).unwrap(), b"x");
    assert!(store.delete(&longest, ample()).unwrap());
    for key in [String::new(), "k".repeat(MAX_KEY + 1)] {
        assert!(store.set(&key, b"x", ample()).unwrap_err().is_invalid_argument());
        assert!(store.get(&key, ample()).unwrap_err().is_invalid_argument());
        assert!(store.add(&key, 1, ample()).unwrap_err().is_invalid_argument());
        assert!(store.delete(&key, ample()).unwrap_err().is_invalid_argument());
        assert!(store.all_gather(&key, 0, 1, b"", ample()).unwrap_err().is_invalid_argument());
    }
}

fn any_text_is_a_key_of_its_own(meeting: &dyn Meeting) {
    let store = meeting.handle();
    let long = "ы".repeat(MAX_KEY / 2);
    let keys = [
        "a",
        "A",
        "a/b",
        "a%2Fb",
        "a\\b",
        "../a",
        "..",
        ".",
        "/",
        "/etc/passwd",
        " ",
        "\0",
        "\n",
        "ключ",
        "鍵",
        "🔑",
        "é",
        "e\u{301}",
        "v-a",
        "lock",
        &long,
        &long[2..],
    ];
    for key in keys {
        store.set(key, key.as_bytes(), ample()).unwrap();
    }
    for key in keys {
        assert_eq!(store.get(key, ample()).unwrap(), key.as_bytes(), "{key:?}");
    }
}

fn additions_are_one_after_another(meeting: &dyn Meeting) {
    let sums = ranks(meeting, &world(8), |_, store| {
        (0..25).map(|_| store.add("n", 1, ample()).unwrap()).collect::<Vec<_>>()
    });
    let all: BTreeSet<i64> = sums.iter().flatten().copied().collect();
    assert_eq!(all, (1..=200).collect());
    let store = meeting.handle();
    assert_eq!(store.get("n", ample()).unwrap(), b"200");
    assert_eq!(store.add("n", -300, ample()).unwrap(), -100);
    store.set("n", b"40", ample()).unwrap();
    assert_eq!(store.add("n", 2, ample()).unwrap(), 42);
}

fn what_is_no_number_is_not_added_to(meeting: &dyn Meeting) {
    let store = meeting.handle();
    for value in [&b"x"[..], b"", b"1.5", b"\xff", b"99999999999999999999"] {
        store.set("n", value, ample()).unwrap();
        assert!(store.add("n", 1, ample()).unwrap_err().is_invalid_argument());
        assert_eq!(store.get("n", ample()).unwrap(), value);
    }
    store.set("n", i64::MAX.to_string().as_bytes(), ample()).unwrap();
    assert!(store.add("n", 1, ample()).unwrap_err().is_invalid_argument());
}

fn sixty_four_ranks_gather_in_rank_order(meeting: &dyn Meeting) {
    let results = ranks(meeting, &world(64), |rank, store| {
        let own = store.all_gather("own", rank, 64, &rank.to_le_bytes(), ample()).unwrap();
        let same = store.all_gather("same", rank, 64, &[7; 1000], ample()).unwrap();
        let third = store.all_gather("third", rank, 64, &[(rank % 3) as u8], ample()).unwrap();
        (own, same, third)
    });
    for (own, same, third) in &results {
        for rank in 0..64 {
            assert_eq!(own.part(rank), rank.to_le_bytes());
            assert_eq!(same.part(rank), [7; 1000]);
            assert_eq!(third.part(rank), [(rank % 3) as u8]);
        }
        assert_eq!((own.world(), same.world()), (64, 64));
        assert!(same.is_uniform());
        assert_eq!(third.distinct().len(), 3);
    }
}

fn gathers_follow_each_other(meeting: &dyn Meeting) {
    let results = ranks(meeting, &world(4), |rank, store| {
        (0..20u32)
            .map(|step| {
                let part = [rank.to_le_bytes(), step.to_le_bytes()].concat();
                store.all_gather(&format!("step/{step}"), rank, 4, &part, ample()).unwrap()
            })
            .collect::<Vec<Gathered>>()
    });
    for gathered in &results {
        assert_eq!(gathered, &results[0]);
    }
    assert_eq!(results[0][19].part(2), [2, 0, 0, 0, 19, 0, 0, 0]);
}

fn a_rank_alone_gathers_itself(meeting: &dyn Meeting) {
    let store = meeting.handle();
    let gathered = store.all_gather("solo", 0, 1, b"", ample()).unwrap();
    assert_eq!(gathered.parts().collect::<Vec<_>>(), [b""]);
}

fn gathers_and_values_do_not_share_names(meeting: &dyn Meeting) {
    let store = meeting.handle();
    store.set("k", b"value", ample()).unwrap();
    assert_eq!(store.all_gather("k", 0, 1, b"part", ample()).unwrap().part(0), b"part");
    assert_eq!(store.get("k", ample()).unwrap(), b"value");
}

fn a_gather_names_the_missing_and_can_be_tried_again(meeting: &dyn Meeting) {
    let errors = ranks(meeting, &[1, 4], |rank, store| {
        let deadline = Deadline::after(Duration::from_millis(700));
        store.all_gather("g", rank, 6, b"x", deadline).unwrap_err()
    });
    for error in &errors {
        assert!(error.is_timeout(), "{error}");
        // The two calls may have missed each other.
        let missing: BTreeSet<u32> = error.ranks().iter().copied().collect();
        assert!(missing.is_superset(&[0, 2, 3, 5].into()), "{error}");
        assert!(error.to_string().contains("all_gather \"g\""), "{error}");
    }
    let again = ranks(meeting, &world(6), |rank, store| {
        store.all_gather("g", rank, 6, &[rank as u8], ample()).unwrap()
    });
    assert_eq!(again[0].part(4), [4]);
}

/// All ranks of a gather that cannot succeed get the same typed error at once.
fn all_fail(results: Vec<Result<Gathered>>, with: &str) {
    for result in results {
        let error = result.unwrap_err();
        assert!(error.is_diverged(), "{error}");
        assert!(error.to_string().contains(with), "{error}");
    }
}

fn two_ranks_with_one_number_are_everyones_error(meeting: &dyn Meeting) {
    let results =
        ranks(meeting, &[0, 1, 3, 3], |rank, store| store.all_gather("g", rank, 4, b"x", ample()));
    all_fail(results, "two ranks with number 3 in all_gather \"g\"");
}

fn worlds_that_differ_are_everyones_error(meeting: &dyn Meeting) {
    let results = ranks(meeting, &world(3), |rank, store| {
        store.all_gather("g", rank, if rank == 1 { 5 } else { 4 }, b"x", ample())
    });
    all_fail(results, "the world has ");
}

fn impossible_ranks_and_worlds_are_refused(meeting: &dyn Meeting) {
    let store = meeting.handle();
    for (rank, world) in [(0, 0), (1, 1), (u32::MAX, 8), (0, MAX_WORLD + 1), (0, u32::MAX)] {
        let error = store.all_gather("g", rank, world, b"", ample()).unwrap_err();
        assert!(error.is_invalid_argument(), "{error}");
    }
}

fn traffic_is_counted_by_handle(meeting: &dyn Meeting) {
    let (one, two) = (meeting.handle(), meeting.handle());
    assert_eq!(one.traffic(), Default::default());
    one.set("key", b"value", ample()).unwrap();
    assert_eq!(one.traffic().round_trips, 1);
    assert_eq!(one.traffic().bytes_sent, 8);
    assert_eq!(one.traffic().bytes_received, 0);
    one.get("key", ample()).unwrap();
    assert_eq!(one.traffic().round_trips, 2);
    assert_eq!(one.traffic().bytes_received, 5);
    assert_eq!(two.traffic(), Default::default());
}

macro_rules! conformance {
    ($store:ident, $meeting:expr, [$($test:ident),+ $(,)?]) => {
        mod $store {
            $(#[test]
            fn $test() {
                super::$test(&$meeting);
            })+
        }
    };
}

macro_rules! all_stores {
    ($tests:tt) => {
        conformance!(memory, crate::Memory(crate::MemoryStore::new()), $tests);
        conformance!(file, crate::FileMeeting(tempfile::tempdir().unwrap()), $tests);
        conformance!(
            tcp,
            crate::Server(
                crate::TcpServer::bind("127.0.0.1:0", crate::TcpOptions::default()).unwrap()
            ),
            $tests
        );
    };
}

all_stores!([
    values_are_set_replaced_and_deleted,
    a_get_waits_until_its_key_is_set,
    a_waiting_get_does_not_block_its_own_handle,
    a_get_ends_at_its_deadline,
    values_may_be_empty_and_large_but_not_larger,
    keys_have_limits,
    any_text_is_a_key_of_its_own,
    additions_are_one_after_another,
    what_is_no_number_is_not_added_to,
    sixty_four_ranks_gather_in_rank_order,
    gathers_follow_each_other,
    a_rank_alone_gathers_itself,
    gathers_and_values_do_not_share_names,
    a_gather_names_the_missing_and_can_be_tried_again,
    two_ranks_with_one_number_are_everyones_error,
    worlds_that_differ_are_everyones_error,
    impossible_ranks_and_worlds_are_refused,
    traffic_is_counted_by_handle,
]);

/// A gather costs each rank one round trip. If all ranks publish the same, its bytes do not depend on their
/// number.
#[test]
fn a_uniform_gather_costs_the_same_in_any_world() {
    let meetings: [Box<dyn Meeting>; 2] = [
        Box::new(Memory(MemoryStore::new())),
        Box::new(Server(TcpServer::bind("127.0.0.1:0", TcpOptions::default()).unwrap())),
    ];
    for meeting in &meetings {
        for size in [2, 16, 128] {
            let traffic = ranks(&**meeting, &world(size), |rank, store| {
                store.all_gather(&format!("{size}"), rank, size, &[1; 5000], ample()).unwrap();
                store.traffic()
            });
            for one in traffic {
                assert_eq!(one.round_trips, 1);
                assert_eq!(one.bytes_received, 5000 + 8);
            }
        }
    }
}

/// A store with values only, such as one on another key-value service.
struct ValuesOnly(MemoryStore);

impl Store for ValuesOnly {
    fn set(&self, key: &str, value: &[u8], deadline: Deadline) -> Result<()> {
        self.0.set(key, value, deadline)
    }

    fn get(&self, key: &str, deadline: Deadline) -> Result<Vec<u8>> {
        self.0.get(key, deadline)
    }

    fn add(&self, key: &str, delta: i64, deadline: Deadline) -> Result<i64> {
        self.0.add(key, delta, deadline)
    }

    fn delete(&self, key: &str, deadline: Deadline) -> Result<bool> {
        self.0.delete(key, deadline)
    }
}

struct ValuesOnlyMeeting(MemoryStore);

impl Meeting for ValuesOnlyMeeting {
    fn handle(&self) -> Box<dyn Store> {
        Box::new(ValuesOnly(self.0.clone()))
    }
}

conformance!(
    default_gather,
    crate::ValuesOnlyMeeting(crate::MemoryStore::new()),
    [
        sixty_four_ranks_gather_in_rank_order,
        gathers_follow_each_other,
        a_rank_alone_gathers_itself,
        gathers_and_values_do_not_share_names,
        a_gather_names_the_missing_and_can_be_tried_again,
        impossible_ranks_and_worlds_are_refused,
    ]
);
