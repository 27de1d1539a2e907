//! Groups that are made one after another on the same port.

use std::net::TcpListener;
use std::time::Duration;

use symmpool_allocator::testing::on_each;
use symmpool_allocator::{Deadline, Driver, Group, Pool};

/// A port of a loopback address that no other test uses, so that nobody else takes the port meanwhile.
fn address(host: &str) -> String {
    TcpListener::bind((host, 0)).unwrap().local_addr().unwrap().to_string()
}

fn ample() -> Deadline {
    Deadline::seconds(60)
}

#[test]
fn ranks_that_are_fast_wait_for_the_server_of_the_next_group() {
    let address = address("127.0.0.21");
    on_each(0..3, |rank| {
        for round in 0..5u8 {
            let group = Group::over_tcp(rank, 3, &address, None, ample()).unwrap();
            let all = group.all_gather("round", &[round], ample()).unwrap();
            assert!(all.parts().all(|part| part == [round]));
            if rank == 0 {
                // Meanwhile the others connect for the next group.
                std::thread::sleep(Duration::from_millis(50));
            }
        }
    });
}

#[test]
fn pools_of_groups_made_anew_at_once_find_all_ranks() {
    let address = address("127.0.0.22");
    on_each(0..4, |rank| {
        for round in 0..40 {
            let make = || {
                let group = Group::over_tcp(rank, 4, &address, None, ample())?;
                let pool = Pool::builder(group).driver(Driver::sim(1)).stride(1 << 32).build()?;
                pool.commit()
            };
            make().unwrap_or_else(|error| panic!("round {round}, rank {rank}: {error}"));
        }
    });
}

#[test]
fn a_group_whose_rank_failed_is_made_anew() {
    let address = address("127.0.0.23");
    on_each(0..3, |rank| {
        for round in 0..4 {
            let group = Group::over_tcp(rank, 3, &address, None, ample()).unwrap();
            group.all_gather("begin", b"", ample()).unwrap();
            if rank == 1 && round < 3 {
                // This rank fails alone, and immediately makes the next group.
                continue;
            }
            let end = group.all_gather("end", b"", ample());
            if round < 3 {
                let error = end.unwrap_err();
                // Rank 0 may notice it first, and leave with the store.
                assert!(error.is_peer_lost() && matches!(error.ranks(), [0 | 1]), "{error}");
            } else {
                end.unwrap();
            }
        }
    });
}

#[test]
fn replies_are_sent_before_the_server_ends() {
    let address = address("127.0.0.24");
    let value = vec![7; 12 << 20];
    on_each(0..3, |rank| {
        let group = Group::over_tcp(rank, 3, &address, None, ample()).unwrap();
        let mine = [&value[..], &[rank as u8]].concat();
        let all = group.all_gather("much", &mine, ample()).unwrap();
        assert_eq!(all.part(2).last(), Some(&2));
    });
}

#[test]
fn a_rank_that_cannot_join_again_learns_why() {
    let address = address("127.0.0.25");
    let zero = Group::over_tcp(0, 2, &address, None, ample()).unwrap();
    let one = Group::over_tcp(1, 2, &address, None, ample()).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| zero.all_gather("all", b"", ample()).unwrap());
        one.all_gather("all", b"", ample()).unwrap();
    });
    drop(one);
    let soon = Deadline::after(Duration::from_millis(100));
    let error = Group::over_tcp(1, 2, &address, None, soon).unwrap_err();
    assert!(error.is_timeout() && error.ranks() == [0], "{error}");
    assert!(error.to_string().contains("rank 1 has left the group that is served"), "{error}");
}
