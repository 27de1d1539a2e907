//! The built-in algorithms of host memory: what each collective's file has in its table.

use symmpool_allocator::{Error, Result};

use super::HostEngine;
use super::collectives::{all_gather, all_reduce, all_to_all, broadcast, reduce_scatter};
use super::host_algorithm::HostAlgorithm;
use crate::algorithm::{CallShape, StandardCollective, name_of};

impl HostEngine {
    /// The numbers of a collective's algorithms.
    pub(crate) fn algorithms(collective: StandardCollective) -> Vec<u8> {
        fn codes<W>(table: &[HostAlgorithm<W>]) -> Vec<u8> {
            table.iter().map(|entry| entry.code).collect()
        }
        match collective {
            StandardCollective::AllReduce => codes(&all_reduce::ALGORITHMS),
            StandardCollective::ReduceScatter => codes(&reduce_scatter::ALGORITHMS),
            StandardCollective::AllGather => codes(&all_gather::ALGORITHMS),
            StandardCollective::Broadcast => codes(&broadcast::ALGORITHMS),
            StandardCollective::AllToAll => {
                all_to_all::ROUTES.iter().map(|(code, _)| *code).collect()
            }
        }
    }

    /// Refuses an algorithm that is not of host memory, or cannot serve a call.
    pub(crate) fn check_fit(&self, code: u8, shape: &CallShape) -> Result<()> {
        match shape.collective {
            StandardCollective::AllReduce => {
                self.entry(&all_reduce::ALGORITHMS, code, shape).map(drop)
            }
            StandardCollective::ReduceScatter => {
                self.entry(&reduce_scatter::ALGORITHMS, code, shape).map(drop)
            }
            StandardCollective::AllGather => {
                self.entry(&all_gather::ALGORITHMS, code, shape).map(drop)
            }
            StandardCollective::Broadcast => {
                self.entry(&broadcast::ALGORITHMS, code, shape).map(drop)
            }
            StandardCollective::AllToAll if all_to_all::route(code).is_some() => Ok(()),
            StandardCollective::AllToAll => Err(self.not_here(code, StandardCollective::AllToAll)),
        }
    }

    /// The entry of an algorithm that can serve the call.
    pub(crate) fn entry<W>(
        &self,
        table: &'static [HostAlgorithm<W>],
        code: u8,
        shape: &CallShape,
    ) -> Result<&'static HostAlgorithm<W>> {
        let found = table.iter().find(|entry| entry.code == code);
        let entry = found.ok_or_else(|| self.not_here(code, shape.collective))?;
        (entry.fits)(self, shape).map_err(|why| {
            let name = name_of(shape.collective, code).unwrap_or("?");
            Error::unsupported(format!(
                "the {} algorithm {name} on rank {}: {why}",
                shape.collective.in_words(),
                self.rank()
            ))
        })?;
        Ok(entry)
    }

    #[cold]
    pub(crate) fn not_here(&self, code: u8, collective: StandardCollective) -> Error {
        let name = |code: &u8| name_of(collective, *code).unwrap_or("?");
        let all: Vec<&str> = Self::algorithms(collective).iter().map(name).collect();
        Error::unsupported(format!(
            "the {} algorithm {} on rank {}: it runs on devices only; in host memory there are {}",
            collective.in_words(),
            name(&code),
            self.rank(),
            all.join(", ")
        ))
    }
}
