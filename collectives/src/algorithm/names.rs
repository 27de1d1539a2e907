//! Algorithms found by name, where options, calls or the environment request one.

/// The algorithm of this name among `all`. Former names are accepted for one version, with a warning.
pub(super) fn by_name<A: Copy>(
    name: &str,
    all: &[A],
    former_names: &[(&str, A)],
    name_of: impl Fn(A) -> &'static str,
) -> Option<A> {
    let found = all.iter().copied().find(|algorithm| name_of(*algorithm) == name);
    found.or_else(|| {
        let (former, algorithm) = former_names.iter().find(|(former, _)| *former == name)?;
        let now = name_of(*algorithm);
        tracing::warn!(
            "the algorithm {former} is called {now}; its former name will not be accepted by the next version"
        );
        Some(*algorithm)
    })
}

#[cfg(test)]
mod tests {
    use crate::{AllReduceAlgorithm, AllToAllAlgorithm};

    #[test]
    fn former_names_are_accepted_and_no_longer_shown() {
        for (former, now) in [
            ("one_shot_packet", "one_shot_ll"),
            ("one_shot_line", "one_shot_ll128"),
            ("one_shot_sentinel", "one_shot_lamport"),
            ("two_shot_packet", "two_shot_ll"),
            ("two_shot_sentinel", "two_shot_lamport"),
        ] {
            let found = AllReduceAlgorithm::named(former).map(AllReduceAlgorithm::name);
            assert_eq!(found, Some(now));
            assert_eq!(AllReduceAlgorithm::named(now).map(AllReduceAlgorithm::name), Some(now));
            assert!(AllReduceAlgorithm::ALL.iter().all(|algorithm| algorithm.name() != former));
        }
        for name in ["ll", "packet", "lamport"] {
            assert_eq!(AllToAllAlgorithm::named(name), Some(AllToAllAlgorithm::Lamport));
        }
        assert_eq!(AllToAllAlgorithm::Lamport.name(), "lamport");
        assert_eq!(AllToAllAlgorithm::named("line"), None);
    }
}
