//! Which algorithm was asked for, and by whom: the options, or the environment where they leave it
//! open.

use std::env;
use std::ffi::OsStr;

use symmpool_allocator::{Error, Result};

use super::AllReduceAlgorithm;

/// Names an algorithm for every communicator whose options name none.
pub(crate) const VARIABLE: &str = "SYMMPOOL_ALL_REDUCE";

/// The same on every rank, or their calls differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Asked {
    pub(crate) algorithm: AllReduceAlgorithm,
    pub(crate) by_environment: bool,
}

impl Asked {
    /// By the options, or by the environment if they say `auto`. Refuses a name that is none.
    pub(crate) fn from_env(option: AllReduceAlgorithm) -> Result<Self> {
        Self::with(option, env::var_os(VARIABLE).as_deref())
    }

    fn with(option: AllReduceAlgorithm, value: Option<&OsStr>) -> Result<Self> {
        let value = value.filter(|value| !value.is_empty());
        let Some(value) = value.filter(|_| option == AllReduceAlgorithm::Auto) else {
            return Ok(Self { algorithm: option, by_environment: false });
        };
        let named = value.to_str().and_then(AllReduceAlgorithm::named);
        let Some(algorithm) = named else {
            let names = AllReduceAlgorithm::ALL.map(AllReduceAlgorithm::name).join(", ");
            return Err(Error::invalid_argument(format!(
                "{VARIABLE}={}: no such algorithm; there are {names}",
                value.display()
            )));
        };
        Ok(Self { algorithm, by_environment: true })
    }

    /// Says of what cannot be done that it was not the caller who chose it.
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
    fn the_environment_speaks_where_options_do_not() {
        use AllReduceAlgorithm::{Auto, OneShot, OneShotLl128, TwoShotPush};
        let with = |option, value: &str| Asked::with(option, Some(OsStr::new(value)));
        let asked = |algorithm, by_environment| Asked { algorithm, by_environment };
        assert_eq!(Asked::with(Auto, None).unwrap(), asked(Auto, false));
        assert_eq!(with(Auto, "").unwrap(), asked(Auto, false));
        assert_eq!(with(Auto, "auto").unwrap(), asked(Auto, true));
        assert_eq!(with(Auto, "two_shot_push").unwrap(), asked(TwoShotPush, true));
        assert_eq!(
            with(Auto, "one_shot_line").unwrap(),
            asked(OneShotLl128, true),
            "a former name"
        );
        assert_eq!(with(OneShot, "two_shot_push").unwrap(), asked(OneShot, false));
        assert_eq!(with(OneShot, "nonsense").unwrap(), asked(OneShot, false));
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
