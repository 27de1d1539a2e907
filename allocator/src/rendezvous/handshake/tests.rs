//! Ranks that meet, and every way in which they do not.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use super::*;
use crate::driver::{FaultAction, FaultDriver, FaultPlan};
use crate::testing::on_ranks;

const OPTIONS: HandshakeOptions = HandshakeOptions { allow_shared_device: false };

fn meet(group: &Group, driver: &Driver) -> Result<Peers> {
    meet_by(group, Ok(terms(driver)), Deadline::seconds(60))
}

fn meet_by(group: &Group, terms: Result<HandshakeConfig<'_>>, deadline: Deadline) -> Result<Peers> {
    handshake(group, terms, |_| Ok(()), deadline).map(|(peers, ())| peers)
}

fn terms(driver: &Driver) -> HandshakeConfig<'_> {
    HandshakeConfig {
        driver,
        config_hash: [1; 32],
        config_text: "stride = 1 TiB",
        options: OPTIONS,
        first_on_device: true,
    }
}

fn with_fault(step: Step, action: FaultAction) -> Driver {
    let plan = FaultPlan::new().at_step(step, 1, action);
    Driver::new(FaultDriver::new(Driver::host().unwrap(), plan))
}

#[test]
fn ranks_meet_and_can_hand_over_descriptors() {
    for world in [1, 2, 5] {
        on_ranks(world, |group| {
            let mut peers = meet(&group, &Driver::host().unwrap()).unwrap();
            assert_eq!((peers.rank(), peers.world()), (group.rank(), world));
            assert_eq!(peers.transport(), Transport::UnixSocket);
            assert_eq!(peers.hosts().count(), 1);
            let me = HostIdentity::current().unwrap();
            for rank in 0..world {
                assert!(peers.identities().get(rank).same_process(&me));
            }
            assert_eq!(*peers.topology(), Topology::host(world));
            let mut received = Vec::new();
            let mut keep = |from, _, _: Vec<OwnedFd>| {
                received.push(from);
                Ok(())
            };
            let sent: OwnedFd = std::fs::File::open("/dev/null").unwrap().into();
            let fds = [std::os::fd::AsFd::as_fd(&sent)];
            let sockets = peers.sockets_mut().unwrap();
            sockets.exchange(&fds, 1, &mut keep, Deadline::seconds(60)).unwrap();
            received.sort_unstable();
            let others: Vec<u32> = (0..world).filter(|&rank| rank != group.rank()).collect();
            assert_eq!(received, others);
        });
    }
}

#[test]
fn a_handshake_costs_one_gather_in_the_store_and_two_without_connections() {
    for world in [1, 3, 8] {
        on_ranks(world, |group| {
            meet(&group, &Driver::host().unwrap()).unwrap();
            assert_eq!(group.store().traffic().round_trips, 1);
        });
        on_ranks(world, |group| {
            meet(&group, &Driver::sim(group.rank().into())).unwrap();
            assert_eq!(group.store().traffic().round_trips, 2);
        });
    }
}

/// Connects as in a handshake.
fn connected(group: &Group, driver: &Driver) -> PeerSockets {
    let (hello, listener) = prepare(group, &terms(driver)).unwrap();
    let hello = message::encode(&Publish(Ok(Box::new(hello)))).unwrap();
    let gathered = group.all_gather("hello", &hello, Deadline::seconds(60)).unwrap();
    let distinct = read_hellos(&gathered).unwrap();
    let hellos: Vec<&Hello> = gathered.which().iter().map(|&at| &distinct[at as usize]).collect();
    let secret = secret_of(&gathered);
    let deadline = Deadline::seconds(60);
    let ready = driver.at_step(Step::HandshakeConnect);
    let place = (group.rank(), &Hosts::one(group.world()));
    let sockets = connect(ready, place, &hellos, &secret, listener, deadline);
    sockets.unwrap().unwrap()
}

/// The others are connected to each other and to it.
#[test]
fn why_a_rank_is_not_connected_is_the_error_of_those_that_are() {
    let errors = on_ranks(3, |group| {
        let sockets = connected(&group, &Driver::host().unwrap());
        let deadline = Deadline::seconds(60);
        group.all_gather("connected", b"", deadline).unwrap();
        if group.rank() == 1 {
            drop(sockets);
            let why = Error::out_of_memory("no descriptors");
            return confirm(&group, &Hosts::one(group.world()), Err(why), deadline).unwrap_err();
        }
        confirm_on_sockets(
            &group,
            &Hosts::one(group.world()),
            sockets,
            Ok(Topology::host(3)),
            deadline,
        )
        .unwrap_err()
    });
    for error in &errors {
        assert!(error.is_out_of_memory() && error.ranks() == [1], "{error}");
        assert_eq!(error.to_string(), errors[0].to_string());
    }
}

