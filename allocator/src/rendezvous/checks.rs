//! Checks of properties that must be equal, or different, on all ranks before a pool is made.
//!
//! Every rank checks the same data in the same order, so all of them report the same error.

use std::collections::BTreeMap;

use super::hello::Hello;
use crate::ranks::list;
use crate::rendezvous::message::{PROTOCOL_VERSION, version_of};
use crate::store::Gathered;
use crate::{Error, Result};

/// Refuses ranks whose symmpool speaks another version, before anything else is read.
pub(super) fn versions(gathered: &Gathered) -> Result<()> {
    let versions = group_by((0..).zip(gathered.parts().map(version_of)));
    if versions.keys().all(|version| *version == Some(PROTOCOL_VERSION)) {
        return Ok(());
    }
    let described = describe(&versions, |version| match version {
        Some(version) => format!("version {version}"),
        None => "something that is not symmpool's protocol".into(),
    });
    Err(Error::refused(format!(
        "ranks speak different versions of the rendezvous protocol ({described}); run the same \
         symmpool on every rank"
    ))
    .naming(outside_the_largest(&versions)))
}

/// All checks of the ranks' descriptions, `hellos`, in rank order.
pub(super) fn agree(hellos: &[&Hello]) -> Result<()> {
    configurations(hellos)?;
    equal(hellos, "kinds of memory", "use the same driver on every rank", |hello| {
        format!("{:?}", hello.device.kind)
    })?;
    equal(hellos, "ways for handles to travel", "use the same driver on every rank", |hello| {
        format!("{:?}", hello.transport)
    })?;
    equal(hellos, "granularities of memory", "use devices and drivers of one kind", |hello| {
        format!("{} bytes", hello.granularity)
    })?;
    devices(hellos)
}

/// Rule D8.
fn configurations(hellos: &[&Hello]) -> Result<()> {
    let hashes = group_by(ranked(hellos).map(|(rank, hello)| (rank, hello.config_hash)));
    if hashes.len() <= 1 {
        return Ok(());
    }
    let reference = hellos[0];
    let mut message = String::from("pools are configured differently");
    for (hash, ranks) in &hashes {
        if *hash == reference.config_hash {
            continue;
        }
        let theirs = hellos[ranks[0] as usize];
        message.push_str(&format!("; {}", ranks_are(ranks)));
        let difference = differing_lines(&theirs.config_text, &reference.config_text);
        if difference.is_empty() {
            message.push_str(" different from rank 0 in something its description does not show");
        }
        for (theirs, ours) in difference {
            message.push_str(&format!(" [{theirs}] where rank 0 has [{ours}]"));
        }
    }
    message.push_str(". Build the pool with the same settings on every rank");
    Err(Error::mismatch(message).naming(outside_the_largest(&hashes)))
}

/// Lines that are in one text only, each with its counterpart: the line of the other text that begins with
/// the same word, or "nothing".
fn differing_lines<'a>(theirs: &'a str, ours: &'a str) -> Vec<(&'a str, &'a str)> {
    const NOTHING: &str = "nothing";
    let only = |of: &'a str, not_in: &'a str| -> Vec<&'a str> {
        of.lines().filter(|line| !not_in.lines().any(|other| other == *line)).collect()
    };
    fn word(line: &str) -> &str {
        line.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or("")
    }
    let mut left = only(ours, theirs);
    let mut pairs = Vec::new();
    for line in only(theirs, ours) {
        let counterpart = left.iter().position(|other| word(other) == word(line));
        pairs.push((line, counterpart.map_or(NOTHING, |at| left.remove(at))));
    }
    pairs.extend(left.into_iter().map(|line| (NOTHING, line)));
    pairs
}

fn equal(hellos: &[&Hello], what: &str, advice: &str, of: impl Fn(&Hello) -> String) -> Result<()> {
    let values = group_by(ranked(hellos).map(|(rank, hello)| (rank, of(hello))));
    if values.len() <= 1 {
        return Ok(());
    }
    Err(Error::mismatch(format!(
        "ranks have different {what} ({}); {advice}",
        describe(&values, String::clone)
    ))
    .naming(outside_the_largest(&values)))
}

fn devices(hellos: &[&Hello]) -> Result<()> {
    let named = ranked(hellos).filter(|(_, hello)| !hello.device.uuid.is_empty());
    for (uuid, ranks) in group_by(named.map(|(rank, hello)| (rank, &*hello.device.uuid))) {
        let allowed = ranks.iter().all(|&rank| hellos[rank as usize].allow_shared_device);
        if ranks.len() > 1 && !allowed {
            return Err(Error::invalid_argument(format!(
                "ranks {} use one device, {} ({uuid}); give each rank a device of its own (see \
                 LOCAL_RANK and CUDA_VISIBLE_DEVICES), or, to try a program, allow shared devices on all \
                 of them (SYMMPOOL_SHARED_DEVICE=1)",
                list(&ranks),
                hellos[ranks[0] as usize].device.name
            ))
            .naming(ranks));
        }
    }
    Ok(())
}

fn ranked<'a>(hellos: &[&'a Hello]) -> impl Iterator<Item = (u32, &'a Hello)> {
    (0u32..).zip(hellos.iter().copied())
}

fn group_by<K: Ord>(ranked: impl Iterator<Item = (u32, K)>) -> BTreeMap<K, Vec<u32>> {
    let mut groups = BTreeMap::<K, Vec<u32>>::new();
    for (rank, key) in ranked {
        groups.entry(key).or_default().push(rank);
    }
    groups
}

