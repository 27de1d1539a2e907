//! Which algorithms an engine has for a call.

use symmpool_allocator::{Result, Stream};

use crate::algorithm::{AUTO, AlgorithmId, CallShape, StandardCollective};
use crate::call::StandardCall;
use crate::cuda::all_reduce::ALL_REDUCE;
use crate::cuda::engine::CudaEngine;
use crate::cuda::layout::params::Control;
use crate::cuda::select::exchange::{EXCHANGE, Exchange};
use crate::cuda::select::not_here;
use crate::cuda::select::reduce_scatter::{REDUCE_SCATTER, ReduceScatter};

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
            _ => {
                let of = |entry: &&Exchange| entry.collectives.contains(&collective);
                EXCHANGE.iter().filter(of).map(|entry| entry.id).collect()
            }
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

    fn check_fit_in(&self, id: AlgorithmId, shape: &CallShape, layout: &Control) -> Result<()> {
        let collective = shape.collective;
        match collective {
            StandardCollective::AllReduce => self.check_all_reduce(id, shape, layout),
            StandardCollective::ReduceScatter => {
                ReduceScatter::named(id, shape.dtype, shape.input_window).map(drop)
            }
            _ if Self::algorithms(collective).contains(&id) => Ok(()),
            _ => Err(not_here(collective, id, Self::algorithms(collective))),
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
        let all = Self::algorithms(collective);
        if !all.contains(&algorithm) {
            self.ready()?;
            return Err(self.decline(not_here(collective, algorithm, all), stream));
        }
        Ok(Exchange::of(algorithm))
    }
}
