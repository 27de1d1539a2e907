"""Who is measured: ours, and what else a program would use. Each has memory of its own.

A contender sets itself up for the largest size, and gives a `Case` for any size up to that. Setting
up is collective. One that cannot be set up on every rank is left out everywhere, and the reasons
are kept; nobody else suffers.
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

    #: What is reduced: to be filled before a check.
    input: Any
    #: Where the result is; the input itself if the call is in place.
    output: Any
    call: Callable[[], None]

    @property
    def in_place(self):
        return self.input.data_ptr() == self.output.data_ptr()


class Ranks:
    """This process among the others, over torch.distributed."""

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
        """What `action` returns, and None; or None and why it failed on some rank, everywhere."""
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
        """By name: what each of `actions` returns, and why those failed that did on some rank."""
        found, missing = {}, {}
        for name, action in actions.items():
            value, why = self.attempt(action)
            if why is None:
                found[name] = value
            else:
                missing[name] = why
        return found, missing

    def insist(self, action):
        """What `action` returns; ValueError, on every rank, if it fails on any."""
        value, why = self.attempt(action)
        if why is not None:
            raise ValueError(why)
        return value


class Contender:
    """One way to all-reduce. `op` is a name; `count` the largest number of elements."""

    name = ""
    #: The largest size that is worth its time, in bytes.
    limit = None

    def __init__(self, ranks, dtype, op, count):
        self.ranks, self.dtype, self.op = ranks, dtype, op
        self.torch, self.dist = ranks.torch, ranks.dist

    def case(self, count):
        """The first `count` elements of what was set up."""
        raise NotImplementedError

    def empty(self, count):
        return self.torch.empty(count, dtype=self.dtype, device=self.ranks.device)

    def confirm(self):
        """Raises if calls so far did not do what they say."""

    def close(self):
        """Lets go of what would be in the way when the process ends."""

    def torch_op(self):
        names = {"sum": "SUM", "prod": "PRODUCT", "min": "MIN", "max": "MAX", "avg": "AVG"}
        return getattr(self.dist.ReduceOp, names[self.op])


class Pools:
    """The pool that all of ours share, made when the first is set up."""

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
    """A tensor of a pool, in place, with one of our algorithms."""

    def __init__(self, ranks, dtype, op, count, pools, algorithm, scratch=None):
        super().__init__(ranks, dtype, op, count)
        self.name = "ours" if algorithm == "auto" else f"ours {algorithm}"
        pool = pools.get(ranks)
        self.comm = symmpool.Communicator(
            pool, algorithm=algorithm, timeout=ranks.timeout, scratch_bytes=scratch, concurrent=1
        )
        self.buffer = pool.empty(count, dtype)
        pool.commit()
        # Not every algorithm is there on every device.
        self.comm.all_reduce(self.buffer[:1], op)
        self.comm.synchronize()

    def case(self, count):
        tensor, comm, op = self.buffer[:count], self.comm, self.op
        return Case(tensor, tensor, lambda: comm.all_reduce(tensor, op))

    def confirm(self):
        # On a device a call has returned before it has failed.
        self.comm.synchronize()

    def close(self):
        self.buffer = self.comm = None


class Distributed(Contender):
    """torch.distributed's all_reduce, in place on memory of torch's own: NCCL or gloo."""

    def __init__(self, ranks, dtype, op, count):
        super().__init__(ranks, dtype, op, count)
        self.name = "NCCL" if ranks.on_cuda else "gloo"
        self.buffer = self.make(count)
        # Not every type and operation is there.
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
        # Registering needs a communicator, which the first collective makes.
        ranks.dist.all_reduce(ranks.torch.zeros(1, device=ranks.device))
        ranks.synchronize()
        self.cuda = ranks.torch.cuda
        self.backend = ranks.dist.group.WORLD._get_backend(ranks.device)
        self.mem_pool = self.cuda.MemPool(self.backend.mem_allocator)

    def make(self, allocate):
        """What `allocate` returns, whose memory is in windows. Collective, and called once."""
        with self.cuda.use_mem_pool(self.mem_pool):
            made = allocate()
        self.backend.register_mem_pool(self.mem_pool, symm=True)
        return made

    def close(self):
        # A communicator that ends with windows of memory that is gone complains, or worse.
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


class SymmetricMemory(Contender):
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


class OneShot(SymmetricMemory):
    """Every rank reads all the others' data; from symmetric memory into memory of torch's own."""

    name = "one-shot"
    limit = 16 << 20

    def __init__(self, ranks, dtype, op, count):
        most = max(1, self.limit // dtype.itemsize)
        super().__init__(ranks, dtype, op, min(count, most))
        self.out = self.empty(min(count, most))

    def case(self, count):
        source, out, group = self.buffer[:count], self.out[:count], self.group
        run = self.torch.ops.symm_mem.one_shot_all_reduce_out
        return Case(source, out, lambda: run(source, "sum", group, out))


class TwoShot(SymmetricMemory):
    """Every rank reduces a share and hands it out; in place in symmetric memory."""

    name = "two-shot"

    def case(self, count):
        tensor, group = self.buffer[:count], self.group
        run = self.torch.ops.symm_mem.two_shot_all_reduce_
        return Case(tensor, tensor, lambda: run(tensor, "sum", group))


def peers_for(on_cuda):
    """The classes of what ours is measured beside, with the names that are theirs."""
    if on_cuda:
        return [
            ("NCCL", Distributed),
            ("NCCL window", NcclWindow),
            ("one-shot", OneShot),
            ("two-shot", TwoShot),
        ]
    return [("gloo", Distributed)]


def set_up(ranks, dtype, op, count, algorithms, only=None, scratch=None):
    """The contenders that could be set up, ours first; and why others could not, by name."""
    pools = Pools()
    plans = [
        ("ours" if name == "auto" else f"ours {name}", Ours, (pools, name, scratch)) for name in algorithms
    ]
    plans += [(name, kind, ()) for name, kind in peers_for(ranks.on_cuda)]
    asked = [plan for plan in plans if only is None or plan[0].split()[0] == "ours" or plan[0] in only]
    found, missing = ranks.attempt_each(
        {name: partial(kind, ranks, dtype, op, count, *more) for name, kind, more in asked}
    )
    return found, missing, pools


def environment():
    """Settings of NCCL, torch and ours that change what is measured; of a path the last part, as its
    folders are this machine's."""
    begins = ("NCCL_", "TORCH_", "SYMMPOOL_", "CUDA_", "NVSHMEM_", "OMP_")
    hidden = ("SECRET", "TORCHELASTIC")
    names = [name for name in os.environ if name.startswith(begins)]
    shown = [name for name in sorted(names) if not any(word in name for word in hidden)]
    return {name: os.path.basename(os.environ[name].rstrip("/")) for name in shown}
