"""The handle of torch's symmetric memory, on this package's memory: for authors of kernels.

`rendezvous(tensor)` gives, for a tensor of a pool, where every rank has its copy, and words that ranks
signal each other with. Names and meaning are those of torch's `_SymmetricMemory`.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import operator
import reprlib
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from symmpool._symmpool import Block, Channels, Communicator, Group, Pool
from symmpool.communicators import cache
from symmpool.errors import DivergedError, Error, InvalidArgumentError, UnsupportedError
from symmpool.groups import names, pool_registry, process_groups, resolution

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import ModuleType
    from typing import SupportsIndex

    import torch

    from symmpool.groups.types import GroupLike

__all__ = ["SIGNAL_PAD_SIZE", "SymmetricMemory", "rendezvous"]

#: Bytes of a rank's signal pad unless others are asked for; torch's number.
SIGNAL_PAD_SIZE = 2048
#: How long a wait lasts unless a timeout is given, in seconds: no wait is without an end.
DEFAULT_WAIT = 30.0
#: Channels between two ranks.
CHANNELS = 16
# Words that a rank writes about its tensor, in front of its pad: where its buffer is, the buffer's bytes,
# where in it the tensor is, the tensor's bytes, and the type of elements; or REFUSED for the bytes, and the
# reason. The commit finds pads of different sizes.
RECORD = struct.Struct("<4q224s")
REFUSED = -1
# In place of an offset: the tensor has none yet, and gets it where all ranks bring such a tensor.
NO_PLACE = -2


def _sizes_of(sizes: Iterable[int]) -> tuple[int, ...]:
    try:
        return tuple(operator.index(size) for size in sizes)
    except TypeError:
        raise InvalidArgumentError(f"sizes: {sizes!r} are no sequence of lengths") from None


def rendezvous(
    tensor: torch.Tensor, group: GroupLike = None, *, signal_pad_size: int = SIGNAL_PAD_SIZE
) -> SymmetricMemory:
    """A handle to every rank's copy of a torch tensor in a pool's memory. Collective: all ranks call
    it in the same place of their program with their copies; it commits the pool.

    `group` is what the pool was made on, its name in torch, or the pool; without it all pools are
    looked through. `signal_pad_size` is a multiple of 4, the same on every rank. Unlike torch's, a
    handle is made by every call, so that none depends on what other ranks still remember.

    Raises InvalidArgumentError for a tensor that is not in a pool, DivergedError on every rank where
    tensors lie at different offsets or have different sizes or types, and what `Pool.commit` raises. A
    rank that refuses its own arguments takes part all the same, and the others raise DivergedError at
    once; but where several pools could be meant it cannot tell which, and they wait: name the pool."""
    candidates = _candidates(group)
    try:
        size = _pad_size(signal_pad_size)
        pool = _holding(tensor, group, candidates)
    except InvalidArgumentError as refusal:
        if len(candidates) == 1:
            refuse(candidates[0], signal_pad_size, refusal)
        raise
    check_hosts(pool)
    return SymmetricMemory(pool, HandleMemory.of_tensor(pool, tensor), size)


def check_hosts(pool: Pool) -> None:
    """Raises UnsupportedError for a pool whose ranks are on several hosts, on every rank alike."""
    if len(pool.hosts) > 1:
        raise UnsupportedError(
            f"symmpool: rendezvous on rank {pool.rank}: the pool's ranks are on {len(pool.hosts)} hosts "
            f"({pool.hosts}), and a handle reaches the memory of one; make a pool of the ranks of one host"
        )


def _pad_size(size: SupportsIndex) -> int:
    if not isinstance(size, int) or isinstance(size, bool) or not 4 <= size < 1 << 40 or size % 4:
        raise InvalidArgumentError(f"signal_pad_size: {size!r} is no multiple of 4 from 4 to 2**40")
    return size


def refuse(pool: Pool, signal_pad_size: SupportsIndex | None, refusal: InvalidArgumentError) -> None:
    """Takes part in a rendezvous that this rank refuses, so that the other ranks raise its reason."""
    import torch

    try:
        size = _pad_size(SIGNAL_PAD_SIZE if signal_pad_size is None else signal_pad_size)
    except InvalidArgumentError:
        size = SIGNAL_PAD_SIZE  # their size, most likely
    try:
        _share(torch, pool, size, lambda _: (0, REFUSED, 0, 0, str(refusal).encode()))
    except Error as error:
        raise refusal from error


def _place_channels(pad: int, world: int) -> tuple[int, int]:
    """Where a handle's channels begin, behind a pad of so many bytes, and where they end."""
    bytes, align = Channels.bytes(world)
    begin = -(-(RECORD.size + pad) // align) * align
    return begin, begin + bytes


def _share(
    torch: ModuleType, pool: Pool, pad: int, say: Callable[[Block], tuple[object, ...]]
) -> tuple[Any, Block]:
    """Memory for what this rank says, and for a pad and channels of zeros, and its Block, once every rank has
    it."""
    block = take_block(pool, _place_channels(pad, pool.world)[1])
    memory = torch.from_dlpack(block)
    memory[RECORD.size :].zero_()
    record = bytearray(RECORD.pack(*say(block)))
    memory[: RECORD.size].copy_(torch.frombuffer(record, dtype=torch.uint8))
    if memory.is_cuda:
        # Peers may signal as soon as they leave the commit.
        torch.cuda.current_stream(memory.device).synchronize()
    # Also where no commit is due: this is where ranks wait for each other.
    pool.commit()
    return memory, block


def take_block(pool: Pool, bytes: int) -> Block:
    """A block of a pool that all ranks take before they commit. Where this rank gets none, the commit says so
    to the others."""
    try:
        return pool.block(bytes, "uint8")
    except Error:
        # The other ranks are in this commit, which reports the failure to them.
        pool.commit()
        raise


def _holding(tensor: torch.Tensor, group: GroupLike, candidates: list[Pool]) -> Pool:
    """The pool that a tensor lies in."""
    import torch

    if not isinstance(tensor, torch.Tensor):
        hint = "; torch.from_dlpack makes one of it" if hasattr(tensor, "__dlpack__") else ""
        raise InvalidArgumentError(
            f"rendezvous: tensor: {reprlib.repr(tensor)} ({type(tensor).__name__}) is no tensor of "
            f"torch{hint}"
        )
    try:
        address = tensor.untyped_storage().data_ptr()
    except RuntimeError as error:  # sparse, fake and the like
        raise InvalidArgumentError(f"rendezvous: tensor: it has no memory ({error})") from None
    for pool in candidates:
        if pool.owns(address):
            return pool
    where = "this process's" if group is None else f"group {group!r}'s"
    raise InvalidArgumentError(
        f"rendezvous: the tensor at {address:#x} is in no pool of {where}; make it with "
        "pool.empty(), or inside of `with pool:`"
    )


def _candidates(group: GroupLike) -> list[Pool]:
    """The pools that a group means."""
    group = names.resolved(group)
    if group is None:
        return pool_registry.all_pools()
    if isinstance(group, Pool):
        return [group]
    dist = process_groups.distributed()
    if not isinstance(group, Group) and not (dist is not None and isinstance(group, dist.ProcessGroup)):
        resolution.resolve(group)  # refuses it
    return pool_registry.pools_of(group)  # type: ignore[arg-type]  # a name was resolved


@dataclasses.dataclass(frozen=True)
class HandleMemory:
    """Memory of a pool that a handle is made of: this rank's copy, and where the other ranks have theirs."""

    pool: Pool
    #: Its address, and how many bytes it has.
    base: int
    bytes: int
    #: Bytes from its beginning to the tensor, bytes of the tensor, and its type.
    start: int
    taken: int
    dtype: str
    #: The pool's rank for each rank of the handle.
    ranks: Sequence[int]
    #: What keeps the memory.
    owner: Any
    #: Its offset in the pool; None where the handle's own memory lies in that pool, and tells it.
    place: int | None = None
    #: Takes the memory, for a tensor that lies in no pool before all ranks have agreed on it: all of them do.
    take: Callable[[], HandleMemory] | None = None

    @staticmethod
    def of_tensor(pool: Pool, tensor: torch.Tensor) -> HandleMemory:
        """The storage of a tensor in a pool, for a handle of all of the pool's ranks."""
        storage = tensor.untyped_storage()
        # An empty tensor has no address.
        return HandleMemory(
            pool,
            base=storage.data_ptr(),
            bytes=int(storage.nbytes()),
            start=int(tensor.storage_offset()) * tensor.itemsize,
            taken=tensor.numel() * tensor.itemsize,
            dtype=str(tensor.dtype),
            ranks=range(pool.world),
            owner=tensor,
        )

    def place_beside(self, block: Block) -> int:
        """Its offset in the pool, as a block of the same pool tells it."""
        return self.base - block.data_ptr + block.offset if self.place is None else self.place


class SymmetricMemory:
    """Where every rank has its copy of a tensor, and what ranks signal each other with.

    The buffer is the tensor's whole storage; `storage_offset`s count elements from its beginning.
    The handle keeps the tensor's memory and the pool. Channels are 0 to 15, and are the handle's own: its
    signals complete no waits of other handles, nor of a communicator. (torch has a signal pad for each
    allocation, which the handles of its tensors share; there a channel holds one signal, and here they are
    counted.) Keep a handle until streams are past its signals on all ranks."""

    def __init__(self, pool: Pool, buffer: HandleMemory, signal_pad_size: int):
        import torch

        self._torch, self._pool, self._buffer = torch, pool, buffer

        def say(block: Block) -> tuple[object, ...]:
            place = buffer.place_beside(block)
            return place, buffer.bytes, buffer.start, buffer.taken, buffer.dtype.encode()

        memory, block = _share(torch, pool, signal_pad_size, say)
        self._pad = memory[RECORD.size : RECORD.size + signal_pad_size]
        ranks = range(pool.world)
        self._check_same(memory, block)
        if buffer.take is not None:
            self._buffer = buffer = buffer.take()
        self._place = buffer.place_beside(block)
        address, size = self._pad.data_ptr(), signal_pad_size
        self._buffers = [buffer.pool.peer_ptr(rank, buffer.base, buffer.bytes) for rank in buffer.ranks]
        self._pads = [pool.peer_ptr(rank, address, size) for rank in ranks]
        device = self._pad.device
        self._buffers_there = torch.tensor(self._buffers, dtype=torch.int64, device=device)
        self._pads_there = torch.tensor(self._pads, dtype=torch.int64, device=device)
        if self._pad.is_cuda:
            # Whatever stream a kernel runs on, the addresses are there.
            torch.cuda.current_stream(device).synchronize()
        self._comm: Communicator = cache.communicator(pool, pool.device)
        # A pad of torch's belongs to an allocation. So do these: they end with the handle, and no signal of
        # another handle, or of a communicator, completes a wait on them.
        self._channels = Channels(self._comm, block, _place_channels(signal_pad_size, pool.world)[0])

    def _check_same(self, memory: Any, block: Block) -> None:
        """Compares what ranks said of their tensors. Every rank does, with the same outcome; the
        memory is not used again before all have."""
        pool, size = self._pool, RECORD.size
        read = self._torch.utils.dlpack.from_dlpack
        parts = [read(pool.peer_bytes(rank, block.data_ptr, size, memory)) for rank in range(pool.world)]
        found = [RECORD.unpack(bytes(row)) for row in self._torch.stack(parts).tolist()]
        if len(set(found)) == 1:
            return
        texts = [said.rstrip(b"\0").decode(errors="replace") for *_, said in found]
        refusing = [rank for rank, (_, length, *_) in enumerate(found) if length == REFUSED]
        if refusing:
            reasons = [f"rank {rank} refuses its arguments ({texts[rank]})" for rank in refusing]
            error = DivergedError(f"rendezvous: {'; '.join(reasons)}")
            error.ranks = tuple(refusing)
            raise error
        (usual, _), *_ = Counter(found).most_common(1)
        descriptions = []
        for rank, (offset, length, start, taken, _) in enumerate(found):
            where = "in no pool yet" if offset == NO_PLACE else f"at offset {offset:#x}"
            descriptions.append(
                f"rank {rank}: {taken} bytes of {texts[rank]}, {start} bytes into a buffer of {length} "
                f"{where}"
            )
        error = DivergedError(
            "rendezvous: ranks bring different tensors; each brings its copy of the same one, at the "
            "same offset of the pool: " + "; ".join(descriptions)
        )
        error.ranks = tuple(rank for rank, each in enumerate(found) if each != usual)
        raise error

    @property
    def buffer(self) -> HandleMemory:
        """The memory that the handle is of."""
        return self._buffer

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self._pool.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self._pool.world

    @property
    def device(self) -> torch.device:
        """The memory's device."""
        return self._pad.device

    @property
    def buffer_ptrs(self) -> list[int]:
        """Where this process has each rank's buffer."""
        return list(self._buffers)

    @property
    def buffer_ptrs_dev(self) -> int:
        """Where these addresses are for kernels: 64 bits each, in rank order, on the device."""
        return self._buffers_there.data_ptr()

    @property
    def signal_pad_ptrs(self) -> list[int]:
        """Where this process has each rank's signal pad. Pads are zero at first, and nobody's but
        the caller's: `barrier`, `put_signal` and `wait_signal` use other memory."""
        return list(self._pads)

    @property
    def signal_pad_ptrs_dev(self) -> int:
        """Where these addresses are for kernels."""
        return self._pads_there.data_ptr()

    @property
    def multicast_ptr(self) -> int:
        """0: there is no multicast address."""
        return 0

    @property
    def buffer_size(self) -> int:
        """Bytes of a rank's buffer."""
        return self._buffer.bytes

    @property
    def signal_pad_size(self) -> int:
        """Bytes of a rank's signal pad."""
        return self._pad.numel()

    @property
    def offset(self) -> int:
        """Bytes from the beginning of the buffer to the tensor's first element."""
        return self._buffer.start

    def buffer_for(self, ranks: Sequence[int]) -> HandleMemory:
        """The handle's memory for a handle of some of its ranks, by their numbers here."""
        of = self._buffer
        return dataclasses.replace(of, ranks=[of.ranks[rank] for rank in ranks], place=self._place)

    def boxed(self) -> NoReturn:
        """Raises UnsupportedError: operators that take torch's own handle look into it in C++."""
        raise self._without("boxed", "call the handle's methods, or operators that take a group's name")

    def get_peer_cft_handle(self, peer: int) -> NoReturn:
        """Raises UnsupportedError: the memory is no NCCL window."""
        raise self._without(
            "get_peer_cft_handle", "use buffer_ptrs, or Pool.register_nccl for NCCL's windows"
        )

    def get_multimem_cft_handle(self) -> NoReturn:
        """Raises UnsupportedError: there is no multicast address."""
        raise self._without("get_multimem_cft_handle", "use buffer_ptrs")

    @staticmethod
    def _without(name: str, instead: str) -> UnsupportedError:
        return UnsupportedError(f"symmpool: {name} of a handle of symmetric memory is not served: {instead}")

    def get_buffer(
        self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int = 0
    ) -> torch.Tensor:
        """A tensor over `rank`'s buffer, of these sizes, from element `storage_offset` on."""
        return self._view(rank, 0, sizes, dtype, storage_offset)

    def get_remote_tensor(self, peer: int, sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """`peer`'s copy of the tensor that the handle was made of, or as much as sizes say."""
        return self._view(peer, self._buffer.start, sizes, dtype, 0)

    def get_signal_pad(
        self, rank: int, sizes: Sequence[int] = (), dtype: torch.dtype | None = None, storage_offset: int = 0
    ) -> torch.Tensor:
        """A tensor over `rank`'s signal pad; all of it, as uint32, unless `sizes` and `dtype` say
        otherwise."""
        dtype = self._torch.uint32 if dtype is None else dtype
        sizes = _sizes_of(sizes)
        if not sizes and isinstance(dtype, self._torch.dtype):
            sizes = (self.signal_pad_size // dtype.itemsize - storage_offset,)
        self._check_rank(rank)
        memory = (self._pool, rank, self._pad.data_ptr(), self.signal_pad_size, self._pad)
        return self._tensor_at(memory, sizes, dtype, storage_offset)

    def _view(
        self, rank: int, skipped: int, sizes: Iterable[int], dtype: torch.dtype, start: int
    ) -> torch.Tensor:
        """A tensor over a rank's buffer, without its first bytes."""
        self._check_rank(rank)
        of, begin, length = self._buffer, self._buffer.base + skipped, self._buffer.bytes - skipped
        return self._tensor_at((of.pool, of.ranks[rank], begin, length, of.owner), sizes, dtype, start)

    def _tensor_at(
        self, memory: tuple[Any, ...], sizes: Iterable[int], dtype: torch.dtype, start: int
    ) -> torch.Tensor:
        """A tensor over a pool's memory on a rank: of a number of bytes from an address on."""
        pool, rank, base, length, owner = memory
        if not isinstance(dtype, self._torch.dtype):
            raise InvalidArgumentError(f"dtype: {dtype!r} is no torch.dtype")
        sizes = _sizes_of(sizes)
        count = math.prod(sizes)
        begin, bytes = (start or 0) * dtype.itemsize, count * dtype.itemsize
        if any(size < 0 for size in sizes) or begin < 0 or begin + bytes > length:
            raise InvalidArgumentError(
                f"sizes {sizes} of {dtype} from element {start} on do not fit {length} bytes"
            )
        if (base + begin) % dtype.itemsize:
            raise InvalidArgumentError(f"{dtype} does not begin at {base + begin:#x}")
        if count == 0:
            return self._torch.empty(sizes, dtype=dtype, device=self.device)
        capsule = pool.peer_bytes(rank, base + begin, bytes, owner)
        return self._torch.utils.dlpack.from_dlpack(capsule).view(dtype).view(sizes)

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        """Every rank waits for every other: on CUDA the current stream, on the CPU this thread.
        Channel 0 without a timeout is a collective, in order with others of the pool; other
        channels, and a timeout, are signals between all pairs, in an order of their own. On the CPU
        one that ran out of time is not over: the next barrier on the channel goes on with it."""
        if channel == 0 and timeout_ms == 0:
            self._comm.barrier()
            return
        self._check_wait(timeout_ms)
        if not isinstance(channel, numbers.Integral) or not 0 <= channel < CHANNELS:
            raise InvalidArgumentError(f"channel: {channel!r} is none of 0 to {CHANNELS - 1}")
        self._channels.barrier(channel, timeout_ms / 1e3 if timeout_ms else DEFAULT_WAIT)

    def put_signal(self, dst_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """Signals a rank. What came before on the current stream, or in this thread, is visible to
        it after its `wait_signal`. Signals are counted, so this never waits, whatever `timeout_ms`
        says."""
        self._check_rank(dst_rank)
        self._check_wait(timeout_ms)
        self._channels.signal(dst_rank, channel)

    def wait_signal(self, src_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """Waits for a rank's next signal: on CUDA the current stream does. At most `timeout_ms`
        milliseconds, or 30 s where that is 0; then TimeoutError, on CUDA from a later call."""
        self._check_rank(src_rank)
        self._check_wait(timeout_ms)
        self._channels.wait(src_rank, channel, timeout_ms / 1e3 if timeout_ms else DEFAULT_WAIT)

    def _check_rank(self, rank: int) -> None:
        if not isinstance(rank, numbers.Integral) or not 0 <= rank < self.world_size:
            raise InvalidArgumentError(f"rank {rank!r} of {self.world_size} ranks")

    @staticmethod
    def _check_wait(timeout_ms: int) -> None:
        if not isinstance(timeout_ms, numbers.Real) or not timeout_ms >= 0:
            raise InvalidArgumentError(f"timeout_ms: {timeout_ms!r} is no time from 0 on")

    def __repr__(self) -> str:
        return (
            f"symmpool.SymmetricMemory(rank={self.rank}, world_size={self.world_size}, "
            f"buffer_size={self.buffer_size})"
        )