/// It says why in a farewell first, as a rank does that has connected to some of the others.
#[test]
fn a_farewell_to_ranks_that_are_connected_is_no_error_of_theirs() {
    let errors = on_ranks(3, |group| {
        let mut sockets = connected(&group, &Driver::host().unwrap());
        let deadline = Deadline::seconds(60);
        group.all_gather("connected", b"", deadline).unwrap();
        if group.rank() == 1 {
            let why = Error::out_of_memory("no descriptors");
            sockets.fail(&why);
            drop(sockets);
            return confirm(&group, &Hosts::one(group.world()), Err(why), deadline).unwrap_err();
        }
        confirm_on_sockets(
            &group,
            &Hosts::one(group.world()),
            sockets,
            Ok(Topology::host(3)),
            deadline,
        )
        .unwrap_err()
    });
    for error in &errors {
        assert!(error.is_out_of_memory() && error.ranks() == [1], "{error}");
        assert_eq!(error.to_string(), errors[0].to_string());
    }
}

#[test]
fn simulated_ranks_need_no_sockets() {
    on_ranks(16, |group| {
        let peers = meet(&group, &Driver::sim(group.rank().into())).unwrap();
        assert!(peers.sockets().is_none());
        assert_eq!(peers.world(), 16);
    });
}

/// Rule D8.
#[test]
fn different_configurations_are_the_same_error_everywhere() {
    let errors = on_ranks(3, |group| {
        let (hash, text) = if group.rank() == 1 {
            ([2; 32], "stride = 2 TiB")
        } else {
            ([1; 32], "stride = 1 TiB")
        };
        let driver = Driver::host().unwrap();
        let terms = HandshakeConfig { config_hash: hash, config_text: text, ..terms(&driver) };
        meet_by(&group, Ok(terms), Deadline::seconds(60)).unwrap_err()
    });
    for error in &errors {
        assert!(error.is_diverged());
        assert!(error.to_string().contains("rank 1 has [stride = 2 TiB]"), "{error}");
        assert_eq!(error.to_string(), errors[0].to_string());
    }
}

#[test]
fn different_drivers_are_the_same_error_everywhere() {
    let errors = on_ranks(2, |group| {
        let driver = if group.rank() == 0 { Driver::host().unwrap() } else { Driver::sim(1) };
        meet(&group, &driver).unwrap_err()
    });
    assert!(errors[0].is_diverged());
    assert_eq!(errors[0].to_string(), errors[1].to_string());
}

#[test]
fn a_failure_of_one_rank_is_the_error_of_all_at_every_step() {
    let started = Instant::now();
    for step in [Step::HandshakePublish, Step::HandshakeConnect, Step::HandshakeConfirm] {
        for failing in 0..3 {
            let errors = on_ranks(3, |group| {
                let action = FaultAction::Fail(Error::out_of_memory("planned failure"));
                let driver = if group.rank() == failing {
                    with_fault(step, action)
                } else {
                    Driver::host().unwrap()
                };
                meet(&group, &driver).unwrap_err()
            });
            for error in &errors {
                assert!(error.is_out_of_memory(), "{step:?} of rank {failing}: {error}");
                let text = error.to_string();
                assert!(
                    text.contains(&format!("rank {failing} failed in the handshake")),
                    "{text}"
                );
                // Who else failed because of it depends on how far they were, but is agreed on.
                assert_eq!(text, errors[0].to_string());
            }
        }
    }
    assert!(started.elapsed() < Duration::from_secs(120), "nobody waited for a deadline");
}

#[test]
fn slow_ranks_are_waited_for() {
    for step in [Step::HandshakePublish, Step::HandshakeConnect, Step::HandshakeConfirm] {
        on_ranks(3, |group| {
            let delay = FaultAction::Delay(Duration::from_millis(500));
            let driver =
                if group.rank() == 1 { with_fault(step, delay) } else { Driver::host().unwrap() };
            meet(&group, &driver).unwrap();
        });
    }
}

#[test]
fn a_rank_that_never_comes_is_named() {
    let errors = on_ranks(3, |group| {
        if group.rank() == 2 {
            return None;
        }
        let deadline = Deadline::after(Duration::from_millis(300));
        let driver = Driver::host().unwrap();
        Some(meet_by(&group, Ok(terms(&driver)), deadline).unwrap_err())
    });
    for error in errors.into_iter().flatten() {
        assert!(error.is_timeout(), "{error}");
        // The last to give up may find the other gone as well.
        assert!(error.ranks().contains(&2), "{error}");
        assert!(error.to_string().contains("meeting the other ranks"), "{error}");
    }
}

