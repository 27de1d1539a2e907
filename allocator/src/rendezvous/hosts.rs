//! How a group finds which of its ranks share a host.

use serde::{Deserialize, Serialize};

use super::checks;
use super::host_id::check_host_id;
use super::identity::{HostIdentity, HostKey};
use super::message::{self, Message};
use super::status::{RankStatus, all_ok, encode_status};
use crate::{Deadline, Group, Hosts, Result};

/// The host of a rank and its name. Equal for all ranks of a host, so stores send it once.
#[derive(Debug, Serialize, Deserialize)]
struct HostIdentityMessage(RankStatus<(HostKey, String)>);

impl Message for HostIdentityMessage {
    const KIND: u16 = 13;
    const NAME: &'static str = "host";
}

impl Hosts {
    /// Hosts of processes, in rank order.
    pub(crate) fn from_identities(identities: &[&HostIdentity]) -> Self {
        Self::new(identities.iter().map(|identity| (identity.host_key(), identity.host_name())))
    }
}

impl Group {
    /// Which process on which host this participant is.
    pub(crate) fn identity(&self) -> Result<HostIdentity> {
        let identity = HostIdentity::current()?;
        let host_id = self.host_id().map(check_host_id).transpose()?;
        Ok(HostIdentity { host_id: host_id.map(str::to_owned).or(identity.host_id), ..identity })
    }

