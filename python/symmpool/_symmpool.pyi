import os
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, TypeAlias, TypedDict

from symmpool.communicators.explanation import Explanation
from symmpool.groups.types import DeviceLike, GroupLike
from symmpool.memory.scope import Scope

# A torch.Tensor, a numpy.ndarray or a Block: contiguous, on the pool's device. See `Communicator` for
# their elements: reductions take fewer types than what only moves data.
Tensor: TypeAlias = Any
# A name ("float32", "bf16", "bool", ...), a torch.dtype, or a type of numpy or ml_dtypes.
DType: TypeAlias = Any
# One of these names, or a constant of torch.distributed.ReduceOp.
Op: TypeAlias = Literal["sum", "prod", "min", "max", "avg"] | Any

class _HasStream(Protocol):
    @property
    def cuda_stream(self) -> int: ...

Stream: TypeAlias = int | _HasStream

# A process group of torch, or what stands for one: its backend's `_comm_ptr()` is NCCL's communicator.
class _HasBackends(Protocol):
    def _get_backend(self, device: Any, /) -> Any: ...

class CommitReport(TypedDict):
    number: int
    windows_added: int
    windows_removed: int
    blocks_returned: int

class LaneStats(TypedDict):
    allocated: int
    peak_allocated: int
    reserved: int
    peak_reserved: int
    deferred: int
    live_blocks: int
    segments: int
    events: int
    allocs: int
    frees: int
    unordered_frees: int

class CommunicatorMemory(TypedDict):
    total: int
    control: int
    inboxes: int
    scratch: int
    staging: int
    wanted: int

class PoolStats(TypedDict):
    allocated: int
    reserved: int
    commits: int
    windows: int
    lanes: dict[str, LaneStats]
    communicators: list[CommunicatorMemory]

def algorithms() -> list[str]: ...
def all_to_all_algorithms() -> list[str]: ...
def built() -> tuple[str | None, dict[str, str]]: ...
def default_device() -> str: ...
def version() -> str: ...
def end_waits() -> None: ...
def share_sms(device: int) -> None: ...
def process_stats(device: int) -> dict[str, int] | None: ...
def process_reset_peaks(device: int) -> None: ...
def process_redirect(slot: Slot) -> Any: ...
def process_redirect_back(before: Any) -> None: ...
def machine() -> dict[str, Any]: ...

class Bell:
    def ring(self) -> None: ...
    def answer(self) -> None: ...
    def wait(self) -> None: ...

