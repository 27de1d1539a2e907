//! What pools promise, held against ranks that are threads of one process.
//!
//! | part | holds |
//! | --- | --- |
//! | `faults` | a failure of one rank is the same error on all, undone, and survived |
//! | `half_way` | a rank that did not finish what the others did is named by all from then on |
//! | `misuse` | bad arguments, wrong owners, wrong times: typed errors that say what to do |
//! | `settings` | ranks that do not fit together, and stores that cannot be met in |
//! | `divergence` | programs that break symmetry are told where |
//! | `properties` | random programs: same places everywhere, and memory that is what was written |

mod divergence;
mod faults;
mod half_way;
mod misuse;
mod properties;
mod ranks;
mod settings;
