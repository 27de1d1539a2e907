//! The class `Pool`.

use std::sync::Arc;

use pyo3::IntoPyObjectExt;
use pyo3::exceptions::{PyImportError, PyTypeError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBool, PyByteArray, PyBytes, PyDict, PyInt, PyString, PyTuple};
use symmpool_allocator::Deadline;
use symmpool_allocator::lane::{LaneConfig, WindowPolicy};
use symmpool_collectives::DType;

use crate::block::Block;
use crate::convert::{self, MemoryDevice};
use crate::device::{await_reports, decline, driver, meet};
use crate::dlpack::{self, Description};
use crate::errors::{OrRaise, invalid};
use crate::fork_guarded::ForkGuarded;
use crate::group::group_of;
use crate::memory::UnorderedBlock;
use crate::number::{Address, Number};
use crate::{record_stream, site, statistics, stream, tensor, torch};

/// Symmetric memory of one rank, and windows on that of its peers.
///
/// Made by all ranks of `group` together: a `Group`, a process group of torch.distributed (ranks
/// meet in its store; sub-groups too), or `(store, rank, world)` with a store of torch's kind.
/// Without one, of torch.distributed's default group where that is initialised, else of
/// `Group.from_env()`. `device` is "cpu", "cuda:N", "cuda" (torch's current device where torch has
/// initialised CUDA, else device LOCAL_RANK, or 0 where that is not set), or None: a CUDA device if
/// there is one, else the CPU. `stride` is the address space of one rank in bytes, a multiple of
/// 2 MiB; 1 TiB unless given. `timeout` is how long to wait for the other ranks, in seconds; the
/// group's unless given. `allow_shared_device` lets several ranks use one GPU, as does
/// SYMMPOOL_SHARED_DEVICE=1 on every rank.
/// `window_policy` is "contiguous", the tightest packing and the default, or "per-segment", in which
/// every tensor lies in one physical allocation, as `register_nccl` needs.
///
/// Every rank allocates the same sizes in the same order; that is what makes the nth block lie in
/// the same place everywhere. Allocating and freeing talk to nobody.
///
/// `with pool:` sends what torch allocates on the pool's device to it; see `symmpool.use_pool`.
///
/// Raises DivergedError when ranks pass different settings, UnsupportedError when there is no such
/// device or memory cannot travel between the ranks, TimeoutError and PeerLostError when a rank is
/// missing, InvalidArgumentError for anything that makes no sense. What one rank cannot do, or was
/// asked in vain, it raises at once; a thread tells the others, and later pools of the group meet.
#[pyclass(frozen, weakref, module = "symmpool")]
pub(crate) struct Pool {
    pub(crate) pool: ForkGuarded<symmpool_allocator::Pool>,
    pub(crate) device: MemoryDevice,
    /// The communicators that were made on it, for statistics.
    pub(crate) communicators: statistics::Communicators,
    /// The `symmpool.memory.scope.Scope`, once there was a `with`. It holds nothing of this object.
    scope: PyOnceLock<Py<PyAny>>,
}

impl Pool {
    /// The object for a pool that was made.
    pub(crate) fn on(pool: ForkGuarded<symmpool_allocator::Pool>, device: MemoryDevice) -> Self {
        let communicators = statistics::Communicators::default();
        Self { pool, device, communicators, scope: PyOnceLock::new() }
    }
}