#[test]
fn a_rank_that_dies_after_publishing_is_lost() {
    // The rank publishes what a handshake publishes, and is gone: its socket with it.
    let errors = on_ranks(3, |group| {
        if group.rank() == 1 {
            let driver = Driver::host().unwrap();
            let (hello, listener) = prepare(&group, &terms(&driver)).unwrap();
            drop(listener);
            let hello = message::encode(&Publish(Ok(Box::new(hello)))).unwrap();
            group.all_gather("hello", &hello, Deadline::seconds(60)).unwrap();
            return None;
        }
        Some(meet(&group, &Driver::host().unwrap()).unwrap_err())
    });
    for error in errors.into_iter().flatten() {
        assert!(error.is_peer_lost(), "{error}");
        assert_eq!(error.ranks(), [1], "{error}");
    }
}

#[test]
fn a_rank_that_dies_after_connecting_is_lost() {
    let errors = on_ranks(3, |group| {
        let driver = Driver::host().unwrap();
        if group.rank() == 1 {
            connected(&group, &driver);
            return None;
        }
        let deadline = Deadline::seconds(2);
        Some(meet_by(&group, Ok(terms(&driver)), deadline).unwrap_err())
    });
    for error in errors.into_iter().flatten() {
        assert!(error.is_peer_lost(), "{error}");
        // The last to give up may find the other gone as well.
        assert!(error.ranks().contains(&1), "{error}");
    }
}

#[test]
fn what_is_not_a_hello_is_refused_everywhere() {
    let errors = on_ranks(3, |group| {
        if group.rank() == 2 {
            let _ = group.all_gather("hello", b"garbage", Deadline::seconds(60));
            return None;
        }
        Some(meet(&group, &Driver::host().unwrap()).unwrap_err())
    });
    for error in errors.into_iter().flatten() {
        assert!(error.is_refused() && error.to_string().contains("rank 2"), "{error}");
    }
}

#[test]
fn long_descriptions_are_cut_at_a_character() {
    on_ranks(2, |group| {
        let text = "ä".repeat(MAX_CONFIG_TEXT);
        let driver = Driver::host().unwrap();
        let terms = HandshakeConfig { config_text: &text, ..terms(&driver) };
        meet_by(&group, Ok(terms), Deadline::seconds(60)).unwrap();
    });
}

#[test]
fn ranks_that_see_different_links_all_go_by_none() {
    let found = on_ranks(3, |group| {
        let topology = if group.rank() == 1 { Topology::unknown(3) } else { Topology::host(3) };
        let linked = Linked { sockets: None, topology: topology.clone() };
        let in_store =
            confirm(&group, &Hosts::one(group.world()), Ok(linked), Deadline::seconds(60))
                .unwrap()
                .topology;
        let sockets = connected(&group, &Driver::host().unwrap());
        let deadline = Deadline::seconds(60);
        let connected =
            confirm_on_sockets(&group, &Hosts::one(group.world()), sockets, Ok(topology), deadline)
                .unwrap();
        assert_eq!(connected.topology, in_store);
        in_store
    });
    assert_eq!(found, vec![Topology::unknown(3); 3]);
}

#[test]
fn ranks_that_see_the_same_links_go_by_them() {
    let found = on_ranks(3, |group| {
        let linked = Linked { sockets: None, topology: Topology::host(3) };
        confirm(&group, &Hosts::one(group.world()), Ok(linked), Deadline::seconds(60))
            .unwrap()
            .topology
    });
    assert_eq!(found, vec![Topology::host(3); 3]);
}

#[test]
fn ranks_share_a_host_where_their_handles_travel() {
    let hello = |host_id: Option<&str>, boot_id: &str, net: u64, transport| {
        let (mut hello, _) =
            prepare(&Group::in_process(1).unwrap()[0], &terms(&Driver::host().unwrap())).unwrap();
        hello.host.boot_id = boot_id.into();
        hello.host.net_namespace = net;
        hello.host.host_id = host_id.map(Into::into);
        hello.transport = transport;
        hello
    };
    let hosts = |transport, of: [(Option<&str>, &str, u64); 4]| {
        let hellos = of.map(|(id, boot, net)| hello(id, boot, net, transport));
        hosts_of(&hellos.each_ref()).iter().map(<[u32]>::to_vec).collect::<Vec<_>>()
    };
    let machines = [(None, "a", 0), (None, "b", 0), (None, "a", 0), (None, "b", 0)];
    assert_eq!(hosts(Transport::UnixSocket, machines), [[0, 2], [1, 3]]);
    // Bytes travel between machines, as the handles of a fabric do.
    assert_eq!(hosts(Transport::Store, machines), [[0, 1, 2, 3]]);
    let namespaces = [(None, "a", 0), (None, "a", 1), (None, "a", 1), (None, "a", 0)];
    assert_eq!(hosts(Transport::UnixSocket, namespaces), [[0, 3], [1, 2]]);
    let pretended = [(None, "a", 0), (Some("x"), "a", 0), (Some("x"), "a", 0), (Some("y"), "a", 0)];
    for transport in [Transport::UnixSocket, Transport::Store, Transport::Derived] {
        assert_eq!(hosts(transport, pretended), [vec![0], vec![1, 2], vec![3]]);
    }
}
