//! Which algorithms an engine has for a call.

use symmpool_allocator::{Result, Stream};

use crate::algorithm::{AUTO, CallShape, StandardCollective};
use crate::cuda::engine::CudaEngine;
use crate::cuda::layout::params::Control;
use crate::cuda::select::all_reduce::ALL_REDUCE;
use crate::cuda::select::exchange::{EXCHANGE, Exchange};
use crate::cuda::select::not_here;
use crate::cuda::select::reduce_scatter::{REDUCE_SCATTER, Scatter};

impl CudaEngine {
    /// The numbers of a collective's algorithms.
    pub(crate) fn algorithms(collective: StandardCollective) -> Vec<u8> {
        match collective {
            StandardCollective::AllReduce => {
                ALL_REDUCE.iter().map(|entry| entry.name as u8).collect()
            }
            StandardCollective::ReduceScatter => {
                REDUCE_SCATTER.iter().map(|entry| entry.code).collect()
            }
            _ => {
                let of = |entry: &&Exchange| entry.collectives.contains(&collective);
                EXCHANGE.iter().filter(of).map(|entry| entry.code).collect()
            }
        }
    }

    /// Refuses an algorithm that is not of devices, or cannot serve a call.
    pub(crate) fn check_fit(&self, code: u8, shape: &CallShape) -> Result<()> {
        self.check_fit_in(code, shape, &self.control)
    }

    /// Whether an algorithm can serve a call with all memory that the communicator may have.
    pub(crate) fn may_fit(&self, code: u8, shape: &CallShape) -> bool {
        let layouts = self.layouts();
        layouts.last().is_some_and(|largest| self.check_fit_in(code, shape, largest).is_ok())
    }

    fn check_fit_in(&self, code: u8, shape: &CallShape, layout: &Control) -> Result<()> {
        let collective = shape.collective;
        match collective {
            StandardCollective::AllReduce => self.check_all_reduce(code, shape, layout),
            StandardCollective::ReduceScatter => {
                Scatter::named(code, shape.dtype, shape.input_window).map(drop)
            }
            _ if Self::algorithms(collective).contains(&code) => Ok(()),
            _ => Err(not_here(collective, code, Self::algorithms(collective))),
        }
    }

    /// Runs an exchange with the algorithm of this number, if it is not [`AUTO`].
    pub(crate) fn exchanging(
        &mut self,
        code: u8,
        collective: StandardCollective,
        stream: Stream,
        run: impl FnOnce(&mut Self) -> Result<()>,
    ) -> Result<()> {
        if code == AUTO {
            return run(self);
        }
        if !Self::algorithms(collective).contains(&code) {
            self.ready()?;
            return Err(
                self.decline(not_here(collective, code, Self::algorithms(collective)), stream)
            );
        }
        let usual = std::mem::replace(&mut self.exchange, Exchange::of(code));
        let result = run(self);
        self.exchange = usual;
        result
    }
}