/// The ranks that are not in the largest group. Among equally large groups, the one with the lowest rank
/// counts as the largest.
fn outside_the_largest<K>(groups: &BTreeMap<K, Vec<u32>>) -> Vec<u32> {
    let usual = groups.values().max_by_key(|ranks| (ranks.len(), std::cmp::Reverse(ranks[0])));
    groups.values().filter(|ranks| Some(*ranks) != usual).flatten().copied().collect()
}

/// "rank 0: a; ranks 1, 2: b", in order of first ranks.
fn describe<K>(groups: &BTreeMap<K, Vec<u32>>, show: impl Fn(&K) -> String) -> String {
    let mut groups: Vec<_> = groups.iter().collect();
    groups.sort_by_key(|(_, ranks)| ranks[0]);
    let one = |(key, ranks): &(&K, &Vec<u32>)| {
        format!("rank{} {}: {}", if ranks.len() == 1 { "" } else { "s" }, list(ranks), show(key))
    };
    groups.iter().map(one).collect::<Vec<_>>().join("; ")
}

fn ranks_are(ranks: &[u32]) -> String {
    match ranks {
        [rank] => format!("rank {rank} has"),
        ranks => format!("ranks {} have", list(ranks)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::{DeviceIdentity, Transport};
    use crate::rendezvous::identity::HostIdentity;

    fn hello() -> Hello {
        Hello {
            config_hash: [0; 32],
            config_text: "stride = 1 TiB\nlane default = torch".into(),
            host: HostIdentity::current().unwrap(),
            device: DeviceIdentity { kind: "cuda".into(), name: "H200".into(), uuid: "A".into() },
            allow_shared_device: false,
            transport: Transport::UnixSocket,
            granularity: 2 << 20,
            first_on_device: true,
            listener: None,
            nonce: [0; 16],
        }
    }

    fn four(change: impl Fn(usize, &mut Hello)) -> Result<()> {
        let mut hellos = [hello(), hello(), hello(), hello()];
        for (rank, hello) in hellos.iter_mut().enumerate() {
            hello.device.uuid = format!("GPU-{rank}");
            change(rank, hello);
        }
        agree(&hellos.iter().collect::<Vec<_>>())
    }

    #[test]
    fn equal_ranks_agree() {
        four(|_, _| {}).unwrap();
    }

    /// Rule D8.
    #[test]
    fn differing_configurations_show_what_differs() {
        let error = four(|rank, hello| {
            if rank >= 2 {
                hello.config_hash = [1; 32];
                hello.config_text = "stride = 2 TiB\nlane default = torch\ndebug".into();
            }
        })
        .unwrap_err();
        assert!(error.is_diverged());
        assert_eq!(
            error.to_string(),
            "symmpool: pools are configured differently; ranks 2, 3 have [stride = 2 TiB] where \
             rank 0 has [stride = 1 TiB] [debug] where rank 0 has [nothing]. Build the pool with \
             the same settings on every rank"
        );
    }

    #[test]
    fn lines_are_shown_beside_those_of_the_same_name() {
        let theirs = "debug\nlane_x = 2\nstride = 2\nsame";
        let ours = "same\nstride = 1\nlane = 2\nlane_x = 1";
        assert_eq!(
            differing_lines(theirs, ours),
            [
                ("debug", "nothing"),
                ("lane_x = 2", "lane_x = 1"),
                ("stride = 2", "stride = 1"),
                ("nothing", "lane = 2"),
            ]
        );
    }

    /// Rule D8.
    #[test]
    fn differing_hashes_with_equal_descriptions_are_still_an_error() {
        let error = four(|rank, hello| hello.config_hash = [(rank == 3).into(); 32]).unwrap_err();
        assert!(error.is_diverged() && error.to_string().contains("rank 3"), "{error}");
    }

    #[test]
    fn drivers_have_to_be_alike() {
        let kind = four(|rank, hello| hello.device.kind = format!("kind{}", rank / 3));
        let transport = four(|rank, hello| {
            hello.transport = if rank == 3 { Transport::Store } else { Transport::UnixSocket };
        });
        let granularity = four(|rank, hello| hello.granularity <<= rank / 3);
        for result in [kind, transport, granularity] {
            let error = result.unwrap_err();
            assert!(error.is_diverged());
            assert!(error.to_string().contains("(ranks 0-2: "), "{error}");
        }
    }

    #[test]
    fn a_device_belongs_to_one_rank_unless_all_its_ranks_allow_more() {
        let share = |rank: usize, hello: &mut Hello| {
            if rank == 1 || rank == 3 {
                hello.device.uuid = "GPU-7".into();
            }
        };
        let error = four(share).unwrap_err();
        assert!(error.is_invalid_argument());
        assert!(error.to_string().contains("ranks 1, 3 use one device, H200 (GPU-7)"), "{error}");
        let some = four(|rank, hello| {
            share(rank, hello);
            hello.allow_shared_device = rank == 1;
        });
        assert!(some.is_err());
        four(|rank, hello| {
            share(rank, hello);
            hello.allow_shared_device = rank == 1 || rank == 3;
        })
        .unwrap();
        four(|_, hello| hello.device.uuid.clear()).unwrap();
    }

    #[test]
    fn another_protocol_version_is_refused_by_everybody_alike() {
        let frame = crate::rendezvous::message::encode(&crate::rendezvous::handshake::Publish(Ok(
            Box::new(hello()),
        )))
        .unwrap();
        let mut other = frame.clone();
        other[4] = 9;
        let error = versions(&Gathered::from_parts([&frame, &frame, &other])).unwrap_err();
        assert!(error.is_refused());
        let text = error.to_string();
        let own = crate::rendezvous::message::PROTOCOL_VERSION;
        let all = format!("ranks 0, 1: version {own}; rank 2: version 9");
        assert!(text.contains(&all), "{text}");
        versions(&Gathered::from_parts([&frame, &frame])).unwrap();
    }
}
