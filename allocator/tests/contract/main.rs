//! Tests of the contract of pools, with ranks that are threads of one process.
//!
//! | file | tests |
//! | --- | --- |
//! | `faults` | a failure of one rank is the same error on all ranks, and is undone |
//! | `half_way` | a rank that did not complete what the others did is named by all ranks from then on |
//! | `misuse` | bad arguments, wrong owners and calls at the wrong time give typed errors that say what to do |
//! | `settings` | ranks with different settings, and stores that cannot be used |
//! | `divergence` | programs that break symmetry learn where |
//! | `ranks` | none: it runs ranks, and makes the kinds of memory that they use |
//! | `properties` | random programs: the same placement on every rank, and memory that holds what was written |

mod divergence;
mod faults;
mod half_way;
mod misuse;
mod properties;
mod ranks;
mod settings;
