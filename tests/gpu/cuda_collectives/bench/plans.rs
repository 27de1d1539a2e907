//! Times collectives that programs bring along, and built-in ones to compare them with.

use symmpool_allocator::{Block, Result, Stream};
use symmpool_collectives::plan::Collective;
use symmpool_collectives::{Algorithm, Communicator, DType, ReduceOp, Request, StandardCollective};

use super::{AlgorithmTimes, Bench};
use crate::{Options, plans};

impl Bench<'_> {
    /// Times what options name: `bytes` are those of the longer one of input and output.
    pub(super) fn plans(
        &mut self,
        options: &Options,
        (from, to): (&Block<u8>, &Block<u8>),
        times: &mut AlgorithmTimes,
    ) -> Result<()> {
        let world = self.pool.world();
        let (to, from) = (to.address() as *mut u8, from.address() as *const u8);
        let (dtype, op) = (DType::Bf16, ReduceOp::Sum);
        for plan in plans::all(world) {
            let name = format!("plan_{}", plan.name);
            if !options.algorithms.contains(&name) {
                continue;
            }
            let parts = match plan.collective {
                Collective::AllReduce | Collective::Broadcast | Collective::Custom { .. } => 1,
                _ => world as usize,
            };
            let algorithm = Algorithm::from_plan(plan).expect("a right program");
            self.registered(options, (&name, &algorithm, parts), (from, to), times)?;
        }
        for kernel in crate::native::kernels() {
            let name = format!("native_{}", kernel.name);
            if !options.algorithms.contains(&name) {
                continue;
            }
            let parts = crate::native::parts(&kernel, world);
            let algorithm = Algorithm::native(kernel)?;
            self.registered(options, (&name, &algorithm, parts), (from, to), times)?;
        }
        for collective in [StandardCollective::AllGather, StandardCollective::ReduceScatter] {
            let comm = Communicator::with_options(self.pool, &options.communicator())?;
            let algorithms = comm.algorithms();
            let of = |each: &&Algorithm| each.collective() == collective.name();
            let named = algorithms.iter().filter(of).map(|each| Some(each.name()));
            for algorithm in [None].into_iter().chain(named) {
                let name = match algorithm {
                    None => collective.name().to_owned(),
                    Some(algorithm) => format!("{}_{algorithm}", collective.name()),
                };
                if !options.algorithms.contains(&name) {
                    continue;
                }
                for &bytes in &options.sizes() {
                    let count = bytes as usize / dtype.size() / world as usize;
                    // SAFETY: both blocks are this long, and nothing else uses them.
                    let call = |stream: &Stream| unsafe {
                        comm.call(
                            &Request::at(collective, to, from, count, dtype)
                                .op(op)
                                .algorithm(algorithm),
                            stream,
                        )
                    };
                    self.note(&name, &comm, bytes, times, call)?;
                }
            }
        }
        Ok(())
    }

    /// Times an algorithm whose calls have so many parts. Sizes that it is not for are left out.
    fn registered(
        &mut self,
        options: &Options,
        (name, algorithm, parts): (&str, &Algorithm, usize),
        (from, to): (*const u8, *mut u8),
        times: &mut AlgorithmTimes,
    ) -> Result<()> {
        let (dtype, op) = (DType::Bf16, ReduceOp::Sum);
        let comm = Communicator::with_options(self.pool, &options.communicator())?;
        for &bytes in &options.sizes() {
            let count = bytes as usize / dtype.size() / parts;
            // SAFETY: both blocks are this long, and nothing else uses them.
            let call = |stream: &Stream| unsafe {
                comm.call(&Request::at(algorithm, to, from, count, dtype).op(op), stream)
            };
            // The first call compiles the kernel.
            match call(&self.stream) {
                Ok(()) => comm.synchronize(&self.stream)?,
                Err(why) if why.is_unsupported() => continue,
                Err(why) => return Err(why),
            }
            self.note(name, &comm, bytes, times, call)?;
        }
        Ok(())
    }

    fn note(
        &mut self,
        name: &str,
        comm: &Communicator,
        bytes: u64,
        times: &mut AlgorithmTimes,
        call: impl Fn(&Stream) -> Result<()>,
    ) -> Result<()> {
        if let Some((slowest, calls)) = self.time(comm, bytes, call)? {
            self.calls.entry(bytes).or_default().insert(name.to_owned(), calls);
            times.entry(bytes).or_default().push((name.to_owned(), slowest));
        }
        Ok(())
    }
}
