//! Plans: what the check proves and refuses, and what runs of them leave.

mod builder;
mod errors;
mod format;
mod more_programs;
mod odd_programs;
mod odd_runs;
mod programs;
mod random;
mod random_host;
mod registry;
mod runs;
