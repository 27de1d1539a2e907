from collections.abc import Sequence
from typing import Any, Literal, Protocol, TypeAlias, TypedDict

# A torch.Tensor, a numpy.ndarray or a Block: contiguous, on the pool's device.
Tensor: TypeAlias = Any
# A name ("float32", "bf16", ...), a torch.dtype, or a type of numpy or ml_dtypes.
DType: TypeAlias = Any
# One of these names, or a constant of torch.distributed.ReduceOp.
Op: TypeAlias = Literal["sum", "prod", "min", "max", "avg"] | Any

class _HasStream(Protocol):
    @property
    def cuda_stream(self) -> int: ...

Stream: TypeAlias = int | _HasStream

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
    set_aside: int
    live_blocks: int
    segments: int
    events: int
    allocs: int
    frees: int
    unordered_frees: int

class PoolStats(TypedDict):
    allocated: int
    reserved: int
    commits: int
    windows: int
    lanes: dict[str, LaneStats]

def algorithms() -> list[str]: ...
def version() -> str: ...
def machine() -> dict[str, Any]: ...

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
    def local_rank(self) -> int | None: ...

class Pool:
    def __init__(
        self,
        group: Group | tuple[Any, int, int] | Any | None = None,
        device: Any = None,
        *,
        stride: int | None = None,
        timeout: float | None = None,
        allow_shared_device: bool = False,
    ) -> None: ...
    def empty(self, shape: int | Sequence[int], dtype: DType = None) -> Any: ...
    def block(
        self, shape: int | Sequence[int], dtype: DType, stream: Stream | None = None
    ) -> Block: ...
    def commit(self) -> CommitReport: ...
    @property
    def is_commit_due(self) -> bool: ...
    def resync(self) -> None: ...
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

class Communicator:
    def __init__(
        self,
        pool: Pool,
        *,
        timeout: float = 30.0,
        algorithm: str = "auto",
        scratch_bytes: int | None = None,
    ) -> None: ...
    def all_reduce(
        self,
        tensor: Tensor,
        op: Op = "sum",
        out: Tensor | None = None,
        stream: Stream | None = None,
    ) -> None: ...
    def reduce_scatter(
        self, output: Tensor, input: Tensor, op: Op = "sum", stream: Stream | None = None
    ) -> None: ...
    def all_gather(self, output: Tensor, input: Tensor, stream: Stream | None = None) -> None: ...
    def broadcast(self, tensor: Tensor, src: int = 0, stream: Stream | None = None) -> None: ...
    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        stream: Stream | None = None,
    ) -> None: ...
    def barrier(self, stream: Stream | None = None) -> None: ...
    def signal(self, peer: int, channel: int = 0, stream: Stream | None = None) -> None: ...
    def wait(
        self, peer: int, channel: int = 0, timeout: float = 30.0, stream: Stream | None = None
    ) -> None: ...
    def synchronize(self, stream: Stream | None = None) -> None: ...
    @property
    def failure(self) -> Exception | None: ...
    @property
    def rank(self) -> int: ...
    @property
    def world(self) -> int: ...
    @property
    def algorithm(self) -> str: ...
