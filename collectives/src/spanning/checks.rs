//! Checks of a rank's own arguments, before it makes a call: those of the engine of one host.

use symmpool_allocator::{Error, Result};

use super::state::SpanningEngine;
use crate::algorithm::{AUTO, StandardCollective};
use crate::call::{Arguments, StandardCall};
use crate::host::{checked, disjoint};
use crate::types::place::Place;

impl SpanningEngine {
    /// Refuses a call that this rank cannot make.
    pub(super) fn check(&self, call: &StandardCall) -> Result<()> {
        let Arguments { input, output, count, dtype, op, root } = call.arguments;
        if call.algorithm != AUTO {
            return Err(self.not_across(&format!("{} by a named algorithm", call.collective)));
        }
        let part = count.checked_mul(dtype.size());
        let all = part.and_then(|part| part.checked_mul(self.ranks.world()));
        let own = part.and_then(|part| part.checked_mul(self.ranks.rank as usize)).unwrap_or(0);
        match call.collective {
            StandardCollective::AllReduce => {
                self.reduction(call.collective.name(), dtype, op)?;
                self.check_places((input, part), (output, part), |from, to| from == to)
            }
            StandardCollective::ReduceScatter => {
                self.reduction(call.collective.name(), dtype, op)?;
                self.check_places((input, all), (output, part), |from, to| {
                    from.wrapping_add(own) == to
                })
            }
            StandardCollective::AllGather => {
                self.check_places((input, part), (output, all), |from, to| {
                    to.wrapping_add(own) == from
                })
            }
            StandardCollective::AllToAll => {
                self.check_places((input, all), (output, all), |_, _| false)
            }
            StandardCollective::Broadcast if root >= self.ranks.hosts.world() => {
                Err(Error::invalid_argument(format!(
                    "root {root} of a group of {} ranks",
                    self.ranks.world()
                )))
            }
            StandardCollective::Broadcast => {
                self.check_places((output, part), (output, Some(0)), |_, _| true)
            }
        }
    }

    /// Refuses an input and an output that are no memory, or overlap otherwise than `in_place` says of their addresses.
    pub(super) fn check_places(
        &self,
        (input, input_bytes): (Place, Option<usize>),
        (output, output_bytes): (Place, Option<usize>),
        in_place: impl Fn(usize, usize) -> bool,
    ) -> Result<()> {
        let (from, from_bytes) = (self.address(input), checked(input_bytes)?);
        let (to, to_bytes) = (self.address(output), checked(output_bytes)?);
        for (what, at, bytes) in [("input", from, from_bytes), ("output", to, to_bytes)] {
            if bytes > 0 && (at.is_null() || (at as usize).checked_add(bytes).is_none()) {
                return Err(Error::invalid_argument(format!(
                    "the {what} of {bytes} bytes at {at:?} is not memory"
                )));
            }
        }
        if in_place(from as usize, to as usize) {
            return Ok(());
        }
        disjoint((from, from_bytes), (to, to_bytes))
    }
}
