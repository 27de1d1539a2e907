//! The class `Group`.

use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use symmpool_allocator::store::FileStore;
use symmpool_allocator::{Deadline, Error, Launch};

use crate::errors::{OrRaise, invalid, is_interrupted};
use crate::fork_guarded::ForkGuarded;
use crate::number::Number;
use crate::store::PythonStore;

/// The ordered set of ranks that share memory, seen from one of them.
///
/// A group meets in a store. `address` says where that is, the same on every rank:
///
/// - "HOST:PORT": over TCP; rank 0 serves it, for as long as its group, or a pool or tensor made
///   of it, lives. Other than on a loopback address all ranks must pass the same `secret`.
/// - "file:///DIRECTORY": in files of a directory that all ranks see and nobody else uses.
///
/// `timeout` is how long collective calls of the group wait for other ranks, in seconds: making
/// pools, and commits. Ctrl-C ends the waits for the store and for other ranks, within about a second;
/// KeyboardInterrupt then has as its cause the error that says who was missing, and a pool that
/// waited commits no more. It does not end other waits, but all of them end by themselves, and then
/// it is raised.
///
/// Raises InvalidArgumentError, TimeoutError when the store cannot be reached in time, and
/// RefusedError when a secret differs.
#[pyclass(frozen, weakref, module = "symmpool")]
pub(crate) struct Group {
    pub(crate) group: ForkGuarded<symmpool_allocator::Group>,
}

impl Group {
    fn of(group: symmpool_allocator::Group) -> Self {
        Self { group: ForkGuarded::new(group.with_interrupt(is_interrupted)) }
    }
}

#[pymethods]
impl Group {
    #[new]
    #[pyo3(
        signature = (rank, world, address, *, secret = None, timeout = Number::of(300.0)),
        text_signature = "(rank, world, address, *, secret=None, timeout=300.0)"
    )]
    fn new(
        py: Python<'_>,
        rank: Number<u32>,
        world: Number<u32>,
        address: &str,
        secret: Option<&str>,
        timeout: Number<f64>,
    ) -> PyResult<Self> {
        let (rank, world) = (rank.or_raise(py, "rank")?, world.or_raise(py, "world")?);
        let timeout = timeout.seconds(py, "timeout")?;
        let meet = || match address.strip_prefix("file://") {
            Some(_) if secret.is_some() => {
                Err(Error::invalid_argument("secret: a store in files is guarded by their modes"))
            }
            Some(directory) => {
                let store = Arc::new(FileStore::open(directory)?);
                symmpool_allocator::Group::new(rank, world, store)
            }
            None => {
                let address = address.strip_prefix("tcp://").unwrap_or(address);
                symmpool_allocator::Group::over_tcp_with_interrupt(
                    rank,
                    world,
                    address,
                    secret,
                    Deadline::after(timeout),
                    is_interrupted,
                )
            }
        };
        let group = py.detach(meet).or_raise(py)?;
        Ok(Self::of(group.with_timeout(timeout)))
    }

    /// The group that a launcher describes in the environment: torchrun, mpirun, Slurm's srun, Ray Train or
    /// Kubernetes. docs/hosts.md lists the variables of each. Rank 0 serves the store on MASTER_ADDR and MASTER_PORT,
    /// on the port after it when torchrun's own store holds that one, or where the launcher says; SYMMPOOL_PORT,
    /// SYMMPOOL_SECRET and SYMMPOOL_STORE are read where they are set.
    ///
    /// Raises InvalidArgumentError for a variable that is missing or makes no sense, and for launchers that
    /// contradict each other.
    #[staticmethod]
    #[pyo3(
        signature = (*, timeout = Number::of(300.0)),
        text_signature = "(*, timeout=300.0)"
    )]
    fn from_env(py: Python<'_>, timeout: Number<f64>) -> PyResult<Bound<'_, Self>> {
        let timeout = timeout.seconds(py, "timeout")?;
        let meet = || {
            let deadline = Deadline::after(timeout);
            symmpool_allocator::Group::from_env_with_interrupt(deadline, is_interrupted)
        };
        let group = py.detach(meet).or_raise(py)?;
        let group = Bound::new(py, Self::of(group.with_timeout(timeout)))?;
        // Calls that name no group mean this one: there is one store at the launcher's address.
        py.import("symmpool.groups.resolution")?.call_method1("remember", (&group,))?;
        Ok(group)
    }

    /// `world` groups of one process, in rank order, for a thread each.
    #[staticmethod]
    #[pyo3(
        signature = (world, *, timeout = Number::of(300.0)),
        text_signature = "(world, *, timeout=300.0)"
    )]
    fn in_process(py: Python<'_>, world: Number<u32>, timeout: Number<f64>) -> PyResult<Vec<Self>> {
        let world = world.or_raise(py, "world")?;
        let timeout = timeout.seconds(py, "timeout")?;
        if world > 4096 {
            return Err(invalid(py, format!("world={world}: at most 4096 threads meet")));
        }
        let groups = symmpool_allocator::Group::in_process(world).or_raise(py)?;
        Ok(groups.into_iter().map(|group| Self::of(group.with_timeout(timeout))).collect())
    }

    /// A group that meets in a `torch.distributed.Store`, or one of its kind: `store` has its
    /// methods. `name` is before all keys; groups that use a store at one time have different
    /// ones, equal on all ranks. Pools take a process group, or `(store, rank, world)`, by
    /// themselves: this is for names and timeouts of one's own.
    #[staticmethod]
    #[pyo3(
        signature = (store, rank, world, *, name = "symmpool", timeout = Number::of(300.0)),
        text_signature = "(store, rank, world, *, name='symmpool', timeout=300.0)"
    )]
    fn from_store(
        py: Python<'_>,
        store: &Bound<'_, PyAny>,
        rank: Number<u32>,
        world: Number<u32>,
        name: &str,
        timeout: Number<f64>,
    ) -> PyResult<Self> {
        let (rank, world) = (rank.or_raise(py, "rank")?, world.or_raise(py, "world")?);
        let timeout = timeout.seconds(py, "timeout")?;
        let adapter = py.import("symmpool.groups.store")?.getattr("StoreAdapter")?.call1((
            store,
            py.None(),
            name,
        ))?;
        let store = Arc::new(PythonStore::new(adapter.unbind()));
        let group = symmpool_allocator::Group::new(rank, world, store).or_raise(py)?;
        Ok(Self::of(group.with_name(name).with_timeout(timeout)))
    }

    /// This process's rank, from 0.
    #[getter]
    fn rank(&self) -> u32 {
        self.group.rank()
    }

    /// The number of ranks.
    #[getter]
    fn world(&self) -> u32 {
        self.group.world()
    }

    /// The number of ranks, by another name of it.
    #[getter]
    fn world_size(&self) -> u32 {
        self.group.world()
    }

    /// This process's number among those of its machine, where the launcher said it.
    #[getter]
    fn local_rank(&self) -> Option<u32> {
        self.group.local_rank()
    }

    /// Which ranks share a host: the ranks of each host, hosts in the order of their lowest ranks.
    ///
    /// You must call this on every rank. It costs one step through the store, once: the group remembers the result. A
    /// host is where processes can hand each other memory by file descriptors: one kernel, one network namespace and one
    /// user. Where SYMMPOOL_HOST_ID is set, a process pretends to be on a host of that name.
    ///
    /// Raises InvalidArgumentError where SYMMPOOL_HOST_ID makes no sense, InvalidStateError where it changed in a
    /// running process, and TimeoutError with the ranks that do not call this.
    fn hosts<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        self.group.check("a group").or_raise(py)?;
        let group = &*self.group;
        let hosts = py.detach(|| group.hosts(group.deadline())).or_raise(py)?;
        let ranks = hosts.iter().map(|ranks| PyTuple::new(py, ranks));
        PyTuple::new(py, ranks.collect::<PyResult<Vec<_>>>()?)
    }

    /// How long its collective calls wait for other ranks, in seconds.
    #[getter]
    fn timeout(&self) -> f64 {
        self.group.timeout().as_secs_f64()
    }

    /// Name by which torch's operators and module-level calls know the group: text, the same for as long as the group
    /// is there.
    #[getter]
    fn group_name<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.py().import("symmpool.groups.names")?.call_method1("name_of", (slf,))
    }

    fn __repr__(&self) -> String {
        format!("symmpool.Group(rank={}, world={})", self.rank(), self.world())
    }
}

