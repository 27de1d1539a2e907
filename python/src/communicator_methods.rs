//! The methods of the class `Communicator`.

#![allow(unsafe_code)] // passes on addresses that tensors gave

use std::path::PathBuf;
use std::sync::Arc;

use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use symmpool_collectives::ReduceOp::Sum as SUM;
use symmpool_collectives::StandardCollective::{AllGather, AllReduce, Broadcast, ReduceScatter};

use crate::algorithm::{self, Algorithm};
use crate::arguments::Argument;
use crate::communicator::Communicator;
use crate::errors::{OrRaise, exception};
use crate::explanation::{self, Asked};
use crate::mark::StreamPosition;
use crate::name::Name;
use crate::nested::{self, GroupOffer};
use crate::number::Number;
use crate::one_sided::{self, Way};
use crate::options::{self, Sizes};
use crate::p2p::{decline_message, send_or_recv};
use crate::pool::Pool;
use crate::reading::Refusal;
use crate::{selection, statistics, stream};

#[pymethods]
impl Communicator {
    #[new]
    #[pyo3(
        signature = (
            pool, *, timeout = Number::of(30.0), algorithm = "auto", all_to_all = "auto",
            algorithms = None, scratch_bytes = None, concurrent = None, sm_budget = None, beside_compute = false,
            device_memory_bytes = None, device_memory_grows = false, _serves_subgroups = false
        ),
        text_signature = "(pool, *, timeout=30.0, algorithm='auto', all_to_all='auto', algorithms=None, \
                          scratch_bytes=None, concurrent=None, sm_budget=None, beside_compute=False, \
                          device_memory_bytes=None, device_memory_grows=False)"
    )]
    #[allow(clippy::too_many_arguments)] // options, with names
    fn new(
        py: Python<'_>,
        pool: &Bound<'_, Pool>,
        timeout: Number<f64>,
        algorithm: &str,
        all_to_all: &str,
        algorithms: Option<&Bound<'_, PyDict>>,
        scratch_bytes: Option<Number<u64>>,
        concurrent: Option<Number<u32>>,
        sm_budget: Option<Number<u32>>,
        beside_compute: bool,
        device_memory_bytes: Option<Number<u64>>,
        device_memory_grows: bool,
        _serves_subgroups: bool,
    ) -> PyResult<Self> {
        let (object, pool) = (pool, pool.get());
        let sizes = Sizes {
            scratch_bytes,
            device_memory_bytes,
            device_memory_grows,
            serves_subgroups: _serves_subgroups,
            concurrent,
            sm_budget,
            beside_compute,
        };
        pool.pool.check("a pool").or_raise(py)?;
        let read =
            options::read(py, pool.device, timeout, algorithm, all_to_all, algorithms, sizes);
        let (calls, algorithm) = options::open(py, (object, pool), read)?;
        Ok(Self::on(calls, algorithm, true))
    }

    /// Returns the same communicator, whose calls say nothing to autograd: their callers do, or leave it to torch.
    fn _unseen(&self) -> Self {
        Self::on(Arc::clone(&self.calls), self.algorithm.clone(), false)
    }

    /// Says to `ranks` of this communicator's that this rank makes a communicator of them, under a `key` of two numbers that
    /// no other group of theirs has. None where it makes none so. See `symmpool.communicators.subgroups`.
    #[allow(clippy::needless_pass_by_value)] // Python passes it by value
    fn _offer(
        &self,
        py: Python<'_>,
        ranks: Vec<u32>,
        key: (u64, u64),
        timeout: Number<f64>,
    ) -> PyResult<Option<GroupOffer>> {
        nested::offer(py, &self.calls, &ranks, key, timeout)
    }

    /// Whether it was made of an offer.
    #[getter]
    fn _is_nested(&self) -> bool {
        self.calls.comm.is_nested()
    }

    /// Behind a barrier of a communicator that was made of an offer.
    fn _all_are_here(&self) {
        self.calls.comm.all_are_here();
    }

    /// Reduces every rank's `tensor` into every rank's `out`, of the same length and type; in place
    /// without one. `op` is "sum", "prod", "min", "max" or "avg". `algorithm` is the name of one that
    /// was registered, or of a built-in one (see `algorithms`); so it is for the other collectives.
    #[pyo3(
        signature = (tensor, op = None, out = None, stream = None, *, algorithm = None),
        text_signature = "($self, tensor, op='sum', out=None, stream=None, *, algorithm=None)"
    )]
    fn all_reduce(
        &self,
        py: Python<'_>,
        tensor: Argument<'_, '_>,
        op: Option<Argument<'_, '_>>,
        out: Option<Argument<'_, '_>>,
        stream: Option<Argument<'_, '_>>,
        algorithm: Option<Name<'_>>,
    ) -> PyResult<()> {
        let stream = self.calls.stream(py, stream)?;
        let found = self.calls.of_all_reduce(tensor, op, out);
        let (input, output, op) = self.calls.or_decline(py, stream, found)?;
        let which = (AllReduce, algorithm, op, 0);
        // SAFETY: both are tensors of this length and type, contiguous, on the pool's device, and
        // the caller's frame keeps them alive for the length of the call; how long work on a
        // stream needs them, and who else may touch them, is the documented contract of the class.
        unsafe { self.calls.make(py, which, (output, input), input.count, stream) }?;
        self.wrote(&[Some(out.unwrap_or(tensor))])
    }

    /// Calls `all_reduce` on the current stream, where it takes these arguments. Else returns False, without a word
    /// to others.
    fn _try_all_reduce(
        &self,
        py: Python<'_>,
        tensor: Argument<'_, '_>,
        op: Option<Argument<'_, '_>>,
        out: Option<Argument<'_, '_>>,
    ) -> PyResult<bool> {
        self.calls.try_all_reduce(py, tensor, op, out)
    }

    /// Takes part in a call whose arguments the caller refuses for the reason `why`: the other ranks raise
    /// DivergedError, or of a `message`, "send" or "recv" and the other rank, that rank. Raises
    /// InvalidArgumentError with the reason, or why the communicator has failed.
    #[pyo3(signature = (why, message = None, stream = None))]
    fn _decline(
        &self,
        py: Python<'_>,
        why: String,
        message: Option<(String, u32)>,
        stream: Option<Argument<'_, '_>>,
    ) -> PyResult<()> {
        if let Some((call, peer)) = message {
            return Err(decline_message(&self.calls, py, (call == "recv", peer), why, stream));
        }
        let stream = self.calls.stream(py, stream)?;
        Err(self.calls.decline(py, stream, Refusal::Invalid(why)))
    }

    /// Reduces part r of every rank's `input` into rank r's `output`. `input` has as many elements
    /// as all outputs together. `op` as in all_reduce.
    #[pyo3(
        signature = (output, input, op = None, stream = None, *, algorithm = None),
        text_signature = "($self, output, input, op='sum', stream=None, *, algorithm=None)"
    )]
    fn reduce_scatter_tensor(
        &self,
        py: Python<'_>,
        output: Argument<'_, '_>,
        input: Argument<'_, '_>,
        op: Option<Argument<'_, '_>>,
        stream: Option<Argument<'_, '_>>,
        algorithm: Option<Name<'_>>,
    ) -> PyResult<()> {
        let stream = self.calls.stream(py, stream)?;
        let found = self.calls.of_reduce_scatter(output, input, op);
        let (from, to, op) = self.calls.or_decline(py, stream, found)?;
        let which = (ReduceScatter, algorithm, op, 0);
        // SAFETY: both are contiguous tensors on the pool's device, the input with `world` times the output's length;
        // the caller's frame keeps them alive for the call, and the documented contract of the class says how long a
        // stream needs them.
        unsafe { self.calls.make(py, which, (to, from), to.count, stream) }?;
        self.wrote(&[Some(output)])
    }

    /// Copies rank r's `input_tensor` to part r of every rank's `output_tensor`, which has as many elements
    /// as all inputs together.
    #[pyo3(signature = (output_tensor, input_tensor, stream = None, *, algorithm = None))]
    fn all_gather_into_tensor(
        &self,
        py: Python<'_>,
        output_tensor: Argument<'_, '_>,
        input_tensor: Argument<'_, '_>,
        stream: Option<Argument<'_, '_>>,
        algorithm: Option<Name<'_>>,
    ) -> PyResult<()> {
        let stream = self.calls.stream(py, stream)?;
        let found = self.calls.of_all_gather(output_tensor, input_tensor);
        let (input, output) = self.calls.or_decline(py, stream, found)?;
        let which = (AllGather, algorithm, SUM, 0);
        // SAFETY: both are contiguous tensors on the pool's device, the output with `world` times the input's length;
        // the caller's frame keeps them alive for the call, and the documented contract of the class says how long a
        // stream needs them.
        unsafe { self.calls.make(py, which, (output, input), input.count, stream) }?;
        self.wrote(&[Some(output_tensor)])
    }

    /// Copies rank `src`'s `tensor` into every other rank's.
    #[pyo3(signature = (tensor, src, stream = None, *, algorithm = None))]
    fn broadcast(
        &self,
        py: Python<'_>,
        tensor: Argument<'_, '_>,
        src: Number<u32>,
        stream: Option<Argument<'_, '_>>,
        algorithm: Option<Name<'_>>,
    ) -> PyResult<()> {
        let stream = self.calls.stream(py, stream)?;
        let (found, src) =
            self.calls.or_decline(py, stream, self.calls.of_broadcast(tensor, src))?;
        let which = (Broadcast, algorithm, SUM, src);
        // SAFETY: the tensor has this length and type, is contiguous and on the pool's device; the caller's frame
        // keeps it alive for the call, and the documented contract of the class says how long a stream needs it.
        unsafe { self.calls.make(py, which, (found, found), found.count, stream) }?;
        // The root's is only read.
        self.wrote(&[(src != self.rank()).then_some(tensor)])
    }

    #[doc = include_str!("all_to_all_single.md")]
    #[pyo3(signature = (
        output, input, output_split_sizes = None, input_split_sizes = None, stream = None, *, algorithm = None
    ))]
    #[allow(clippy::too_many_arguments)] // a call has these arguments
    fn all_to_all_single(
        &self,
        py: Python<'_>,
        output: Argument<'_, '_>,
        input: Argument<'_, '_>,
        output_split_sizes: Option<Argument<'_, '_>>,
        input_split_sizes: Option<Argument<'_, '_>>,
        stream: Option<Argument<'_, '_>>,
        algorithm: Option<Name<'_>>,
    ) -> PyResult<()> {
        let sizes = (output_split_sizes, input_split_sizes);
        self.calls.all_to_all_single(py, (output, input), sizes, algorithm, stream)?;
        self.wrote(&[Some(output)])
    }

    /// Sends rows (indices of the first dimension) to rank r, as many as `input_splits[r]` says when
    /// the call runs: on CUDA when `stream` comes to it, so that a captured graph replays with whatever
    /// splits are there then. Parts lie in rank order, without gaps, in `input` and `output`.
    ///
    /// Splits are tensors of int32 or int64 with one element for each rank, on the pool's device. How many rows each rank
    /// sent is written to `output_splits`, and where in `output` they begin to `output_offsets`, if these are given. What
    /// `output` has no room for is not written; it is counted in `output_splits` all the same. Then OverflowError is
    /// raised on every rank, and if a rank's splits are negative or more than its input has, InvalidArgumentError; on the
    /// CPU by the call, on CUDA by the next `synchronize`. The communicator stays usable after both.
    #[pyo3(signature = (
        output, input, input_splits, output_splits = None, output_offsets = None, stream = None
    ))]
    #[expect(clippy::too_many_arguments, reason = "a call of Python, with names")]
    fn all_to_all_v(
        &self,
        py: Python<'_>,
        output: Argument<'_, '_>,
        input: Argument<'_, '_>,
        input_splits: Argument<'_, '_>,
        output_splits: Option<Argument<'_, '_>>,
        output_offsets: Option<Argument<'_, '_>>,
        stream: Option<Argument<'_, '_>>,
    ) -> PyResult<()> {
        let written = (output_splits, output_offsets);
        self.calls.all_to_all_v(py, (output, input), input_splits, written, stream)?;
        self.wrote(&[Some(output), written.0, written.1])
    }

    /// On the CPU, returns once every rank has called it. On CUDA, holds `stream` until every rank's stream
    /// has come to it. It adds to each element of `waits`, int64, an element for each rank, how long this rank
    /// waited for that one: in nanoseconds on the CPU, in clock cycles of an SM on CUDA.
    #[pyo3(signature = (stream = None, *, waits = None))]
    fn barrier(
        &self,
        py: Python<'_>,
        stream: Option<Argument<'_, '_>>,
        waits: Option<Argument<'_, '_>>,
    ) -> PyResult<()> {
        self.calls.barrier(py, stream, waits)?;
        self.wrote(&[waits])
    }

    /// Sends `tensor` to rank `dst`, whose next `recv` from this rank takes it: as many elements, of the same type.
    /// Messages from one rank to another come in the order in which they are sent, and are in no order with others or with
    /// collectives. Complete when `tensor` may be written again: on the CPU when this returns, on CUDA when `stream` is
    /// past it. Where there is room for the message that waits for nobody; else for the receiver, for `timeout` seconds of
    /// the communicator. Where that expects something else, or one of the two refuses its own arguments, both fail:
    /// DivergedError. On the CPU a message that was sent already then fails the sender's next one to or from that rank,
    /// which is not made, and the communicator stays usable. On CUDA it fails on all ranks.
    #[pyo3(signature = (tensor, dst, stream = None))]
    fn send(
        &self,
        py: Python<'_>,
        tensor: Argument<'_, '_>,
        dst: Number<u32>,
        stream: Option<Argument<'_, '_>>,
    ) -> PyResult<()> {
        send_or_recv(&self.calls, py, false, tensor, dst, stream)
    }

    /// Receives rank `src`'s next message for this rank into `tensor`, which it fills: see `send`. On the CPU
    /// the message is there when this returns, on CUDA when `stream` is past it. One that does not come
    /// fails the communicator, as a late rank does.
    #[pyo3(signature = (tensor, src, stream = None))]
    fn recv(
        &self,
        py: Python<'_>,
        tensor: Argument<'_, '_>,
        src: Number<u32>,
        stream: Option<Argument<'_, '_>>,
    ) -> PyResult<()> {
        send_or_recv(&self.calls, py, true, tensor, src, stream)?;
        self.wrote(&[Some(tensor)])
    }

    /// Copies `src` to where `peer` has what this rank has at `dst`, a tensor in windows of the pool, such as a part
    /// of one; both have as many elements of one type. The peer may read it once its `wait` has taken a
    /// `signal` that this thread, or `stream`, made later. On the CPU the copy is done when this returns, on CUDA
    /// when `stream` is past it; nobody else writes the elements meanwhile. With `engine="copy"` a copy engine
    /// makes it, which takes no SM ("kernel": SMs). No collective. `peer` may be this rank. Raises
    /// InvalidArgumentError for a `dst` outside of windows, and commits nothing.
    #[pyo3(signature = (dst, src, peer, stream = None, *, engine = "kernel"))]
    fn put(
        &self,
        py: Python<'_>,
        dst: Argument<'_, '_>,
        src: Argument<'_, '_>,
        peer: Number<u32>,
        stream: Option<Argument<'_, '_>>,
        engine: &str,
    ) -> PyResult<()> {
        let is_own = peer.is(&self.rank());
        one_sided::copy(&self.calls, py, Way::Put, (dst, src), peer, engine, stream)?;
        self.wrote(&[is_own.then_some(dst)])
    }

    /// Copies from where `peer` has what this rank has at `src`, a tensor in windows of the pool, to `dst`. The peer
    /// has written it before a signal that this rank's `wait` has taken. Otherwise as `put`.
    #[pyo3(signature = (dst, src, peer, stream = None, *, engine = "kernel"))]
    fn get(
        &self,
        py: Python<'_>,
        dst: Argument<'_, '_>,
        src: Argument<'_, '_>,
        peer: Number<u32>,
        stream: Option<Argument<'_, '_>>,
        engine: &str,
    ) -> PyResult<()> {
        one_sided::copy(&self.calls, py, Way::Get, (dst, src), peer, engine, stream)?;
        self.wrote(&[Some(dst)])
    }

    /// Signals `peer` on a channel from 0 to 15. What this thread, or `stream`, did before is visible
    /// to the peer once its `wait` has taken the signal. Signals are counted; they may run ahead of
    /// the waits. No collective: only the two ranks take part. With `engine="memory"` it is a memory operation of
    /// the stream and takes no SM; such signals have channels of their own, which hold one each: on CUDA the
    /// next one waits on the stream until a `wait` of the same engine has taken the last.
    #[pyo3(
        signature = (peer, channel = Number::of(0), stream = None, *, engine = "kernel"),
        text_signature = "($self, peer, channel=0, stream=None, *, engine='kernel')"
    )]
    fn signal(
        &self,
        py: Python<'_>,
        peer: Number<u32>,
        channel: Number<u32>,
        stream: Option<Argument<'_, '_>>,
        engine: &str,
    ) -> PyResult<()> {
        one_sided::signal_or_wait(&self.calls, py, (peer, channel), None, engine, stream)
    }

    /// Waits for `peer`'s next signal on a channel: the nth wait takes the nth signal. On the CPU
    /// this thread waits; on CUDA `stream` does. At most `timeout` seconds; then TimeoutError: on
    /// the CPU at once, and the communicator can be used on; on CUDA from a later call, and it
    /// has failed. With `engine="memory"` it takes signals of that engine, and on CUDA no SM is held meanwhile.
    #[pyo3(
        signature = (
            peer, channel = Number::of(0), timeout = Number::of(30.0), stream = None, *, engine = "kernel"
        ),
        text_signature = "($self, peer, channel=0, timeout=30.0, stream=None, *, engine='kernel')"
    )]
    fn wait(
        &self,
        py: Python<'_>,
        peer: Number<u32>,
        channel: Number<u32>,
        timeout: Number<f64>,
        stream: Option<Argument<'_, '_>>,
        engine: &str,
    ) -> PyResult<()> {
        one_sided::signal_or_wait(&self.calls, py, (peer, channel), Some(timeout), engine, stream)
    }

    /// Waits for every other rank to come to the same barrier on a channel, where it is in no order with
    /// collectives. At most `timeout` seconds; then TimeoutError as in `wait`. On the CPU the barrier is
    /// not over then: the next call on the channel goes on with it.
    #[pyo3(
        signature = (channel, timeout = Number::of(30.0), stream = None),
        text_signature = "($self, channel, timeout=30.0, stream=None)"
    )]
    fn barrier_on(
        &self,
        py: Python<'_>,
        channel: Number<u32>,
        timeout: Number<f64>,
        stream: Option<Argument<'_, '_>>,
    ) -> PyResult<()> {
        let channel = channel.or_raise(py, "channel")?;
        let timeout = timeout.seconds(py, "timeout")?;
        let stream = stream::resolve(py, self.calls.device, stream)?;
        self.calls.run(py, || self.calls.comm.barrier_on(channel, timeout, &stream))
    }

    /// Waits until `stream` is past all calls so far, and raises what went wrong in them. On the CPU they are done.
    #[pyo3(signature = (stream = None))]
    fn synchronize(&self, py: Python<'_>, stream: Option<Argument<'_, '_>>) -> PyResult<()> {
        let stream = self.calls.own_stream(py, stream)?;
        py.detach(|| self.calls.comm.synchronize(&stream)).or_raise(py)
    }

    /// Has this rank's later calls take so many SMs of the device at most, 2 or more, as `sm_budget` does;
    /// None: as many as if that had not been given. Not collective; graphs keep what they were captured with.
    #[pyo3(signature = (sms))]
    fn set_sm_budget(&self, py: Python<'_>, sms: Option<Number<u32>>) -> PyResult<()> {
        let most = sms.map(|sms| sms.or_raise(py, "sms")).transpose()?;
        self.calls.run(py, || self.calls.comm.set_sm_budget(most))
    }

    /// Lets go of a stream that is about to be destroyed: it is touched no more unless a call names it
    /// again, and what was put on it keeps its place in the order of calls. Ranks need not do so alike.
    /// The pool remembers streams too: see `Pool.forget_stream`.
    fn forget_stream(&self, py: Python<'_>, stream: Argument<'_, '_>) -> PyResult<()> {
        let stream = self.calls.own_stream(py, Some(stream))?;
        py.detach(|| self.calls.comm.forget_stream(&stream)).or_raise(py)
    }

    /// Marks how far `stream` is (torch's current one unless given): everything that it was given.
    #[pyo3(signature = (stream = None))]
    fn mark(&self, py: Python<'_>, stream: Option<Argument<'_, '_>>) -> PyResult<StreamPosition> {
        let stream = self.calls.own_stream(py, stream)?;
        StreamPosition::new(self.calls.comm.pool().driver(), self.calls.device, stream).or_raise(py)
    }

    /// Makes what `stream` gets from now on wait for what torch's current one was given so far.
    #[pyo3(signature = (stream))]
    fn follow(&self, py: Python<'_>, stream: Argument<'_, '_>) -> PyResult<()> {
        let both = (self.calls.own_stream(py, None)?, self.calls.own_stream(py, Some(stream))?);
        StreamPosition::follow(self.calls.comm.pool().driver(), self.calls.device, both)
            .or_raise(py)
    }

    /// Has the next call, on whatever stream, come behind what `stream` (torch's current one unless given) was given
    /// so far, as a part of the last call. Not collective; can be captured.
    #[pyo3(signature = (stream = None))]
    fn extend_order(&self, py: Python<'_>, stream: Option<Argument<'_, '_>>) -> PyResult<()> {
        let stream = self.calls.own_stream(py, stream)?;
        py.detach(|| self.calls.comm.extend_order(&stream)).or_raise(py)
    }

    /// Makes an algorithm known under its name and collective: calls take it by `algorithm=`. It exchanges nothing
    /// with other ranks; all must have registered the same before a call names it, and one that differs is named by
    /// DivergedError then. A name that a built-in or another algorithm has is refused; the same algorithm is not.
    fn register(&self, py: Python<'_>, algorithm: &Bound<'_, Algorithm>) -> PyResult<()> {
        self.calls.comm.check("a communicator").or_raise(py)?;
        self.calls.comm.register(algorithm.get().algorithm.clone()).or_raise(py)
    }

    /// The algorithms for calls of this communicator, for one collective or for all: those that were registered, and
    /// then the built-in ones that can serve calls here.
    #[pyo3(signature = (collective = None))]
    fn algorithms(&self, collective: Option<&str>) -> Vec<Algorithm> {
        algorithm::all(&self.calls, collective)
    }

    /// Runs an algorithm that was registered, by its name, or one that is given, whatever it computes. The other arguments
    /// are those of `Algorithm.execute`.
    #[pyo3(
        signature = (algorithm, input, output = None, **options),
        text_signature = "($self, algorithm, input, output=None, *, op='sum', src=0, stream=None, count=None, dtype=None)"
    )]
    fn execute(
        slf: &Bound<'_, Self>,
        algorithm: Argument<'_, '_>,
        input: Argument<'_, '_>,
        output: Option<Argument<'_, '_>>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<()> {
        algorithm::execute(slf, algorithm, (input, output), options)
    }

    /// Loads a table of algorithms, as `python -m symmpool tune` writes it, for calls whose algorithm nothing else
    /// requests; so does SYMMPOOL_TABLES. All ranks load the same. One for other devices or ranks changes nothing.
    #[expect(clippy::needless_pass_by_value, reason = "as Python passes it")]
    fn load_tables(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        selection::load_tables(py, &self.calls, &path)
    }

    /// Bytes of the device, or of host memory, that the communicator holds on this rank: `control` (flags, descriptions of
    /// calls, channels), `inboxes` (small calls), `scratch` (large calls, programs), `staging` (messages), and `total`.
    fn memory<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.calls.comm.check("a communicator").or_raise(py)?;
        statistics::of_communicator(py, &self.calls.comm.memory())
    }

    /// Seconds of this rank's calls over hosts so far, by phase (docs/hosts.md); None where all ranks are on one host.
    fn phase_times<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyDict>>> {
        statistics::of_phases(py, &self.calls.comm)
    }

    /// Explains what a call of `collective` would do on this rank, as it would be made now: its algorithm, blocks,
    /// SMs and memory, what it would be in the best case (alone on the device, between windows, with all of the
    /// memory), and what keeps it from that. An `Explanation`, which prints as a sentence. `collective` is
    /// "all_reduce", "reduce_scatter", "all_gather", "all_to_all" (of equal parts) or "broadcast", or the name of the
    /// method; the other arguments are those of that call. Not collective: it talks to nobody and changes nothing,
    /// and other ranks hear nothing of what it raises.
    #[pyo3(
        signature = (collective, input, out = None, *, op = None, src = Number::of(0), algorithm = None, stream = None),
        text_signature = "($self, collective, input, out=None, *, op='sum', src=0, algorithm=None, stream=None)"
    )]
    #[expect(clippy::too_many_arguments, reason = "a call of Python, with names")]
    fn explain<'py>(
        &self,
        py: Python<'py>,
        collective: &str,
        input: Argument<'_, 'py>,
        out: Option<Argument<'_, 'py>>,
        op: Option<Argument<'_, 'py>>,
        src: Number<u32>,
        algorithm: Option<Name<'_>>,
        stream: Option<Argument<'_, 'py>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let asked = Asked { input, out, op, src, algorithm, stream };
        explanation::explain(py, &self.calls, collective, asked)
    }

    #[doc = include_str!("select.md")]
    fn select(&self, py: Python<'_>, collective: &str, selector: Argument<'_, '_>) -> PyResult<()> {
        self.selectors.select(py, &self.calls, collective, selector)
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.selectors.traverse(&visit)
    }

    fn __clear__(&self) {
        self.selectors.clear(&self.calls);
    }

    /// Why all calls fail, as an exception; None while they do not.
    #[getter]
    fn failure(&self, py: Python<'_>) -> Option<PyErr> {
        py.detach(|| self.calls.failure()).map(|error| exception(py, &error))
    }

    /// This process's rank, from 0.
    #[getter]
    fn rank(&self) -> u32 {
        self.calls.comm.rank()
    }

    /// The number of ranks.
    #[getter]
    fn world(&self) -> u32 {
        self.calls.comm.world()
    }

    /// How long this rank's calls wait for a late rank, in seconds. It can be set, which talks to nobody;
    /// a call under way keeps its time, and so does what is on a stream already, or captured in a graph.
    #[getter]
    fn timeout(&self) -> f64 {
        self.calls.comm.timeout().as_secs_f64()
    }

    #[setter]
    fn set_timeout(&self, py: Python<'_>, timeout: Number<f64>) -> PyResult<()> {
        self.calls.comm.set_timeout(timeout.seconds(py, "timeout")?).or_raise(py)
    }

    /// The name of the algorithm that was asked for.
    #[getter]
    fn algorithm(&self) -> &str {
        &self.algorithm
    }

    fn __repr__(&self) -> String {
        let (rank, world, algorithm) = (self.rank(), self.world(), &self.algorithm);
        format!("symmpool.Communicator(rank={rank}, world={world}, algorithm={algorithm:?})")
    }
}