#[pymethods]
impl Pool {
    #[new]
    #[pyo3(signature = (
        group = None, device = None, *, stride = None, timeout = None, allow_shared_device = false,
        window_policy = None
    ))]
    fn new<'py>(
        py: Python<'py>,
        group: Option<&Bound<'py, PyAny>>,
        device: Option<&Bound<'py, PyAny>>,
        stride: Option<Number<u64>>,
        timeout: Option<Number<f64>>,
        allow_shared_device: bool,
        window_policy: Option<&str>,
    ) -> PyResult<Bound<'py, Self>> {
        let limit = timeout.map(|timeout| timeout.seconds(py, "timeout")).transpose();
        let known = limit.as_ref().ok().copied().flatten().map(|limit| limit.as_secs_f64());
        await_reports(py, group)?;
        let asked = || {
            let name = device.map(|device| device.str()?.extract::<String>()).transpose()?;
            let name = torch::current_device(py, name)?;
            let stride = stride.map(|stride| stride.or_raise(py, "stride")).transpose()?;
            let policy = window_policy.map(WindowPolicy::from_name).transpose().or_raise(py)?;
            let (driver, device) = py.detach(|| driver(name.as_deref())).or_raise(py)?;
            PyResult::Ok((driver, device, stride, limit?, policy))
        };
        let (driver, device, stride, deadline, policy) = match asked() {
            Ok(asked) => asked,
            Err(why) => return Err(decline(py, group, why)),
        };
        let of = group_of(py, group, known)?;
        let prepare = move || {
            let mut builder = symmpool_allocator::Pool::builder(of).driver(driver);
            if let Some(stride) = stride {
                builder = builder.stride(stride);
            }
            if let Some(timeout) = deadline {
                builder = builder.deadline(Deadline::after(timeout));
            }
            if allow_shared_device {
                builder = builder.allow_shared_device();
            }
            if let Some(policy) = policy {
                builder = builder.lane(LaneConfig::symmetric("default").window_policy(policy));
            }
            builder.prepare()
        };
        let prepared = py.detach(prepare);
        let pool = ForkGuarded::new(meet(py, group, prepared)?);
        let made = Bound::new(py, Self::on(pool, device))?;
        py.import("symmpool.groups.pool_registry")?
            .call_method1("register", (&made, group, known))?;
        Ok(made)
    }

    /// Uninitialised symmetric memory as a tensor, without a copy.
    ///
    /// `size` is a sequence of ints, or several, as in torch: `empty((3, 4))` and `empty(3, 4)` are the
    /// same. `dtype` may follow a sequence or one int without its name. Its kind decides what comes back: a
    /// torch.dtype, a name ("bfloat16", "bf16", ...) or None (torch's default) gives a
    /// torch.Tensor on the pool's device; a type of numpy or ml_dtypes gives a numpy.ndarray, on
    /// the CPU. What needs neither package is `block`.
    ///
    /// The memory belongs to torch's current stream on CUDA: it may hold what earlier work on that
    /// stream is still writing. It lives until the last view of the tensor is gone, and keeps the
    /// pool alive. Then it is freed *without order* (rule D5): garbage is collected at different
    /// times on different ranks, so its place is reused after the next commit by which every rank
    /// has let go of it, not before.
    ///
    /// Raises OutOfMemoryError, InvalidArgumentError, and ImportError where the package that the
    /// tensor is to be of is not installed.
    #[pyo3(signature = (*size, dtype = None, shape = None))]
    fn empty<'py>(
        slf: &Bound<'py, Self>,
        size: &Bound<'py, PyTuple>,
        dtype: Option<Bound<'py, PyAny>>,
        shape: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (shape, dtype) = shape_and_dtype("empty", size, dtype, shape)?;
        Self::tensor(slf, &shape, dtype.as_ref())
    }

    /// Uninitialised symmetric memory as a Block, which DLPack consumers take: torch.from_dlpack,
    /// numpy.from_dlpack and others. Needs no other package; otherwise as `empty`. `stream` is the
    /// stream it is for on CUDA: torch's current one unless given.
    #[pyo3(signature = (shape, dtype, stream = None))]
    fn block<'py>(
        slf: &Bound<'py, Self>,
        shape: &Bound<'py, PyAny>,
        dtype: &Bound<'py, PyAny>,
        stream: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, Block>> {
        let py = slf.py();
        let this = slf.get();
        this.check(py)?;
        let shape = dimensions(shape)?;
        let dtype = convert::dtype(dtype)?;
        let stream = stream::resolve(py, this.device, stream)?;
        let size = dtype.size() as i64;
        let bytes = shape.iter().try_fold(size, |bytes, length| bytes.checked_mul(*length));
        let bytes = bytes.ok_or_else(|| {
            invalid(py, format!("shape: {shape:?} of {} is too large", convert::long_name(dtype)))
        })?;
        let allocate = || UnorderedBlock::allocate(&this.pool, this.device, bytes as usize, stream);
        let memory = site::detach(py, allocate).or_raise(py)?;
        Bound::new(py, Block::new(memory, shape, dtype))
    }

    /// Makes a tensor like `empty`, filled with zeros.
    #[pyo3(signature = (*size, dtype = None, shape = None))]
    fn zeros<'py>(
        slf: &Bound<'py, Self>,
        size: &Bound<'py, PyTuple>,
        dtype: Option<Bound<'py, PyAny>>,
        shape: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = slf.py();
        let (shape, dtype) = shape_and_dtype("zeros", size, dtype, shape)?;
        let tensor = Self::tensor(slf, &shape, dtype.as_ref())?;
        // torch's returns the tensor, numpy's nothing.
        let of_torch = tensor.hasattr("fill_")?;
        let fill = if of_torch { "fill_" } else { "fill" };
        let read = tensor::read("zeros", &tensor, slf.get().device, true);
        if read.is_ok_and(|read| is_foreign(read.dtype)) {
            // Not every one of them has a zero that could be assigned.
            let package = py.import(if of_torch { "torch" } else { "numpy" })?;
            let bytes = tensor.call_method1("view", (package.getattr("uint8")?,))?;
            bytes.call_method1(fill, (0,))?;
        } else {
            tensor.call_method1(fill, (0,))?;
        }
        Ok(tensor)
    }

    /// Makes a tensor like `empty`, filled with `fill_value`: `full((3, 4), 0.5)`. Without a `dtype` the tensor is of
    /// the type that torch.full chooses for the value: bool, int64, or torch's default.
    #[pyo3(signature = (size, fill_value, dtype = None))]
    fn full<'py>(
        slf: &Bound<'py, Self>,
        size: &Bound<'py, PyAny>,
        fill_value: &Bound<'py, PyAny>,
        dtype: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = slf.py();
        let dtype = match dtype {
            Some(dtype) => Some(dtype),
            None if fill_value.is_instance_of::<PyBool>() => Some("bool".into_bound_py_any(py)?),
            None if fill_value.is_instance_of::<PyInt>() => Some("int64".into_bound_py_any(py)?),
            None => None,
        };
        let tensor = Self::tensor(slf, size, dtype.as_ref())?;
        let fill = if tensor.hasattr("fill_")? { "fill_" } else { "fill" };
        tensor.call_method1(fill, (fill_value,))?;
        Ok(tensor)
    }

    /// Makes sure that `bytes` more fit without growing, as one block on `stream` (torch's current
    /// one unless given, on CUDA). Every rank calls it in the same place of its sequence; then the
    /// next commit shares the memory, and later allocations of that much cause none.
    #[pyo3(signature = (bytes, stream = None))]
    fn reserve(
        &self,
        py: Python<'_>,
        bytes: Number<u64>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        self.check(py)?;
        let bytes = bytes.or_raise(py, "bytes")?;
        let stream = stream::resolve(py, self.device, stream)?;
        let reserve = || self.pool.default_lane().reserve_on(bytes, stream);
        site::detach(py, reserve).or_raise(py)
    }

    /// Has the memory of a tensor of a pool, or of a Block, not be reused before `stream` (an object with a raw handle, or
    /// that handle) has done what it is given until the memory is freed: `Tensor.record_stream` does nothing for it. No
    /// allocation is placed elsewhere for it, and other ranks need not do the same. A tensor of torch's own memory is passed
    /// on to `Tensor.record_stream`. What is captured into a graph does not count: keep a graph's tensors as long as the
    /// graph.
    #[staticmethod]
    fn record_stream(tensor: &Bound<'_, PyAny>, stream: &Bound<'_, PyAny>) -> PyResult<()> {
        record_stream::record_stream(tensor, stream)
    }

    /// Lets go of a stream (an object with a raw handle, or that handle) that is about to be destroyed. A
    /// pool remembers the streams that it was given, up to 64 in a lane, and touches them until then; what
    /// was theirs goes to the next stream that is new to it. Every rank does so in the same place of its
    /// sequence. torch's own streams are never destroyed and need not be forgotten.
    fn forget_stream(&self, py: Python<'_>, stream: &Bound<'_, PyAny>) -> PyResult<()> {
        self.check(py)?;
        let stream = stream::resolve(py, self.device, Some(stream))?;
        site::detach(py, || self.pool.forget_stream(stream)).or_raise(py)
    }

    /// The scope's state, made at the first use. torch.cuda.MemPool and others, in CUDA only.
    fn _scope<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let py = slf.py();
        let scope = &slf.get().scope;
        let made = scope.get_or_try_init(py, || {
            PyResult::Ok(
                py.import("symmpool.memory.scope")?.getattr("Scope")?.call1((slf,))?.unbind(),
            )
        });
        Ok(made?.bind(py).clone())
    }

    fn __enter__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, Self>> {
        slf.get().check(slf.py())?;
        Self::_scope(slf)?.call_method0(intern!(slf.py(), "enter"))?;
        Ok(slf.clone())
    }

    fn __exit__(
        slf: &Bound<'_, Self>,
        kind: &Bound<'_, PyAny>,
        value: &Bound<'_, PyAny>,
        _traceback: &Bound<'_, PyAny>,
    ) -> PyResult<bool> {
        let scope = Self::_scope(slf)?;
        scope.call_method1(intern!(slf.py(), "leave"), (slf, kind, value))?;
        Ok(false)
    }

    /// Checks that all ranks did the same, and makes windows of new memory. Collective: every rank
    /// calls it in the same place of its program. Collectives do it by themselves when it is due.
    ///
    /// Returns a dict: `number` of the commit, `windows_added`, `windows_removed` and
    /// `blocks_returned`. Raises DivergedError, saying where ranks differ, OutOfMemoryError,
    /// TimeoutError, PeerLostError, InvalidStateError (another thread commits, or a stream is
    /// being captured).
    fn commit<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.check(py)?;
        let report = py.detach(|| self.pool.commit()).or_raise(py)?;
        let dict = PyDict::new(py);
        dict.set_item("number", report.number)?;
        dict.set_item("windows_added", report.windows_added)?;
        dict.set_item("windows_removed", report.windows_removed)?;
        dict.set_item("blocks_returned", report.blocks_returned)?;
        Ok(dict)
    }

    /// Whether a commit is due: a lane has grown since the last one, or much of what was dropped waits to be
    /// taken back. The same on every rank.
    #[getter]
    fn is_commit_due(&self) -> bool {
        self.pool.is_commit_due()
    }

    /// Agrees on a state again after a DivergedError: goes back to just before the first
    /// difference. Collective. What was allocated since must have been freed.
    fn resync(&self, py: Python<'_>) -> PyResult<()> {
        self.check(py)?;
        py.detach(|| self.pool.resync()).or_raise(py)?;
        Ok(())
    }

    /// Registers every window, those of later commits too, with the NCCL communicator of a process
    /// group of torch (the default one unless given), whose ranks are those of the pool. NCCL's
    /// collectives then use tensors of the pool as symmetric memory. Returns how many windows there
    /// are now. Collective. The pool needs `window_policy="per-segment"`.
    ///
    /// Raises UnsupportedError where NCCL is older than 2.27 or makes no symmetric windows,
    /// InvalidArgumentError where the group or the pool does not fit, on every rank alike.
    #[pyo3(signature = (group = None))]
    #[allow(unsafe_code)] // hands on what torch says is its communicator
    fn register_nccl(&self, py: Python<'_>, group: Option<&Bound<'_, PyAny>>) -> PyResult<u64> {
        let comm = self.communicator(py, group)?;
        // SAFETY: torch's own communicator, of the NCCL that torch has loaded. It lives as long as
        // the process group; `unregister_nccl` says when that ends.
        py.detach(|| unsafe { self.pool.register_nccl(comm) }).or_raise(py)
    }

    /// Takes the windows back from a process group's communicator. Collective. Before the group is
    /// destroyed, if the pool is used afterwards.
    #[pyo3(signature = (group = None))]
    fn unregister_nccl(&self, py: Python<'_>, group: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let comm = self.communicator(py, group)?;
        py.detach(|| self.pool.unregister_nccl(comm)).or_raise(py)
    }

    /// The pool's numbers: `allocated` and `reserved` bytes over all lanes, `commits`, `windows`,
    /// `lanes`: a dict of each lane's by name, and `communicators`: what each communicator on the pool holds
    /// of memory, as its `memory()`. Raises InvalidStateError in a forked child.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.check(py)?;
        let stats = py.detach(|| self.pool.stats()).or_raise(py)?;
        statistics::of_pool(py, &stats, &self.communicators)
    }

    /// Whether all of a contiguous tensor's memory lies in windows: whether collectives use it
    /// where it is, and peers can reach it.
    fn is_window(&self, py: Python<'_>, tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
        let read = tensor::read("tensor", tensor, self.device, false);
        let read = read.map_err(|refusal| refusal.raise(py))?;
        Ok(self.pool.is_window(read.address as u64, (read.count * read.dtype.size()) as u64))
    }

    /// Whether a tensor's memory is the pool's on this rank, window or not.
    fn holds(&self, tensor: &Bound<'_, PyAny>) -> bool {
        let read = tensor::read("tensor", tensor, self.device, false);
        read.is_ok_and(|read| self.has(read.address as u64))
    }

    /// Whether an address is in this rank's own slot of the pool's heap.
    fn owns(&self, py: Python<'_>, address: Address) -> PyResult<bool> {
        Ok(self.has(address.or_raise(py)?))
    }

    /// Where `rank` has what this rank has at `address`: in this process, for whoever reaches the
    /// pool's memory. Raises InvalidArgumentError unless all `bytes` bytes from there are in
    /// windows.
    fn peer_ptr(
        &self,
        py: Python<'_>,
        rank: Number<u32>,
        address: Address,
        bytes: Number<u64>,
    ) -> PyResult<u64> {
        let rank = rank.or_raise(py, "rank")?;
        let (address, bytes) = (address.or_raise(py)?, bytes.or_raise(py, "bytes")?);
        self.peer(py, rank, address, bytes)
    }

    /// A DLPack capsule of bytes that `rank` has where this rank has `bytes` bytes from `address`
    /// on, which lie in windows. It keeps `owner`, which keeps this rank's, and the pool.
    fn peer_bytes<'py>(
        &self,
        py: Python<'py>,
        rank: Number<u32>,
        address: Address,
        bytes: Number<u64>,
        owner: Py<PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let rank = rank.or_raise(py, "rank")?;
        let (address, bytes) = (address.or_raise(py)?, bytes.or_raise(py, "bytes")?);
        let address = self.peer(py, rank, address, bytes)?;
        let description = Description {
            address: address as usize,
            device: self.device,
            dtype: DType::U8,
            shape: &[bytes as i64],
        };
        dlpack::capsule(py, description, false, Arc::new((owner, self.pool.clone())))
    }

    /// This process's rank, from 0.
    #[getter]
    fn rank(&self) -> u32 {
        self.pool.rank()
    }

    /// The number of ranks.
    #[getter]
    fn world(&self) -> u32 {
        self.pool.world()
    }

    /// Which ranks can map each other's memory: a tuple of tuples of ranks, one for each host, in the order of the
    /// hosts' lowest ranks.
    #[getter]
    fn hosts<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        let ranks = self.pool.hosts().iter().map(|ranks| PyTuple::new(py, ranks));
        PyTuple::new(py, ranks.collect::<PyResult<Vec<_>>>()?)
    }

    /// Where the memory is: "cpu" or "cuda:N".
    #[getter]
    fn device(&self) -> String {
        self.device.name()
    }

    /// Name by which torch's operators and module-level calls know the pool: text, the same for as long as the pool
    /// is there.
    #[getter]
    fn group_name<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.py().import("symmpool.groups.names")?.call_method1("name_of", (slf,))
    }

    fn __repr__(&self) -> String {
        let (rank, world) = (self.rank(), self.world());
        format!("symmpool.Pool(rank={rank}, world={world}, device={:?})", self.device.name())
    }
}

