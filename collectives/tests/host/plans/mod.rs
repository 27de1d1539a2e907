//! Plans: what the check proves and refuses, and what runs of them leave.

mod builder;
mod errors;
mod format;
mod more_programs;
mod programs;
mod registry;
mod runs;
