//! The all-reduce algorithm that is requested: by the options of a communicator, or by the environment where they
//! leave the choice open.

use std::env;
use std::ffi::OsStr;

use symmpool_allocator::{Error, Result};

use super::AllReduceAlgorithm;
use super::names::from_environment;

/// The environment variable that requests an algorithm for every communicator whose options leave it open.
pub(crate) const VARIABLE: &str = "SYMMPOOL_ALL_REDUCE";

/// A requested algorithm. It must be the same on every rank, as ranks compare it in the handshake of calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RequestedAlgorithm {
    pub(crate) algorithm: AllReduceAlgorithm,
    pub(crate) by_environment: bool,
}

impl RequestedAlgorithm {
    /// The algorithm that the options request, or the environment if they say `auto`. Refuses unknown names.
    pub(crate) fn from_env(option: AllReduceAlgorithm) -> Result<Self> {
        Self::with(option, env::var_os(VARIABLE).as_deref())
    }

    fn with(option: AllReduceAlgorithm, value: Option<&OsStr>) -> Result<Self> {
        let value = value.filter(|_| option == AllReduceAlgorithm::Auto);
        let names = AllReduceAlgorithm::ALL.map(AllReduceAlgorithm::name);
        let requested = from_environment(VARIABLE, value, AllReduceAlgorithm::named, &names)?;
        Ok(Self { algorithm: requested.unwrap_or(option), by_environment: requested.is_some() })
    }

    /// Adds to the error of an unsupported algorithm that the environment requested it, not the caller.
    pub(crate) fn blame(self, error: Error) -> Error {
        if self.by_environment && error.is_unsupported() {
            error.context(format!("with {VARIABLE}={}", self.algorithm.name()))
        } else {
            error
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_is_used_where_options_leave_the_choice_open() {
        use AllReduceAlgorithm::{Auto, OneShot, OneShotLl128, TwoShotPush};
        let with = |option, value: &str| RequestedAlgorithm::with(option, Some(OsStr::new(value)));
        let requested =
            |algorithm, by_environment| RequestedAlgorithm { algorithm, by_environment };
        assert_eq!(RequestedAlgorithm::with(Auto, None).unwrap(), requested(Auto, false));
        assert_eq!(with(Auto, "").unwrap(), requested(Auto, false));
        assert_eq!(with(Auto, "auto").unwrap(), requested(Auto, true));
        assert_eq!(with(Auto, "two_shot_push").unwrap(), requested(TwoShotPush, true));
        assert_eq!(
            with(Auto, "one_shot_line").unwrap(),
            requested(OneShotLl128, true),
            "a former name"
        );
        assert_eq!(with(OneShot, "two_shot_push").unwrap(), requested(OneShot, false));
        assert_eq!(with(OneShot, "nonsense").unwrap(), requested(OneShot, false));
        for wrong in ["nonsense", "Auto", "one_shot ", "0"] {
            let error = with(Auto, wrong).unwrap_err();
            assert!(error.is_invalid_argument());
            let text = error.to_string();
            assert!(text.contains(&format!("SYMMPOOL_ALL_REDUCE={wrong}: ")), "{text}");
            for algorithm in AllReduceAlgorithm::ALL {
                assert!(text.contains(algorithm.name()), "{text}");
            }
        }
        let forced = with(Auto, "one_shot").unwrap();
        let text = forced.blame(Error::unsupported("no")).to_string();
        assert!(text.contains("SYMMPOOL_ALL_REDUCE=one_shot"), "{text}");
    }
}