impl Pool {
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        self.pool.check("a pool").or_raise(py)
    }

    fn has(&self, address: u64) -> bool {
        let layout = self.pool.layout();
        layout.locate(address).is_some_and(|(slot, _)| slot == layout.rank)
    }

    /// Returns the address that `peer_ptr` returns.
    fn peer(&self, py: Python<'_>, rank: u32, address: u64, bytes: u64) -> PyResult<u64> {
        if !self.pool.windows().covers(address, bytes) {
            return Err(invalid(
                py,
                format!(
                    "{bytes} bytes at {address:#x} are not all in windows; allocate them in the \
                     pool, and commit it"
                ),
            ));
        }
        let layout = self.pool.layout();
        match layout.locate(address) {
            Some((slot, _)) if slot == layout.rank => {}
            _ => return Err(invalid(py, format!("{address:#x} is not in this rank's own slot"))),
        }
        let slot = self.pool.slot_of(rank).or_raise(py)?;
        layout.peer(slot, address).or_raise(py)
    }

    /// The NCCL communicator of a process group.
    fn communicator(&self, py: Python<'_>, group: Option<&Bound<'_, PyAny>>) -> PyResult<usize> {
        let find = py.import("symmpool.memory.nccl")?.getattr("communicator")?;
        find.call1((group, self.device.name()))?.extract()
    }
}

