//! Which algorithms an engine has for a call.

use symmpool_allocator::{Result, Stream};

use crate::algorithm::{AUTO, AlgorithmId, CallShape, StandardCollective, not_on_devices};
use crate::call::StandardCall;
use crate::cuda::all_gather::ALL_GATHER;
use crate::cuda::all_reduce::ALL_REDUCE;
use crate::cuda::all_to_all::ALL_TO_ALL;
use crate::cuda::all_to_all::row::Exchange;
use crate::cuda::broadcast::BROADCAST;
use crate::cuda::engine::CudaEngine;
use crate::cuda::layout::params::ControlLayout;
use crate::cuda::reduce_scatter::REDUCE_SCATTER;
use crate::cuda::reduce_scatter::row::ReduceScatter;

/// The algorithms of a collective that exchanges data on devices, by name, whose calls may go another way than by the kernel of
/// all-to-alls.
#[doc(hidden)]
pub fn checked_exchanges(collective: StandardCollective) -> impl Iterator<Item = &'static str> {
    let rows = CudaEngine::exchanges(collective).iter();
    rows.filter(|row| row.has_own_way()).map(move |row| row.id.label(collective))
}

impl CudaEngine {
    /// The numbers of a collective's algorithms.
    pub(crate) fn algorithms(collective: StandardCollective) -> Vec<AlgorithmId> {
        match collective {
            StandardCollective::AllReduce => {
                ALL_REDUCE.iter().map(|entry| AlgorithmId::of_all_reduce(entry.name)).collect()
            }
            StandardCollective::ReduceScatter => {
                REDUCE_SCATTER.iter().map(|entry| entry.id).collect()
            }
            exchange => Self::exchanges(exchange).iter().map(|row| row.id).collect(),
        }
    }

    /// The rows of a collective that exchanges data.
    fn exchanges(collective: StandardCollective) -> &'static [&'static Exchange] {
        match collective {
            StandardCollective::AllGather => &ALL_GATHER,
            StandardCollective::Broadcast => &BROADCAST,
            StandardCollective::AllToAll => &ALL_TO_ALL,
            StandardCollective::AllReduce | StandardCollective::ReduceScatter => &[],
        }
    }

    /// Refuses an algorithm that is not of devices, or cannot serve a call.
    pub(crate) fn check_fit(&self, id: AlgorithmId, shape: &CallShape) -> Result<()> {
        self.check_fit_in(id, shape, &self.control)
    }

    /// Whether an algorithm can serve a call with all memory that the communicator may have.
    pub(crate) fn may_fit(&self, id: AlgorithmId, shape: &CallShape) -> bool {
        let layouts = self.layouts();
        layouts.last().is_some_and(|largest| self.check_fit_in(id, shape, largest).is_ok())
    }

    fn check_fit_in(
        &self,
        id: AlgorithmId,
        shape: &CallShape,
        layout: &ControlLayout,
    ) -> Result<()> {
        let collective = shape.collective;
        match collective {
            StandardCollective::AllReduce => self.check_all_reduce(id, shape, layout),
            StandardCollective::ReduceScatter => {
                ReduceScatter::named(id, shape.dtype, shape.input_window).map(drop)
            }
            _ if Self::algorithms(collective).contains(&id) => Ok(()),
            _ => Err(not_on_devices(collective, id, Self::algorithms(collective))),
        }
    }

    /// How a call moves data between ranks. Refuses algorithms that are not of devices.
    pub(in crate::cuda) fn exchange_of(
        &mut self,
        call: &StandardCall,
        stream: Stream,
    ) -> Result<&'static Exchange> {
        let StandardCall { collective, algorithm, .. } = *call;
        if algorithm == AUTO {
            return Ok(self.default_exchange);
        }
        let rows = Self::exchanges(collective);
        if let Some(row) = rows.iter().find(|row| row.id == algorithm) {
            return Ok(row);
        }
        self.ready()?;
        let why = not_on_devices(collective, algorithm, rows.iter().map(|row| row.id));
        Err(self.decline(why, stream))
    }
}
