//! The algorithms that are requested: by the options of a communicator, or by the environment where they leave the
//! choice open.

use std::env;
use std::ffi::OsStr;

use symmpool_allocator::{Error, Result, short};

use crate::algorithm::{AUTO, AlgorithmId, StandardCollective};

/// The name of an algorithm that is requested of a communicator. It must be the same on every rank, as ranks compare
/// what they use in the handshake of calls. It may be the name of one that is registered later.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RequestedName {
    collective: StandardCollective,
    pub(crate) name: String,
    pub(crate) by_environment: bool,
}

impl RequestedName {
    /// Returns the algorithm that options request, or the environment if they leave it open. `None` if both do.
    pub(crate) fn of(collective: StandardCollective, option: Option<&str>) -> Result<Option<Self>> {
        Self::with(collective, option, env::var_os(collective.variable()).as_deref())
    }

    fn with(
        collective: StandardCollective,
        option: Option<&str>,
        value: Option<&OsStr>,
    ) -> Result<Option<Self>> {
        let is_open = |name: &str| AlgorithmId::named(collective, name) == Some(AUTO);
        let value = value.filter(|value| !value.is_empty());
        let (name, by_environment) = match (option.filter(|name| !is_open(name)), value) {
            (Some(name), _) => (name, false),
            (None, None) => return Ok(None),
            (None, Some(value)) => {
                let name = value.to_str().map(str::trim).filter(|name| !name.is_empty());
                let name = name.ok_or_else(|| {
                    let variable = collective.variable();
                    Error::invalid_argument(format!("{variable}={}: no name", value.display()))
                })?;
                (name, true)
            }
        };
        if name.is_empty() {
            return Err(Error::invalid_argument(format!(
                "the algorithm of {collective} that options request has no name"
            )));
        }
        let (name, open) = (name.to_owned(), is_open(name));
        Ok((!open).then_some(Self { collective, name, by_environment }))
    }

    /// The number of the built-in algorithm of that name, of host memory or of devices, if there is one.
    pub(crate) fn id(&self) -> Option<AlgorithmId> {
        AlgorithmId::named(self.collective, &self.name)
    }

    /// Adds to an error that the environment requested the algorithm, not the caller.
    pub(crate) fn by_whom(&self, error: Error) -> Error {
        if self.by_environment {
            error.context(format!("with {}={}", self.collective.variable(), short(&self.name)))
        } else {
            error
        }
    }

    /// Adds the same to the error of an unsupported algorithm.
    pub(crate) fn blame(&self, error: Error) -> Error {
        if error.is_unsupported() { self.by_whom(error) } else { error }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_is_used_where_options_leave_the_choice_open() {
        use StandardCollective::{AllGather, AllReduce, AllToAll};
        let with = |collective, option: Option<&str>, value: Option<&str>| {
            let found = RequestedName::with(collective, option, value.map(OsStr::new));
            found.unwrap().map(|requested| (requested.name, requested.by_environment))
        };
        let name = |name: &str, by_environment| Some((name.to_owned(), by_environment));
        assert_eq!(with(AllReduce, None, None), None);
        assert_eq!(with(AllReduce, Some("auto"), Some("")), None);
        assert_eq!(with(AllReduce, None, Some("auto")), None);
        assert_eq!(with(AllReduce, None, Some("two_shot_push")), name("two_shot_push", true));
        assert_eq!(with(AllReduce, Some("auto"), Some("mine")), name("mine", true));
        assert_eq!(with(AllReduce, Some("one_shot"), Some("mine")), name("one_shot", false));
        assert_eq!(with(AllGather, None, Some(" ring ")), name("ring", true));
        assert_eq!(with(AllToAll, None, Some("auto")), None);
        assert!(RequestedName::with(AllReduce, Some(""), None).unwrap_err().is_invalid_argument());
        let blank = RequestedName::with(AllGather, None, Some(OsStr::new("  "))).unwrap_err();
        assert!(blank.to_string().contains("SYMMPOOL_ALL_GATHER"), "{blank}");
    }

    #[test]
    fn errors_say_that_the_environment_requested_an_algorithm() {
        let value = Some(OsStr::new("one_shot"));
        let forced = RequestedName::with(StandardCollective::AllReduce, None, value);
        let forced = forced.unwrap().unwrap();
        let text = forced.blame(Error::unsupported("no")).to_string();
        assert!(text.contains("SYMMPOOL_ALL_REDUCE=one_shot"), "{text}");
        let other = forced.blame(Error::invalid_argument("no")).to_string();
        assert!(!other.contains("SYMMPOOL"), "{other}");
    }
}