impl Pool {
    /// A tensor as `empty` makes it.
    fn tensor<'py>(
        slf: &Bound<'py, Self>,
        shape: &Bound<'py, PyAny>,
        dtype: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = slf.py();
        let of_torch = match dtype {
            None => true,
            Some(dtype) => {
                dtype.is_instance_of::<PyString>()
                    || torch::torch(py).is_some_and(|torch| torch.is_dtype(dtype))
            }
        };
        if !of_torch {
            let dtype = dtype.expect("numpy's: given");
            let block = Self::block(slf, shape, dtype, None)?;
            return Block::numpy(&block, Some(dtype));
        }
        let torch = py.import("torch").map_err(|error| {
            let missing = PyImportError::new_err(
                "empty: a torch.Tensor needs torch, which cannot be imported; pass a dtype of \
                 numpy, or use block()",
            );
            missing.set_cause(py, Some(error));
            missing
        })?;
        let dtype = match dtype {
            Some(dtype) => dtype.clone(),
            None => torch.call_method0("get_default_dtype")?,
        };
        let element = convert::dtype(&dtype)?;
        if is_foreign(element) {
            // Not every torch takes these by DLPack; bytes every one does.
            let block = Self::block(slf, shape, intern!(py, "uint8").as_any(), None)?;
            let bytes = torch.call_method1("from_dlpack", (block,))?;
            return bytes.call_method1("view", (torch.getattr(convert::long_name(element))?,));
        }
        let block = Self::block(slf, shape, &dtype, None)?;
        torch.call_method1("from_dlpack", (block,))
    }
}

