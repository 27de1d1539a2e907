//! The algorithms of all-to-alls, by name.

/// The algorithm of all-to-alls. Results are the same with each of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum AllToAllAlgorithm {
    /// Chosen by what each pair of ranks exchanges, and by kind of memory.
    #[default]
    Auto = 0,
    /// Low latency. On devices, data goes in one hop into the receiver's inbox, in the Lamport protocol: the inbox holds
    /// a certain pattern, and the receiver polls until each vector differs from it (data that contains the pattern is
    /// escaped). This holds as far as the inbox has room for a pair's data. In host memory, data goes through the
    /// sender's scratch.
    Lamport = 1,
    /// In host memory, receivers read inputs that are windows. On devices, senders write into outputs that are windows,
    /// and through the receiver's scratch into others.
    Direct = 2,
    /// On devices, copy engines move the data of [`all_to_all`] and [`all_gather`], whose parts are equal, if outputs
    /// are windows at the same offset on all ranks; all-gathers also into other memory, through scratch. Everything else
    /// is as with [`Self::Direct`].
    ///
    /// [`all_to_all`]: crate::Communicator::all_to_all_into
    /// [`all_gather`]: crate::Communicator::all_gather_into
    Copy = 3,
    /// A staggered ring: as [`Self::Direct`], but on devices every rank sends to one peer after the other, in an order
    /// in which no two ranks send to the same one at a time, whatever the counts. `Auto` and `Direct` do the same where
    /// all pairs exchange about the same amount, of at least 1 MiB.
    Ring = 4,
}

impl AllToAllAlgorithm {
    /// All algorithms, `Auto` first.
    pub const ALL: [Self; 5] = [Self::Auto, Self::Lamport, Self::Direct, Self::Copy, Self::Ring];

    /// The name used in options and reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Lamport => "lamport",
            Self::Direct => "direct",
            Self::Copy => "copy",
            Self::Ring => "ring",
        }
    }

    /// The algorithm of this [`name`](Self::name).
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|algorithm| algorithm.name() == name)
    }
}
