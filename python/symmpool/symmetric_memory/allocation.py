"""Where tensors of torch's symmetric memory lie, and their handles.

What is known of a tensor's memory is kept on its storage, as `_symmpool`: torch keeps the object in Python
for as long as the storage lives. So handles end with the memory, and another tensor at its address has
none."""

from __future__ import annotations

import contextlib
import dataclasses
import reprlib
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _SymmetricMemory

from symmpool._symmpool import Block, Pool
from symmpool.communicators import cache, devices
from symmpool.errors import InvalidArgumentError, UnsupportedError
from symmpool.groups import names, pool_registry, process_groups, resolution
from symmpool.memory import handle, install
from symmpool.memory.handle import HandleMemory, SymmetricMemory

if TYPE_CHECKING:
    import torch.distributed

    from symmpool.groups.types import DeviceLike, GroupKey, GroupLike

__all__ = ["empty_strided_p2p", "get_mem_pool", "group", "is_symm_mem_tensor", "rendezvous"]

_EMPTY = "torch.distributed._symmetric_memory.empty"
#: Bytes of the smallest block: a tensor without elements has a place, too.
MIN_BYTES = 16

#: The groups of `group` blocks that a thread is in, the innermost last.
_threads = threading.local()
#: Memory by the `alloc_id` that it was asked for with.
_persistent: dict[int, torch.Tensor] = {}


@dataclasses.dataclass(eq=False)
class _Memory:
    """Place of a storage: in which pool's block it is (None before its first rendezvous), and its handles by
    group. A handle that keeps the storage itself is kept by the program alone."""

    pool: Pool | None = None
    block: Block | None = None
    #: Refers to what stands for the pool's group.
    group: weakref.ref[Any] | None = None
    handles: weakref.WeakKeyDictionary[Any, Any] = dataclasses.field(
        default_factory=weakref.WeakKeyDictionary
    )

    @property
    def key(self) -> GroupKey | None:
        """The object that stands for the pool's group; None where that is gone, and before the first
        rendezvous."""
        return None if self.group is None else self.group()

    def handle_for(self, key: GroupKey | None) -> SymmetricMemory | None:
        found = None if key is None else self.handles.get(key)
        return found() if isinstance(found, weakref.ref) else found


def _memory_of(tensor: torch.Tensor) -> _Memory | None:
    return getattr(tensor.untyped_storage(), "_symmpool", None)


@contextlib.contextmanager
def group(group: GroupLike) -> Iterator[None]:
    """Has this thread's tensors of `empty`, and `get_mem_pool`, be of a group's pool at once: no `rendezvous`
    moves them. All ranks of the group make the same tensors in the same order."""
    key = _key_of(group)
    groups = _threads.__dict__.setdefault("groups", [])
    groups.append(key)
    try:
        yield
    finally:
        groups.pop()


def _group_of_block() -> GroupKey | None:
    groups = _threads.__dict__.get("groups")
    return groups[-1] if groups else None


def _key_of(group: GroupLike) -> GroupKey:
    """The object that stands for a group that this process is in."""
    key = resolution.key_of(names.resolved(group))
    if key is dist.GroupMember.NON_GROUP_MEMBER:
        raise InvalidArgumentError("symmetric memory: group: this process is no member of it")
    resolution.resolve(key)  # refuses what is no group, and what is over
    return key


def device_of(device: DeviceLike) -> torch.device:
    """The device of an argument, with its number. Raises UnsupportedError for kinds that pools are not on."""
    found = torch.get_default_device() if device is None else torch.device(device)
    if found.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"symmetric memory: device {str(found)!r}: pools are on the CPU and on CUDA")
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return found


def _pool_for(key: GroupKey, device: torch.device) -> Pool:
    """The pool of a group on a device, made if need be, which is collective."""
    return cache.pool_of(key, devices.number_of(str(device)))


