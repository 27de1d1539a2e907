//! Rehearsals of a call: which obstacles one leaves out, and what it finds.

/// Obstacles to a call's best case that a rehearsal leaves out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Lifts {
    /// Other communicators on the device, and other libraries.
    pub(crate) company: bool,
    /// The bound of SMs, and compute beside calls, as options say.
    pub(crate) options: bool,
    /// That the memory has not grown yet.
    pub(crate) memory: bool,
}

/// Result of a rehearsal: how the call would run on this rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Rehearsed {
    /// The last algorithm that the engine chose.
    pub(crate) algorithm: String,
    /// Way in which it was chosen, where the engine has several ways.
    pub(crate) chosen_by: Option<&'static str>,
    /// The blocks and threads of each kernel, in the order of launches.
    pub(crate) launches: Vec<(u32, u32)>,
    /// How many copies copy engines make.
    pub(crate) copies: usize,
    /// Whether every kernel may start while the one before it on its stream still waits for peers, or works.
    pub(crate) starts_early: bool,
    /// Whether a kernel is not loaded yet, so that nobody knows its grid.
    pub(crate) is_not_loaded: bool,
    /// Bytes of memory that it takes first, if every rank has room.
    pub(crate) takes: u64,
    /// Why it takes no memory for large calls, where there is none yet and it has use for it.
    pub(crate) takes_none: Option<String>,
}