/// Whether elements are floats of less than 16 bits: not every package that has them can do much with
/// them.
fn is_foreign(dtype: DType) -> bool {
    dtype.size() == 1 && !matches!(dtype, DType::U8 | DType::I8 | DType::Bool)
}

/// Reads the arguments of `empty` and `zeros`: sizes as one sequence or as several numbers, and a type that may come
/// behind them without its name. `shape` is an earlier name of the sequence.
fn shape_and_dtype<'py>(
    name: &str,
    size: &Bound<'py, PyTuple>,
    dtype: Option<Bound<'py, PyAny>>,
    shape: Option<Bound<'py, PyAny>>,
) -> PyResult<(Bound<'py, PyAny>, Option<Bound<'py, PyAny>>)> {
    let py = size.py();
    let mut given: Vec<_> = size.iter().collect();
    if shape.is_some() && (given.len() > 1 || (!given.is_empty() && dtype.is_some())) {
        return Err(invalid(py, format!("{name}: sizes are given twice: {size:?} and shape")));
    }
    let at_least = usize::from(shape.is_none());
    let dtype = match dtype {
        None if given.len() > at_least && !is_length(&given[given.len() - 1]) => {
            given.pop().filter(|last| !last.is_none())
        }
        other => other,
    };
    if let Some(shape) = shape {
        return Ok((shape, dtype));
    }
    match given.len() {
        0 => Err(PyTypeError::new_err(format!(
            "{name}: sizes are needed, as a sequence or one by one"
        ))),
        1 => Ok((given.remove(0), dtype)),
        _ => Ok((PyTuple::new(py, given)?.into_any(), dtype)),
    }
}

