"""The contenders of an all-reduce: symmpool, and what else a program would use. Each has its own memory.

A contender is set up for the largest size, and gives a `Case` for any size up to that. Setting up is
collective. A contender that cannot be set up on some rank is left out on all, and the reason is reported;
the others are measured without it.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import symmpool


@dataclass
class Case:
    """One size of one contender: a call without arguments on torch's current stream."""

    #: The tensor that is reduced, which is filled before a check.
    input: Any
    #: The tensor with the result: the input itself if the call is in place.
    output: Any
    call: Callable[[], None]

    @property
    def in_place(self):
        return self.input.data_ptr() == self.output.data_ptr()


class Ranks:
    """This process as a rank of torch.distributed."""

    def __init__(self, torch, device, timeout):
        self.torch, self.dist, self.device, self.timeout = torch, torch.distributed, device, timeout
        self.rank, self.world = self.dist.get_rank(), self.dist.get_world_size()

    @property
    def on_cuda(self):
        return self.device.type == "cuda"

    def gather(self, value):
        """Every rank's value, in rank order."""
        values = [None] * self.world
        self.dist.all_gather_object(values, value)
        return values

    def synchronize(self):
        """Waits for this rank's device."""
        if self.on_cuda:
            self.torch.cuda.synchronize()

    def meet(self):
        """Waits for all ranks and their devices."""
        self.synchronize()
        self.dist.barrier()
        self.synchronize()

    def attempt(self, action):
        """(What `action` returns, None); or, on every rank, (None, why it failed on some rank)."""
        value, error = None, None
        try:
            value = action()
            self.synchronize()
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}".strip()
        failed = [(rank, why) for rank, why in enumerate(self.gather(error)) if why]
        if not failed:
            return value, None
        rank, why = failed[0]
        return None, f"on {len(failed)} of {self.world} ranks; rank {rank}: {why}"

    def attempt_each(self, actions):
        """Returns, by name, the results of `actions`, and why those failed that did on some rank."""
        found, missing = {}, {}
        for name, action in actions.items():
            value, why = self.attempt(action)
            if why is None:
                found[name] = value
            else:
                missing[name] = why
        return found, missing

    def insist(self, action):
        """Returns the result of `action`; ValueError, on every rank, if it fails on any."""
        value, why = self.attempt(action)
        if why is not None:
            raise ValueError(why)
        return value


class Contender:
    """One implementation of all-reduce. `op` is a name, `count` the largest number of elements."""

    name = ""
    #: The largest size that is measured, in bytes; None for no limit.
    limit: int | None = None

    def __init__(self, ranks, dtype, op, count):
        self.ranks, self.dtype, self.op = ranks, dtype, op
        self.torch, self.dist = ranks.torch, ranks.dist

    def case(self, count):
        """The case of the first `count` elements."""
        raise NotImplementedError

    def empty(self, count):
        return self.torch.empty(count, dtype=self.dtype, device=self.ranks.device)

    def confirm(self):
        """Raises if a call so far has failed without an error."""

    def close(self):
        """Releases what must not outlive the process group."""

    def torch_op(self):
        names = {"sum": "SUM", "prod": "PRODUCT", "min": "MIN", "max": "MAX", "avg": "AVG"}
        return getattr(self.dist.ReduceOp, names[self.op])


class Pools:
    """The pool that all of symmpool's contenders share. The first one creates it."""

    def __init__(self):
        self.pool = None

    def get(self, ranks):
        if self.pool is None:
            shared = ranks.on_cuda and ranks.world > ranks.torch.cuda.device_count()
            self.pool = symmpool.Pool(
                ranks.dist.group.WORLD,
                str(ranks.device),
                timeout=ranks.timeout,
                allow_shared_device=shared,
            )
        return self.pool

    def close(self):
        self.pool = None


class Ours(Contender):
    """symmpool, in place on a tensor of a pool, with one algorithm."""

    def __init__(self, ranks, dtype, op, count, pools, algorithm, scratch=None):
        super().__init__(ranks, dtype, op, count)
        self.name = "ours" if algorithm == "auto" else f"ours {algorithm}"
        pool = pools.get(ranks)
        self.comm = symmpool.Communicator(
            pool, algorithm=algorithm, timeout=ranks.timeout, scratch_bytes=scratch, concurrent=1
        )
        self.buffer = pool.empty(count, dtype)
        pool.commit()
        # Fails here if the device does not have the algorithm.
        self.comm.all_reduce(self.buffer[:1], op)
        self.comm.synchronize()

    def case(self, count):
        tensor, comm, op = self.buffer[:count], self.comm, self.op
        return Case(tensor, tensor, lambda: comm.all_reduce(tensor, op))

    def confirm(self):
        # On a device a call returns before it can fail.
        self.comm.synchronize()

    def close(self):
        self.buffer = self.comm = None