    /// Which ranks of this group share a host. Collective: you must call this on every rank. It costs one gather in the
    /// store, and the group, its clones and its children remember the result: later calls return at once.
    ///
    /// # Errors
    ///
    /// Errors that are the same on every rank, and name the ranks at fault:
    ///
    /// - `is_invalid_argument` where `SYMMPOOL_HOST_ID` is no id.
    /// - `is_invalid_state` where it changed since the process first read it.
    /// - `is_refused` where ranks speak different versions of the protocol.
    ///
    /// A rank whose `deadline` passes gets `is_timeout` with the ranks that did not call this.
    pub fn hosts(&self, deadline: Deadline) -> Result<Hosts> {
        if let Some(hosts) = self.known_hosts() {
            return Ok(hosts);
        }
        let own = self.identity().map(|identity| (identity.host_key(), identity.host_name()));
        let value = encode_status(HostIdentityMessage, own.map_err(|error| error.kind().clone()))?;
        let found = self.hosts_by(&value, deadline, |gathered| {
            checks::versions(gathered)?;
            let all: Vec<HostIdentityMessage> = message::decode_all(gathered)?;
            Ok(Hosts::new(all_ok(
                "finding its host",
                all.into_iter().map(|HostIdentityMessage(host)| host),
            )?))
        });
        found.map_err(|error| error.context("finding the hosts of the group's ranks"))
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::Error;
    use crate::store::Gathered;
    use crate::testing::on_ranks;

    #[test]
    fn threads_of_one_process_are_on_one_host_and_ask_the_store_once() {
        for world in [1, 3] {
            on_ranks(world, |group| {
                let hosts = group.hosts(group.deadline()).unwrap();
                assert_eq!(hosts.iter().collect::<Vec<_>>(), [(0..world).collect::<Vec<_>>()]);
                let child = group.child("pool");
                for other in [&child, &group.clone(), &child.child("deeper")] {
                    assert_eq!(other.hosts(Deadline::after(Duration::ZERO)).unwrap(), hosts);
                }
                assert_eq!(group.store().traffic().round_trips, 1);
                // A group of another name asks anew.
                let other = group.clone().with_name("other");
                assert_eq!(other.hosts(group.deadline()).unwrap(), hosts);
                assert_eq!(group.store().traffic().round_trips, 2);
            });
        }
    }

    #[test]
    fn children_that_ask_at_once_in_any_order_ask_as_one() {
        on_ranks(3, |group| {
            let mut children = [group.child("a"), group.child("b"), group.clone()];
            children.rotate_left(group.rank() as usize);
            std::thread::scope(|scope| {
                for child in &children {
                    scope.spawn(|| assert_eq!(child.hosts(group.deadline()).unwrap().count(), 1));
                }
            });
            assert_eq!(group.store().traffic().round_trips, 1);
            // The group's own gathers are counted as before.
            assert!(group.all_gather("x", b"same", group.deadline()).unwrap().is_uniform());
        });
    }

    #[test]
    fn a_rank_that_does_not_ask_is_named_and_a_second_try_finds_the_hosts() {
        let mut groups = Group::in_process(2).unwrap();
        let (late, early) = (groups.pop().unwrap(), groups.pop().unwrap());
        let error = early.hosts(Deadline::after(Duration::from_millis(50))).unwrap_err();
        assert!(error.is_timeout() && error.ranks() == [1], "{error}");
        assert!(error.to_string().contains("finding the hosts of the group's ranks"), "{error}");
        std::thread::scope(|scope| {
            let first = scope.spawn(|| early.hosts(Deadline::seconds(60)).unwrap());
            assert_eq!(late.hosts(Deadline::seconds(60)).unwrap(), first.join().unwrap());
        });
    }

    #[test]
    fn a_thread_that_waits_for_another_one_has_a_deadline() {
        let mut groups = Group::in_process(2).unwrap();
        let (late, early) = (groups.pop().unwrap(), groups.pop().unwrap());
        std::thread::scope(|scope| {
            let first = scope.spawn(|| early.hosts(Deadline::seconds(60)));
            std::thread::sleep(Duration::from_millis(100));
            let (child, began) = (early.child("pool"), Instant::now());
            let error = child.hosts(Deadline::after(Duration::from_millis(100))).unwrap_err();
            assert!(error.is_timeout() && began.elapsed() < Duration::from_secs(20), "{error}");
            assert!(error.to_string().contains("another thread of this rank"), "{error}");
            late.hosts(Deadline::seconds(60)).unwrap();
            assert_eq!(first.join().unwrap().unwrap().count(), 1);
            assert_eq!(child.hosts(Deadline::after(Duration::ZERO)).unwrap().count(), 1);
        });
    }

    #[test]
    fn a_rank_of_another_version_is_refused_by_all() {
        on_ranks(3, |group| {
            let read = |gathered: &Gathered| {
                checks::versions(gathered)?;
                Err(Error::invalid_state("versions are not compared"))
            };
            let own = (HostIdentity::current().unwrap().host_key(), "node".to_owned());
            let mut value = encode_status(HostIdentityMessage, Ok(own)).unwrap();
            if group.rank() == 1 {
                value[4..6].copy_from_slice(&9u16.to_le_bytes());
            }
            let error = match group.rank() {
                1 => group.hosts_by(&value, group.deadline(), read),
                _ => group.hosts(group.deadline()),
            };
            let error = error.unwrap_err();
            assert!(error.is_refused() && error.ranks() == [1], "{error}");
        });
    }

    #[test]
    fn what_a_rank_lacks_is_the_error_of_all_and_not_remembered() {
        on_ranks(3, |group| {
            let own = match group.rank() {
                1 => Err(Error::invalid_argument("no id").kind().clone()),
                _ => Ok((HostIdentity::current().unwrap().host_key(), "node".to_owned())),
            };
            let value = encode_status(HostIdentityMessage, own).unwrap();
            let error = group
                .hosts_by(&value, group.deadline(), |gathered| {
                    let all: Vec<HostIdentityMessage> = message::decode_all(gathered)?;
                    Ok(Hosts::new(all_ok(
                        "finding its host",
                        all.into_iter().map(|HostIdentityMessage(on)| on),
                    )?))
                })
                .unwrap_err();
            assert!(error.is_invalid_argument() && error.ranks() == [1], "{error}");
            assert!(error.to_string().contains("rank 1 failed in finding its host"), "{error}");
            assert_eq!(group.hosts(group.deadline()).unwrap().count(), 1);
        });
    }

    #[test]
    fn hosts_of_identities_are_those_between_which_descriptors_travel() {
        let me = HostIdentity { host_id: None, ..HostIdentity::current().unwrap() };
        let on =
            |id: &str| HostIdentity { host_id: Some(id.into()), pid: me.pid + 1, ..me.clone() };
        let (a, b) = (on("a"), on("b"));
        let hosts = Hosts::from_identities(&[&a, &me, &b, &me, &a]);
        assert_eq!(
            hosts.to_string(),
            format!(
                "host a (SYMMPOOL_HOST_ID): ranks 0, 4; host {}: ranks 1, 3; host b (SYMMPOOL_HOST_ID): rank 2",
                me.hostname
            )
        );
    }
}
