//! The built-in algorithms of host memory: what each collective's file has in its table.

use symmpool_allocator::{Error, Result};

use super::{all_gather, all_reduce, all_to_all, broadcast, reduce_scatter};
use crate::algorithm::{AlgorithmId, CallShape, StandardCollective};
use crate::host::HostEngine;
use crate::host::engine::host_algorithm::HostAlgorithm;

/// A collective's algorithms. All-to-alls have routes instead.
fn table(collective: StandardCollective) -> Option<&'static [HostAlgorithm]> {
    match collective {
        StandardCollective::AllReduce => Some(&all_reduce::ALGORITHMS),
        StandardCollective::ReduceScatter => Some(&reduce_scatter::ALGORITHMS),
        StandardCollective::AllGather => Some(&all_gather::ALGORITHMS),
        StandardCollective::Broadcast => Some(&broadcast::ALGORITHMS),
        StandardCollective::AllToAll => None,
    }
}

impl HostEngine {
    /// A collective's algorithms.
    pub(crate) fn algorithms(collective: StandardCollective) -> Vec<AlgorithmId> {
        match table(collective) {
            Some(table) => table.iter().map(|entry| entry.id).collect(),
            None => all_to_all::ROUTES.iter().map(|(id, _)| *id).collect(),
        }
    }

    /// Refuses an algorithm that is not of host memory, or cannot serve a call.
    pub(crate) fn check_fit(&self, id: AlgorithmId, shape: &CallShape) -> Result<()> {
        match table(shape.collective) {
            Some(table) => self.entry(table, id, shape).map(drop),
            None if all_to_all::route(id).is_some() => Ok(()),
            None => Err(self.not_here(id, shape.collective)),
        }
    }

    #[cold]
    pub(crate) fn not_here(&self, id: AlgorithmId, collective: StandardCollective) -> Error {
        let all = Self::algorithms(collective);
        let all: Vec<&str> = all.into_iter().map(|each| each.label(collective)).collect();
        Error::unsupported(format!(
            "the {} algorithm {} on rank {}: it runs on devices only; in host memory there are {}",
            collective.in_words(),
            id.label(collective),
            self.rank(),
            all.join(", ")
        ))
    }
}