/// Whether this is one length of several, also where it is one of numpy's numbers.
fn is_length(object: &Bound<'_, PyAny>) -> bool {
    !object.is_none() && object.extract::<i64>().is_ok()
}

/// The most dimensions of a tensor: as many as torch and numpy work with.
const MAX_DIMENSIONS: usize = 64;

/// A shape: one length, or a sequence of them.
pub(crate) fn dimensions(shape: &Bound<'_, PyAny>) -> PyResult<Vec<i64>> {
    let py = shape.py();
    let lengths = match shape.extract::<i64>() {
        Ok(length) => Ok(vec![length]),
        Err(_) => shape.extract::<Vec<i64>>(),
    };
    // Bytes are a sequence of numbers, too, which nobody means.
    let text = shape.is_instance_of::<PyBytes>() || shape.is_instance_of::<PyByteArray>();
    let Some(lengths) = lengths.ok().filter(|_| !text) else {
        return Err(invalid(py, format!("shape: {shape:?} is no sequence of lengths")));
    };
    if lengths.len() > MAX_DIMENSIONS {
        let count = lengths.len();
        return Err(invalid(py, format!("shape: {count} lengths; {MAX_DIMENSIONS} are the most")));
    }
    match lengths.iter().find(|length| **length < 0) {
        Some(length) => Err(invalid(py, format!("shape: a length of {length}"))),
        None => Ok(lengths),
    }
}
