//! Which way all-to-alls go, and who asked for it.

use std::env;
use std::ffi::OsStr;

use symmpool_allocator::{Error, Result};

use crate::former_names::renamed;

/// Names an algorithm for every communicator whose options name none.
const VARIABLE: &str = "SYMMPOOL_ALL_TO_ALL";

/// Which algorithm all-to-alls use. Results are the same with each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum AllToAllAlgorithm {
    /// By what each pair of ranks exchanges, and by kind of memory.
    #[default]
    Auto = 0,
    /// Low latency: in host memory through the sender's scratch; on devices in one hop into the receiver's
    /// inbox, in vectors of 16 bytes that show by themselves that they have arrived, as far as the inbox has
    /// room for a pair's data.
    Ll = 1,
    /// In host memory out of inputs that are windows; on devices into outputs that are windows, and
    /// through the receiver's scratch into others.
    Direct = 2,
    /// On devices by copy engines, where [`all_to_all`] or [`all_gather`] is called, whose parts are
    /// equal, and outputs are windows, at one offset on all ranks; else as [`Self::Direct`].
    ///
    /// [`all_to_all`]: crate::Communicator::all_to_all_into
    /// [`all_gather`]: crate::Communicator::all_gather_into
    Copy = 3,
    /// A staggered ring: as [`Self::Direct`], but on devices every rank serves one peer after the other,
    /// in an order in which no two send to one, and in step, whatever the counts. The automatic choice
    /// and `Direct` do so where all pairs exchange about as much, from 1 MiB a pair on.
    Ring = 4,
}

impl AllToAllAlgorithm {
    /// All of them, `Auto` first.
    pub const ALL: [Self; 5] = [Self::Auto, Self::Ll, Self::Direct, Self::Copy, Self::Ring];

    /// Accepted until the next version.
    const FORMER_NAMES: &[(&str, Self)] = &[("packet", Self::Ll)];

    /// The name used in options and reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Ll => "ll",
            Self::Direct => "direct",
            Self::Copy => "copy",
            Self::Ring => "ring",
        }
    }

    /// The algorithm of this [`name`](Self::name). The former name `packet` is accepted, with a warning.
    pub fn named(name: &str) -> Option<Self> {
        let found = Self::ALL.into_iter().find(|algorithm| algorithm.name() == name);
        found.or_else(|| renamed(name, Self::FORMER_NAMES, Self::name))
    }

    /// This one, or what the environment names if it leaves the choice open.
    pub(crate) fn or_environment(self) -> Result<Self> {
        self.or_named(env::var_os(VARIABLE).as_deref())
    }

    fn or_named(self, value: Option<&OsStr>) -> Result<Self> {
        let Some(value) = value.filter(|value| self == Self::Auto && !value.is_empty()) else {
            return Ok(self);
        };
        value.to_str().and_then(Self::named).ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            Error::invalid_argument(format!(
                "{VARIABLE}={}: no such algorithm; there are {names}",
                value.display()
            ))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_speaks_where_options_do_not() {
        use AllToAllAlgorithm::{Auto, Direct, Ll};
        let with = |option: AllToAllAlgorithm, value| option.or_named(Some(OsStr::new(value)));
        assert_eq!(Auto.or_named(None).unwrap(), Auto);
        assert_eq!(with(Auto, "").unwrap(), Auto);
        assert_eq!(with(Auto, "ll").unwrap(), Ll);
        assert_eq!(with(Direct, "ll").unwrap(), Direct);
        assert_eq!(with(Direct, "nonsense").unwrap(), Direct);
        assert_eq!(with(Auto, "packet").unwrap(), Ll, "the former name");
        let error = with(Auto, "nonsense").unwrap_err();
        assert!(error.is_invalid_argument());
        let text = error.to_string();
        assert!(text.contains("SYMMPOOL_ALL_TO_ALL=nonsense") && text.contains("direct"), "{text}");
    }
}