def _bytes_of(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> int:
    if any(each == 0 for each in size):
        return 0
    return (1 + sum((each - 1) * step for each, step in zip(size, stride, strict=True))) * dtype.itemsize


def empty_strided_p2p(
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: DeviceLike,
    group_name: str | None = None,
    alloc_id: int | None = None,
) -> torch.Tensor:
    """A tensor of symmetric memory, as torch's function of this name gives it. Where a group is named, or by
    `group`, it lies in that group's pool from the beginning; else `rendezvous` moves it there. Tensors with
    one `alloc_id` have the same memory, one after the other."""
    device, size, stride = device_of(device), tuple(size), tuple(stride)
    key = _group_of_block() if group_name is None else _key_of(group_name)
    if alloc_id is not None:
        return _empty_persistent(size, stride, dtype, device, key, alloc_id)
    if key is None:
        found = torch.empty_strided(size, stride, dtype=dtype, device=device)
        found.untyped_storage()._symmpool = _Memory()  # type: ignore[attr-defined]
        return found
    return _empty_in(key, size, stride, dtype, device)


def _empty_in(
    key: GroupKey, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    pool = _pool_for(key, device)
    block = pool.block(max(_bytes_of(size, stride, dtype), MIN_BYTES), "uint8")
    storage = torch.from_dlpack(block).untyped_storage()  # type: ignore[attr-defined]
    storage._symmpool = _Memory(pool, block, weakref.ref(key))  # type: ignore[attr-defined]
    return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, size, stride)


def _empty_persistent(
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    key: GroupKey | None,
    alloc_id: int,
) -> torch.Tensor:
    bytes = _bytes_of(size, stride, dtype)
    key = _key_of(None) if key is None else key
    kept = _persistent.get(alloc_id)
    memory = None if kept is None else _memory_of(kept)
    if kept is None or memory is None or memory.key is not key:
        kept = _persistent[alloc_id] = _empty_in(key, (bytes,), (1,), torch.uint8, device)
    elif kept.numel() != bytes or kept.device != device:
        raise InvalidArgumentError(
            f"empty_strided_p2p: alloc_id {alloc_id}: {bytes} bytes on {device}, and {kept.numel()} on "
            f"{kept.device} before; one alloc_id stands for memory of one size"
        )
    elif _uses(kept) > 1:
        raise InvalidArgumentError(
            f"empty_strided_p2p: alloc_id {alloc_id}: a tensor that was made with it is still there; let go "
            "of it before, or use another alloc_id"
        )
    return torch.empty(0, dtype=dtype, device=device).set_(kept.untyped_storage(), 0, size, stride)


def _uses(tensor: torch.Tensor) -> int:
    """How many tensors of torch have a tensor's storage."""
    storage = tensor.untyped_storage()
    # The object in Python is one more use.
    return torch._C._storage_Use_Count(storage._cdata) - 1  # type: ignore[attr-defined]


def is_symm_mem_tensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of symmetric memory: of `empty`, or in a pool."""
    return _memory_of(tensor) is not None or bool(pool_registry.holding(tensor))


def get_mem_pool(device: torch.device) -> torch.cuda.MemPool:
    """The torch.cuda.MemPool of the default group's pool on a device, or of the group of a `group` block. All
    ranks of the group make the same tensors in it, in the same order. Collective where it makes the pool."""
    return mem_pool_of(device)._scope().mempool


def mem_pool_of(device: torch.device) -> Pool:
    """The pool whose MemPool `get_mem_pool` gives. Raises UnsupportedError where torch has none."""
    found = device_of(device)
    if found.type != "cuda":
        raise UnsupportedError(f"get_mem_pool: torch has no MemPool on the CPU; make tensors with {_EMPTY}")
    if install.is_installed():
        raise UnsupportedError(
            "get_mem_pool: under symmpool.install() torch's allocator has no MemPools; make tensors inside "
            f"of `with pool:`, or with {_EMPTY}"
        )
    key = _group_of_block()
    return _pool_for(_key_of(None) if key is None else key, found)


def _checked(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise InvalidArgumentError(f"rendezvous: tensor: {reprlib.repr(tensor)} is no tensor of torch")
    try:
        tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError) as error:  # sparse, fake and the like
        raise InvalidArgumentError(f"rendezvous: tensor: it has no memory ({error})") from None
    return tensor


def rendezvous(tensor: torch.Tensor, group: GroupLike = None) -> SymmetricMemory:
    """The handle of a tensor's memory for a group; without one, for the group whose pool it is in. Collective
    the first time: all ranks of the group call it, in the same order as for their other tensors, and wait for
    each other as long as the group's timeout says. Later calls give the same handle, and talk to nobody. The
    handle's buffer is the tensor's whole storage.

    The first rendezvous of a tensor of `empty` moves it to the group's pool: its address changes, and its
    values stay. A tensor that lies in a pool can meet on any group whose ranks are in that pool's group, once
    it has met there.

    Raises InvalidArgumentError for other memory, and for a tensor that has views when it is to be moved: the
    views would stay behind. The other ranks then raise DivergedError at once, which names this one. Raises
    TimeoutError, which names the ranks that did not come."""
    tensor = _checked(tensor)
    known = _memory_of(tensor)
    key = _key_of(known.key if group is None and known is not None else group)
    if known is not None:
        found = known.handle_for(key)
        if found is not None:
            return found
    device = device_of(tensor.device)
    holding = next(iter(pool_registry.holding(tensor)), None) if known is None else known.pool
    pool = holding if holding in pool_registry.pools_of(key) else _pool_for(key, device)
    assert pool is not None
    pad = int(getattr(_SymmetricMemory, "signal_pad_size", 0)) or handle.SIGNAL_PAD_SIZE
    handle.check_hosts(pool)
    try:
        memory, buffer = _buffer_for(tensor, known, holding, pool, key)
    except InvalidArgumentError as refusal:
        handle.refuse(pool, pad, refusal)
        raise
    made = SymmetricMemory(pool, buffer, pad)
    if buffer.take is not None:
        memory.block = made.buffer.owner
        _move(tensor, memory)
    keeps_storage = isinstance(buffer.owner, torch.Tensor)
    memory.handles[key] = weakref.ref(made) if keeps_storage else made
    if keeps_storage:
        tensor.untyped_storage()._symmpool = memory  # type: ignore[attr-defined]
    return made


def _buffer_for(
    tensor: torch.Tensor, known: _Memory | None, holding: Pool | None, pool: Pool, key: GroupKey
) -> tuple[_Memory, HandleMemory]:
    """The memory that a rendezvous makes a handle of. Talks to nobody."""
    storage = tensor.untyped_storage()
    bytes, dtype = int(storage.nbytes()), str(tensor.dtype)
    if known is not None and known.pool is None:
        if _uses(tensor) > (1 if tensor._base is None else 2):
            raise InvalidArgumentError(
                "rendezvous: the tensor has views, which would stay where it was; call rendezvous before "
                "they are made, or make it in the group's pool: `with symmpool.symmetric_memory.group(g)` "
                f"around {_EMPTY}"
            )
        memory = _Memory(pool, None, weakref.ref(key))
        ranks = range(pool.world)

        def take() -> HandleMemory:
            return _buffer_of(_taken(pool, tensor), pool, bytes, dtype)

        place = {"place": handle.NO_PLACE, "start": 0, "taken": bytes}
        return memory, HandleMemory(pool, 0, bytes, dtype=dtype, ranks=ranks, owner=None, take=take, **place)
    if known is None and holding is None:
        raise InvalidArgumentError(
            f"rendezvous: the tensor at {storage.data_ptr():#x} is no symmetric memory; make it with "
            f"{_EMPTY}, after symmpool.symmetric_memory.install()"
        )
    memory = known or _Memory(holding, None, weakref.ref(pool_registry.key_holding(holding)))
    if memory.pool is pool:
        if memory.block is not None:
            return memory, _buffer_of(memory.block, pool, bytes, dtype)
        return memory, dataclasses.replace(HandleMemory.of_tensor(pool, tensor), start=0, taken=bytes)
    first = memory.handle_for(memory.key)
    if first is None:
        raise InvalidArgumentError(
            f"rendezvous: the tensor lies in the pool of {_described(memory.key)}; call rendezvous on that "
            f"group first, on all its ranks, and then on {_described(key)}"
        )
    return memory, first.buffer_for(_ranks_within(key, memory.key))


def _buffer_of(block: Block, pool: Pool, bytes: int, dtype: str) -> HandleMemory:
    """The memory of a block, for a handle of all ranks."""
    ranks, place = range(pool.world), block.offset
    return HandleMemory(pool, block.data_ptr, bytes, 0, bytes, dtype, ranks, owner=block, place=place)


def _described(key: GroupKey | None) -> str:
    return process_groups.description_of(key) if isinstance(key, dist.ProcessGroup) else "its group"


def _ranks_within(key: Any, outer: Any) -> list[int]:
    """The ranks of a group by their numbers in another one."""
    try:
        theirs = dist.get_process_group_ranks(outer)
        return [theirs.index(rank) for rank in dist.get_process_group_ranks(key)]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise InvalidArgumentError(
            f"rendezvous: the tensor lies in the pool of {_described(outer)}, which not all ranks of "
            f"{_described(key)} are in; make another tensor for that, or call rendezvous on the larger group "
            "first"
        ) from None


def _taken(pool: Pool, tensor: torch.Tensor) -> Block:
    """A block with the values of a tensor's storage, once every rank has it."""
    storage = tensor.untyped_storage()
    bytes = int(storage.nbytes())
    block = handle.take_block(pool, max(bytes, MIN_BYTES))
    old = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)  # type: ignore[arg-type]
    torch.from_dlpack(block)[:bytes].copy_(old)  # type: ignore[attr-defined]
    if tensor.is_cuda:
        # Peers may read as soon as they leave the commit.
        torch.cuda.current_stream(tensor.device).synchronize()
    pool.commit()
    return block


def _move(tensor: torch.Tensor, memory: _Memory) -> None:
    """Has a tensor, and the one that it is a view of, lie in the block that its values were copied to."""
    storage = torch.from_dlpack(memory.block).untyped_storage()  # type: ignore[attr-defined]
    storage._symmpool = memory  # type: ignore[attr-defined]
    with torch.no_grad():
        for each in (tensor, tensor._base):
            if each is not None:
                place = (storage, each.storage_offset(), each.size(), each.stride())
                each.data = torch.empty(0, dtype=each.dtype, device=each.device).set_(*place)