class Group:
    def __init__(
        self,
        rank: int,
        world: int,
        address: str,
        *,
        secret: str | None = None,
        timeout: float = 300.0,
    ) -> None: ...
    @staticmethod
    def from_env(*, timeout: float = 300.0) -> Group: ...
    @staticmethod
    def in_process(world: int, *, timeout: float = 300.0) -> list[Group]: ...
    @staticmethod
    def from_store(
        store: Any, rank: int, world: int, *, name: str = "symmpool", timeout: float = 300.0
    ) -> Group: ...
    @property
    def rank(self) -> int: ...
    @property
    def world(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def local_rank(self) -> int | None: ...
    @property
    def timeout(self) -> float: ...
    @property
    def group_name(self) -> str: ...

class Operation:
    def wait(self, limit: float | None = None) -> int: ...
    def is_done(self) -> bool: ...
    def exception(self) -> Exception | None: ...

class Pool:
    def __init__(
        self,
        group: GroupLike = None,
        device: DeviceLike = None,
        *,
        stride: int | None = None,
        timeout: float | None = None,
        allow_shared_device: bool = False,
        window_policy: Literal["contiguous", "per-segment"] | None = None,
    ) -> None: ...
    # Sizes as one sequence or one by one; a type may follow a sequence or one size without its name.
    def empty(
        self,
        *size: int | Sequence[int] | DType,
        dtype: DType = None,
        shape: int | Sequence[int] | None = None,
    ) -> Any: ...
    def block(self, shape: int | Sequence[int], dtype: DType, stream: Stream | None = None) -> Block: ...
    def zeros(
        self,
        *size: int | Sequence[int] | DType,
        dtype: DType = None,
        shape: int | Sequence[int] | None = None,
    ) -> Any: ...
    def full(self, size: int | Sequence[int], fill_value: float | bool, dtype: DType = None) -> Any: ...
    def reserve(self, bytes: int, stream: Stream | None = None) -> None: ...
    @staticmethod
    def record_stream(tensor: Tensor, stream: Stream) -> None: ...
    def forget_stream(self, stream: Stream) -> None: ...
    def _scope(self) -> Scope: ...
    def __enter__(self) -> Pool: ...
    def __exit__(self, kind: Any, value: Any, _traceback: Any) -> bool: ...
    def commit(self) -> CommitReport: ...
    @property
    def is_commit_due(self) -> bool: ...
    def resync(self) -> None: ...
    def register_nccl(self, group: _HasBackends | None = None) -> int: ...
    def unregister_nccl(self, group: _HasBackends | None = None) -> None: ...
    def stats(self) -> PoolStats: ...
    def is_window(self, tensor: Tensor) -> bool: ...
    def holds(self, tensor: Tensor) -> bool: ...
    def owns(self, address: int) -> bool: ...
    def peer_ptr(self, rank: int, address: int, bytes: int) -> int: ...
    def peer_bytes(self, rank: int, address: int, bytes: int, owner: Any) -> Any: ...
    @property
    def rank(self) -> int: ...
    @property
    def world(self) -> int: ...
    @property
    def device(self) -> str: ...
    @property
    def group_name(self) -> str: ...

class Mailbox:
    def __init__(self, rank: int, world: int, timeout: float) -> None: ...
    def address(self) -> bytes: ...
    def connect(self, addresses: list[bytes]) -> str | None: ...
    def set_timeout(self, timeout: float) -> None: ...
    def send(self, tensor: Tensor, peer: int, tag: int) -> Operation: ...
    def recv(self, tensor: Tensor, peer: int | None, tag: int) -> Operation: ...
    def end(self) -> None: ...

class Mark:
    def wait(self, stream: Stream | None = None) -> None: ...
    def query(self) -> bool: ...

class Slot:
    def __init__(self, pool: Pool) -> None: ...
    @property
    def index(self) -> int: ...
    @property
    def names(self) -> tuple[str, str]: ...
    @property
    def addresses(self) -> tuple[int, int]: ...
    @property
    def live(self) -> int: ...
    def take_failure(self) -> Exception | None: ...

class Block:
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def data_ptr(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def counter(self) -> int: ...
    def peer_ptr(self, rank: int) -> int: ...
    def numpy(self, dtype: DType = None) -> Any: ...
    @property
    def __array_interface__(self) -> dict[str, Any]: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any: ...

class Algorithm:
    def __init__(self, plan: str) -> None: ...
    @staticmethod
    def native(
        source: str,
        path: str,
        kernel: str,
        collective: str,
        name: str,
        world: int | None,
        windows: tuple[bool, bool],
        in_place: bool,
        max_bytes: int | None,
        grid: int | None,
        threads: int,
    ) -> Algorithm: ...
    @property
    def name(self) -> str: ...
    @property
    def collective(self) -> str: ...
    @property
    def world(self) -> int | None: ...
    @property
    def origin(self) -> Literal["builtin", "plan", "native"]: ...
    @property
    def hash(self) -> str: ...
    @property
    def in_place(self) -> bool: ...
    @property
    def windows(self) -> list[Literal["input", "output"]]: ...
    @property
    def constraints(self) -> dict[str, Any] | None: ...
    @property
    def scratch(self) -> int: ...
    @property
    def blocks(self) -> int | None: ...
    def to_json(self) -> str: ...
    def save(self, path: str | os.PathLike[str]) -> None: ...
    def explain(self) -> str: ...
    def plot(self, path: str | os.PathLike[str]) -> None: ...
    def compile(
        self, arch: str = "sm_90", *, world: int | None = None, dtype: DType = "float32", op: Op = "sum"
    ) -> int: ...
    def execute(
        self,
        comm: Communicator,
        input: Tensor | int,
        output: Tensor | int | None = None,
        *,
        op: Op = "sum",
        src: int = 0,
        stream: Stream | None = None,
        count: int | None = None,
        dtype: DType | None = None,
    ) -> None: ...

class Communicator:
    def __init__(
        self,
        pool: Pool,
        *,
        timeout: float = 30.0,
        algorithm: str = "auto",
        all_to_all: str = "auto",
        algorithms: dict[str, str] | None = None,
        scratch_bytes: int | None = None,
        concurrent: int | None = None,
        sm_budget: int | None = None,
        beside_compute: bool = False,
        device_memory_bytes: int | None = None,
        device_memory_grows: bool = False,
    ) -> None: ...
    def all_reduce(
        self,
        tensor: Tensor,
        op: Op = "sum",
        out: Tensor | None = None,
        stream: Stream | None = None,
        *,
        algorithm: str | None = None,
    ) -> None: ...
    def _unseen(self) -> Communicator: ...
    def _try_all_reduce(self, tensor: Tensor, op: Op | None, out: Tensor | None) -> bool: ...
    def _refuse(
        self, why: str, message: tuple[str, int] | None = None, stream: Stream | None = None
    ) -> None: ...
    def reduce_scatter_tensor(
        self,
        output: Tensor,
        input: Tensor,
        op: Op = "sum",
        stream: Stream | None = None,
        *,
        algorithm: str | None = None,
    ) -> None: ...
    def all_gather_into_tensor(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        stream: Stream | None = None,
        *,
        algorithm: str | None = None,
    ) -> None: ...
    def broadcast(
        self,
        tensor: Tensor,
        src: int,
        stream: Stream | None = None,
        *,
        algorithm: str | None = None,
    ) -> None: ...
    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        stream: Stream | None = None,
        *,
        algorithm: str | None = None,
    ) -> None: ...
    def all_to_all_v(
        self,
        output: Tensor,
        input: Tensor,
        input_splits: Tensor,
        output_splits: Tensor | None = None,
        output_offsets: Tensor | None = None,
        stream: Stream | None = None,
    ) -> None: ...
    def barrier(self, stream: Stream | None = None, *, waits: Tensor | None = None) -> None: ...
    def send(self, tensor: Tensor, dst: int, stream: Stream | None = None) -> None: ...
    def recv(self, tensor: Tensor, src: int, stream: Stream | None = None) -> None: ...
    def put(
        self,
        dst: Tensor,
        src: Tensor,
        peer: int,
        stream: Stream | None = None,
        *,
        engine: Literal["kernel", "copy"] = "kernel",
    ) -> None: ...
    def get(
        self,
        dst: Tensor,
        src: Tensor,
        peer: int,
        stream: Stream | None = None,
        *,
        engine: Literal["kernel", "copy"] = "kernel",
    ) -> None: ...
    def signal(
        self,
        peer: int,
        channel: int = 0,
        stream: Stream | None = None,
        *,
        engine: Literal["kernel", "memory"] = "kernel",
    ) -> None: ...
    def wait(
        self,
        peer: int,
        channel: int = 0,
        timeout: float = 30.0,
        stream: Stream | None = None,
        *,
        engine: Literal["kernel", "memory"] = "kernel",
    ) -> None: ...
    def barrier_on(self, channel: int, timeout: float = 30.0, stream: Stream | None = None) -> None: ...
    def synchronize(self, stream: Stream | None = None) -> None: ...
    def memory(self) -> CommunicatorMemory: ...
    def set_sm_budget(self, sms: int | None) -> None: ...
    def forget_stream(self, stream: Stream) -> None: ...
    def register(self, algorithm: Algorithm) -> None: ...
    def execute(
        self,
        algorithm: Algorithm | str,
        input: Tensor | int,
        output: Tensor | int | None = None,
        *,
        op: Op = "sum",
        src: int = 0,
        stream: Stream | None = None,
        count: int | None = None,
        dtype: DType | None = None,
    ) -> None: ...
    def algorithms(self, collective: str | None = None) -> list[Algorithm]: ...
    def load_tables(self, path: str | os.PathLike[str]) -> None: ...
    def explain(
        self,
        collective: str,
        input: Tensor,
        out: Tensor | None = None,
        *,
        op: Op = "sum",
        src: int = 0,
        algorithm: str | None = None,
        stream: Stream | None = None,
    ) -> Explanation: ...
    def select(
        self,
        collective: str,
        selector: Callable[[int, str, str | None, int, list[str], str], str | None] | None,
    ) -> None: ...
    def mark(self, stream: Stream | None = None) -> Mark: ...
    def follow(self, stream: Stream) -> None: ...
    def extend_order(self, stream: Stream | None = None) -> None: ...
    @property
    def failure(self) -> Exception | None: ...
    @property
    def rank(self) -> int: ...
    @property
    def world(self) -> int: ...
    @property
    def timeout(self) -> float: ...
    @timeout.setter
    def timeout(self, value: float) -> None: ...
    @property
    def algorithm(self) -> str: ...

def _all_reduce_norm(
    communicator: Communicator,
    addresses: tuple[int, ...],
    sizes: tuple[int, int, int, int],
    dtype: str,
    numbers: tuple[float, float],
    how: tuple[str, bool, str],
) -> None: ...
def _begin_matmul(
    communicator: Communicator, kind: str, dtype: str, sizes: tuple[int, int, int], rest: int
) -> None: ...
def _fail_matmul(communicator: Communicator, why: str) -> None: ...
def _has_tensor_kernels(communicator: Communicator) -> bool: ...
def _matmul_memory(rows: int, columns: int, world: int) -> tuple[int, int, int]: ...
def _gather_memory(dtype: str, rows: int, inner: int, world: int) -> tuple[int, int, int]: ...
def _gather_multiply(
    communicator: Communicator,
    dtypes: tuple[str, str],
    left: tuple[int, int, int],
    rights: list[tuple[tuple[int, int], int, tuple[int, int], int]],
    right_by_rows: bool,
    sizes: tuple[int, int, int],
    memory: tuple[int, int, int],
    scratch: tuple[int, int],
    rest: int,
) -> None: ...
def _multiply_scatter(
    communicator: Communicator,
    dtypes: tuple[str, str],
    terms: list[tuple[tuple[int, int, int], tuple[int, int], int]],
    right_by_rows: bool,
    out: tuple[int, int],
    scales: tuple[int, int],
    sizes: tuple[int, int, int],
    mean: bool,
    memory: tuple[int, int],
    scratch: tuple[int, int],
    rest: int,
) -> None: ...
def _has_room_for_product(communicator: Communicator, rows: int, columns: int) -> bool: ...
def _make_room_for_product(communicator: Communicator, dtype: str, rows: int, columns: int) -> bool: ...
def _multiply_all_reduce(
    communicator: Communicator,
    dtype: str,
    left: tuple[int, int],
    right: tuple[int, int],
    right_by_rows: bool,
    out: int,
    sizes: tuple[int, int, int],
    mean: bool,
) -> None: ...
def _push_step(
    communicator: Communicator, ends: tuple[int, int, int], to: tuple[int, int | None], stream: int
) -> None: ...
def _end_watching() -> None: ...
def _pull(communicator: Communicator, ends: tuple[int, int, int], peer: int, stream: int) -> None: ...
def _step(communicator: Communicator, waits: bool, pair: tuple[int, int], stream: int) -> None: ...

class ExpertBuffer:
    def __init__(
        self,
        comm: Communicator,
        *,
        hidden: int,
        experts: int,
        top_k: int,
        max_tokens: int,
        dtype: DType,
        capacity: int | None = None,
        num_sms: int | None = None,
        any_layout: bool = False,
    ) -> None: ...
    @staticmethod
    def check(
        comm: Communicator,
        *,
        hidden: int,
        experts: int,
        top_k: int,
        max_tokens: int,
        dtype: DType,
        capacity: int | None = None,
        num_sms: int | None = None,
    ) -> None: ...
    @staticmethod
    def bytes_for(
        *, world: int, hidden: int, experts: int, top_k: int, max_tokens: int, dtype: DType
    ) -> int: ...
    def set_num_sms(self, num_sms: int | None) -> None: ...
    def handle_parts(self) -> dict[str, int]: ...
    def received(self, part: str, shape: Sequence[int], dtype: DType) -> Block: ...
    def capacity(self, by_expert: bool, alignment: int) -> int: ...
    def memory(self) -> dict[str, int]: ...
    def dispatch(
        self,
        handle: Tensor,
        x: Tensor,
        topk_ids: Tensor | None,
        topk_weights: Tensor | None = None,
        scales: Tensor | None = None,
        quantize: str | None = None,
        out: Tensor | None = None,
        out_scales: Tensor | None = None,
        alignment: int = 1,
        stream: Stream | None = None,
        expert_rows: int = 0,
        exact: bool = False,
        more: int = 0,
    ) -> tuple[int, list[int]] | None: ...
    def combine(
        self,
        handle: Tensor,
        out: Tensor,
        input: Tensor,
        rows: int,
        weights: Tensor | None = None,
        by_expert: bool = False,
        stream: Stream | None = None,
        more: int = 0,
    ) -> None: ...

class Channels:
    def __init__(self, communicator: Communicator, block: Block, begin: int) -> None: ...
    @staticmethod
    def bytes(world: int) -> tuple[int, int]: ...
    def signal(self, peer: int, channel: int, stream: Stream | None = None) -> None: ...
    def wait(self, peer: int, channel: int, timeout: float, stream: Stream | None = None) -> None: ...
    def barrier(self, channel: int, timeout: float, stream: Stream | None = None) -> None: ...

def _shows_memory(name: str, tensor: Any) -> bool: ...
def _waiting_senders(comm: Communicator) -> list[int]: ...
def _count_versions(tensors: list[Any]) -> None: ...
def check_call(device: int, rank: int, world: int, call: str, arguments: tuple[Any, ...]) -> None: ...