/// Returns what a launcher says of this process in the environment, as a dict of `launcher`, `rank`, `world`,
/// `local_rank` and `rendezvous`; None where there is none. Raises InvalidArgumentError as `Group.from_env` does.
#[pyfunction]
pub(crate) fn launch(py: Python<'_>) -> PyResult<Option<Bound<'_, PyDict>>> {
    let Some(launch) = Launch::from_env().or_raise(py)? else { return Ok(None) };
    let found = PyDict::new(py);
    found.set_item("launcher", launch.launcher())?;
    found.set_item("rank", launch.rank())?;
    found.set_item("world", launch.world())?;
    found.set_item("local_rank", launch.local_rank())?;
    found.set_item("rendezvous", launch.store_address())?;
    Ok(Some(found))
}

/// Names of the variables by which launchers are recognised.
#[pyfunction]
pub(crate) fn launcher_variables() -> Vec<&'static str> {
    Launch::variables()
}

/// The group that an argument means: one of ours, a process group of torch, a store with a rank and
/// a world, or what the program runs in.
pub(crate) fn group_of(
    py: Python<'_>,
    argument: Option<&Bound<'_, PyAny>>,
    timeout: Option<f64>,
) -> PyResult<symmpool_allocator::Group> {
    let of = |group: &Bound<'_, Group>| {
        let group = &group.get().group;
        group.check("a group").or_raise(py)?;
        PyResult::Ok((**group).clone())
    };
    if let Some(group) = argument.and_then(|argument| argument.cast::<Group>().ok()) {
        return of(group);
    }
    let resolved =
        py.import("symmpool.groups.resolution")?.call_method1("resolve", (argument, timeout))?;
    of(resolved.cast::<Group>()?)
}