class Distributed(Contender):
    """torch.distributed's all_reduce, in place on memory of torch's own: NCCL or gloo."""

    def __init__(self, ranks, dtype, op, count):
        super().__init__(ranks, dtype, op, count)
        self.name = "NCCL" if ranks.on_cuda else "gloo"
        self.buffer = self.make(count)
        # Fails here if the type or operation is not supported.
        self.dist.all_reduce(self.buffer[:1].zero_(), op=self.torch_op())

    def make(self, count):
        return self.empty(count)

    def case(self, count):
        tensor, op, all_reduce = self.buffer[:count], self.torch_op(), self.dist.all_reduce
        return Case(tensor, tensor, lambda: all_reduce(tensor, op=op))

    def close(self):
        self.buffer = None


class NcclMemory:
    """Memory that is registered with NCCL as symmetric windows."""

    def __init__(self, ranks):
        # Registering needs a communicator, which the first collective creates.
        ranks.dist.all_reduce(ranks.torch.zeros(1, device=ranks.device))
        ranks.synchronize()
        self.cuda = ranks.torch.cuda
        self.backend = ranks.dist.group.WORLD._get_backend(ranks.device)
        self.mem_pool = self.cuda.MemPool(self.backend.mem_allocator)

    def make(self, allocate):
        """Returns the result of `allocate`, in memory that is registered. Collective; called once."""
        with self.cuda.use_mem_pool(self.mem_pool):
            made = allocate()
        self.backend.register_mem_pool(self.mem_pool, symm=True)
        return made

    def close(self):
        # A communicator must not outlive the memory of its windows.
        self.backend.deregister_mem_pool(self.mem_pool)


class NcclWindow(Distributed):
    """NCCL on memory that is registered with it as a symmetric window."""

    def __init__(self, ranks, dtype, op, count):
        super().__init__(ranks, dtype, op, count)
        self.name = "NCCL window"

    def make(self, count):
        self.memory = NcclMemory(self.ranks)
        return self.memory.make(lambda: self.empty(count))

    def close(self):
        self.memory.close()
        super().close()
        self.memory = None


class TorchSymmetricMemory(Contender):
    """An operator of torch's symmetric memory."""

    def __init__(self, ranks, dtype, op, count):
        super().__init__(ranks, dtype, op, count)
        if op != "sum":
            raise ValueError(f"reduces by sum, not by {op}")
        import torch.distributed._symmetric_memory as symmetric

        self.group = self.dist.group.WORLD.group_name
        self.buffer = symmetric.empty(count, dtype=dtype, device=ranks.device)
        self.handle = symmetric.rendezvous(self.buffer, self.group)

    def close(self):
        self.handle = self.buffer = None


class OneShot(TorchSymmetricMemory):
    """Every rank reads the data of all others, from symmetric memory into ordinary memory."""

    name = "one-shot"
    limit: int = 16 << 20

    def __init__(self, ranks, dtype, op, count):
        most = max(1, self.limit // dtype.itemsize)
        super().__init__(ranks, dtype, op, min(count, most))
        self.out = self.empty(min(count, most))

    def case(self, count):
        source, out, group = self.buffer[:count], self.out[:count], self.group
        run = self.torch.ops.symm_mem.one_shot_all_reduce_out
        return Case(source, out, lambda: run(source, "sum", group, out))


class TwoShot(TorchSymmetricMemory):
    """Every rank reduces a part and writes it to all others, in place in symmetric memory."""

    name = "two-shot"

    def case(self, count):
        tensor, group = self.buffer[:count], self.group
        run = self.torch.ops.symm_mem.two_shot_all_reduce_
        return Case(tensor, tensor, lambda: run(tensor, "sum", group))


def peers_for(on_cuda):
    """The other libraries' contenders: their names in tables, and their classes."""
    if on_cuda:
        return [
            ("NCCL", Distributed),
            ("NCCL window", NcclWindow),
            ("one-shot", OneShot),
            ("two-shot", TwoShot),
        ]
    return [("gloo", Distributed)]


def set_up(ranks, dtype, op, count, algorithms, only=None, scratch=None):
    """The contenders that could be set up, symmpool first, and by name the reasons why others could not."""
    pools = Pools()
    plans = [
        ("ours" if name == "auto" else f"ours {name}", Ours, (pools, name, scratch)) for name in algorithms
    ]
    plans += [(name, kind, ()) for name, kind in peers_for(ranks.on_cuda)]
    requested = [plan for plan in plans if only is None or plan[0].split()[0] == "ours" or plan[0] in only]
    found, missing = ranks.attempt_each(
        {name: partial(kind, ranks, dtype, op, count, *more) for name, kind, more in requested}
    )
    return found, missing, pools


def environment():
    """Environment variables of NCCL, torch and symmpool that change results. Of a path only the last part, as
    its folders belong to this machine."""
    begins = ("NCCL_", "TORCH_", "SYMMPOOL_", "CUDA_", "NVSHMEM_", "OMP_")
    hidden = ("SECRET", "TORCHELASTIC")
    names = [name for name in os.environ if name.startswith(begins)]
    shown = [name for name in sorted(names) if not any(word in name for word in hidden)]
    return {name: os.path.basename(os.environ[name].rstrip("/")) for name in shown}
