"""torch's own names for symmetric memory on pools, between ranks on GPUs.

    python -m torch.distributed.run --nproc-per-node N python/tests/gpu/ranks_symmetric_memory.py

Handles, signals and pads, a Triton kernel on them, torch's operators, captures, MemPools and groups of some
ranks. Sums are compared with gloo's. Exits with 1 if anything was wrong.
"""

import importlib.util
import sys
from pathlib import Path

import ranks_start
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch._C._distributed_c10d import _SymmetricMemory

import symmpool
from symmpool import symmetric_memory

EXAMPLES = Path(__file__).parents[3] / "examples"


class Runner:
    def __init__(self, device):
        self.device, self.me, self.world = device, dist.get_rank(), dist.get_world_size()
        self.name = dist.group.WORLD.group_name
        self.after, self.before = (self.me + 1) % self.world, (self.me - 1) % self.world
        self.wrong = 0

    def check(self, what, holds):
        print(f"{'ok   ' if holds else 'WRONG'} rank {self.me}: {what}", flush=True)
        self.wrong += not holds

    def tensor(self, *size, dtype=torch.float32):
        """A tensor of symmetric memory with a handle, of small whole numbers: sums are exact."""
        x = symm_mem.empty(*size, dtype=dtype, device=self.device)
        x.copy_(torch.randint(-3, 4, size, device=self.device))
        symm_mem.rendezvous(x, self.name)
        return x

    def summed(self, x):
        wide = x.double().cpu()
        dist.all_reduce(wide)
        return wide.to(device=x.device, dtype=x.dtype)

    def handles(self):
        x = symm_mem.empty(1 << 16, dtype=torch.float32, device=self.device).fill_(self.me)
        handle = symm_mem.rendezvous(x, self.name)
        self.check("values stay where memory moves", bool((x == self.me).all()))
        self.check("own address", handle.buffer_ptrs[self.me] == x.data_ptr() and handle.offset == 0)
        handle.barrier()
        theirs = handle.get_remote_tensor(self.after, x.shape, x.dtype)
        self.check("a peer's values", bool((theirs == self.after).all()))
        handle.barrier(channel=1)
        theirs[:100].fill_(50 + self.me)
        handle.put_signal(self.after, channel=2)
        handle.wait_signal(self.before, channel=2)
        self.check("a put and its signal", bool((x[:100] == 50 + self.before).all()))
        pads = [handle.get_signal_pad(rank) for rank in range(self.world)]
        handle.barrier()
        _SymmetricMemory.stream_write_value32(pads[self.after], self.me, 7)
        handle.barrier()
        self.check("a word of a pad", pads[self.me][self.before].item() == 7)
        handle.barrier()

    def triton(self):
        if importlib.util.find_spec("triton") is None:
            print("skipped: triton is not installed")
            return
        sys.path.insert(0, str(EXAMPLES))
        import triton_all_reduce as example

        count, world = 1 << 18, self.world
        x = symm_mem.empty(count, dtype=torch.bfloat16, device=self.device)
        out = torch.empty_like(x)
        handle = symm_mem.rendezvous(x, self.name)
        buffers = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=self.device)
        pads = torch.tensor(handle.signal_pad_ptrs, dtype=torch.int64, device=self.device)
        right = True
        for _ in range(5):
            x.copy_(torch.randint(-3, 4, (count,), device=self.device))
            total = self.summed(x)
            grid = (example.PROGRAMS,)
            shape = {"WORLD": world, "BLOCK": example.BLOCK, "PROGRAMS": example.PROGRAMS}
            example.sum_of_all[grid](buffers, pads, out, count, self.me, **shape, TRIES=example.TRIES)
            right &= torch.equal(out, total)
            handle.barrier()
        self.check("a Triton all-reduce on buffers and pads", right)

    def operators(self):
        ops, name = torch.ops.symm_mem, self.name
        for dtype in (torch.float32, torch.bfloat16):
            x = self.tensor(1024, 64, dtype=dtype)
            total = self.summed(x)
            self.check(f"one_shot {dtype}", torch.equal(ops.one_shot_all_reduce(x, "sum", name), total))
            out = torch.empty_like(x)
            ops.one_shot_all_reduce_out(x, "sum", name, out)
            self.check(f"one_shot_out {dtype}", torch.equal(out, total))
            found = ops.one_shot_all_reduce_copy(self.tensor(1024, 64, dtype=dtype), x, "sum", name)
            self.check(f"one_shot_copy {dtype}", torch.equal(found, total))
            part = torch.empty(1024 // self.world, 64, dtype=dtype, device=self.device)
            if 1024 % self.world == 0:
                ops.reduce_scatter_out(x, name, False, part)
                self.check(f"reduce_scatter {dtype}", torch.equal(part, total.chunk(self.world)[self.me]))
            ops.multimem_one_shot_all_reduce_out(x, "sum", name, out.zero_())
            self.check(f"multimem {dtype}", torch.equal(out, total))
            rows = symm_mem.empty(1024 * self.world, 64, dtype=dtype, device=self.device)
            ops.multimem_all_gather_out(x, name, rows)
            own = rows.chunk(self.world)[self.me]
            self.check(f"all_gather {dtype}", torch.equal(own, x) and torch.equal(self.summed(own), total))
            ops.two_shot_all_reduce_(x, "sum", name)
            self.check(f"two_shot {dtype}", torch.equal(x, total))
        y = self.tensor(64, 64)
        remote = ops.get_remote_tensors(y, name)
        symm_mem.rendezvous(y, name).barrier()
        self.check("get_remote_tensors", torch.equal(sum(remote), self.summed(y)))
        symm_mem.rendezvous(y, name).barrier()
        z = self.tensor(128, 32, dtype=torch.bfloat16)
        gathered = ops._low_contention_all_gather(z, name)
        self.check("low contention", torch.equal(gathered.chunk(self.world)[self.me], z))
        try:
            ops.nvshmem_broadcast(z, 0, name)
            self.check("nvshmem is refused", not hasattr(ops, "nvshmem_broadcast"))
        except symmpool.UnsupportedError as error:
            self.check("nvshmem is refused", "symmpool.broadcast" in str(error))

    def captures(self):
        x, source = self.tensor(1 << 16), torch.zeros(1 << 16, device=self.device)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            x.copy_(source)
            out = torch.ops.symm_mem.one_shot_all_reduce(x, "sum", self.name)
        right = True
        for turn in range(10):
            source.fill_(turn + self.me)
            graph.replay()
            right &= bool((out == self.world * turn + sum(range(self.world))).all())
        self.check("a captured operator", right)

    def mem_pools(self):
        with torch.cuda.use_mem_pool(symm_mem.get_mem_pool(self.device)):
            x = torch.full((1 << 16,), float(self.me), device=self.device)
        handle = symm_mem.rendezvous(x, self.name)
        handle.barrier()
        theirs = handle.get_remote_tensor(self.after, x.shape, x.dtype)
        self.check("a tensor of the MemPool", bool((theirs == self.after).all()))
        handle.barrier()
        out = torch.ops.symm_mem.one_shot_all_reduce(x, "sum", self.name)
        self.check("a sum in it", torch.equal(out, self.summed(x)))

    def groups(self):
        x = self.tensor(1 << 12)
        of_all = symm_mem.rendezvous(x, self.name)
        first = dist.new_group([0], backend="gloo")
        if self.me == 0:
            of_one = symm_mem.rendezvous(x, first)
            y = symm_mem.empty(64, device=self.device)
            alone = symm_mem.rendezvous(y, first)
            self.check("a group of one rank", of_one.world_size == alone.world_size == 1)
            self.check("its buffer is the same", of_one.buffer_ptrs == [of_all.buffer_ptrs[0]])
            self.check("its pad is not", of_one.signal_pad_ptrs != [of_all.signal_pad_ptrs[0]])
        of_all.barrier()
        handle = symm_mem.rendezvous(symm_mem.empty(64, device=self.device), self.name)
        self.check("the larger group afterwards", handle.world_size == self.world)
        handle.barrier()


def main():
    options = ranks_start.parser(__doc__, 1, "nothing").parse_args()
    device = ranks_start.device_of(options.device)
    if device is None or device.type != "cuda":
        print("skipped: torch has operators of symmetric memory on CUDA alone")
        return 0
    dist.init_process_group("gloo")
    symmetric_memory.install()
    runner = Runner(device)
    for part in ("handles", "triton", "operators", "captures", "mem_pools", "groups"):
        getattr(runner, part)()
        torch.cuda.synchronize()
    print(f"symmetric memory on {runner.world} ranks, {runner.wrong} wrong", flush=True)
    dist.destroy_process_group()
    return int(runner.wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
