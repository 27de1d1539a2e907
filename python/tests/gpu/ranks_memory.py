"""Memory that groups hold of their devices, on a GPU for each rank.

    python -m torch.distributed.run --nproc-per-node N python/tests/gpu/ranks_memory.py

Groups begin small, and take memory before their first large call: each kind of call, in captures, on streams
and with `async_op`, and where one rank's device is full. Results are compared. Exits with 1 if anything was
wrong, and prints how long the calls took that took memory.
"""

import sys
import time

import ranks_start
import torch
import torch.distributed as dist

import symmpool

MIB = 1 << 20
AT_FIRST, AT_MOST = 16 * MIB, 405 * MIB
MANY = 1 << 20


class Runner:
    def __init__(self, device):
        self.device, self.me, self.world = device, dist.get_rank(), dist.get_world_size()
        self.wrong, self.groups = 0, 0

    def group(self):
        """A new group that has had a small call."""
        made = dist.new_group(list(range(self.world)), backend="cpu:gloo,cuda:symmpool")
        self.groups += 1
        self.sums(made, 1000)
        return made

    def check(self, what, holds):
        print(f"{'ok   ' if holds else 'WRONG'} rank {self.me}: {what}", flush=True)
        self.wrong += not holds

    def sums(self, group, count, **options):
        x = torch.full((count,), self.me + 1.0, device=self.device)
        work = dist.all_reduce(x, group=group, **options)
        if work is not None:
            work.wait()
        self.wrong += int((x != self.world * (self.world + 1) / 2).sum().item())

    def held(self, group):
        return symmpool.communicator(group, self.device).memory()["total"]

    def takes_memory_before(self, name, call):
        group = self.group()
        small = self.held(group)
        torch.cuda.synchronize()
        begun = time.perf_counter()
        call(group)
        torch.cuda.synchronize()
        took = 1e3 * (time.perf_counter() - begun)
        grown = self.held(group)
        self.check(f"{name} took memory, in {took:.1f} ms", small <= AT_FIRST < grown <= AT_MOST)
        self.sums(group, MANY)
        self.sums(group, 1000)
        self.check(f"{name}: memory is taken once", self.held(group) == grown)
        dist.destroy_process_group(group)

    def calls(self):
        world, device = self.world, self.device
        x, all_x = torch.ones(MANY, device=device), torch.ones(MANY * world, device=device)
        empty = torch.empty_like(all_x)
        side = torch.cuda.Stream()

        def on_a_stream(group):
            with torch.cuda.stream(side):
                self.sums(group, MANY)

        def splits(group):
            sizes = [1] * world
            dist.all_to_all_single(all_x[:world], torch.ones(world, device=device), sizes, sizes, group)

        yield "an all-reduce", lambda group: self.sums(group, MANY)
        yield "an all-reduce with async_op", lambda group: self.sums(group, MANY, async_op=True)
        yield "an all-reduce on a stream", on_a_stream
        yield "an all-gather", lambda group: dist.all_gather_into_tensor(all_x, x, group)
        yield "a reduce-scatter", lambda group: dist.reduce_scatter_tensor(x, all_x, group=group)
        yield "a broadcast", lambda group: dist.broadcast(x, 0, group)
        yield "an all-to-all", lambda group: dist.all_to_all_single(empty, all_x, group=group)
        yield "an all-to-all with splits", splits

    def takes_memory_after_a_capture(self):
        group = self.group()
        x, graph = torch.empty(1000, device=self.device), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            dist.all_reduce(x, group=group)
        for turn in range(4):
            x.fill_(1.0)
            graph.replay()
            self.wrong += int((x != self.world).sum().item())
            if turn == 0:
                self.check("a capture takes no memory", self.held(group) <= AT_FIRST)
            self.sums(group, MANY)
            self.sums(group, 1000)
        self.check("a call after a capture takes memory", AT_FIRST < self.held(group) <= AT_MOST)
        dist.destroy_process_group(group)

    def takes_memory_in_a_capture(self):
        group = self.group()
        x, graph = torch.empty(MANY, device=self.device), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            dist.all_reduce(x, group=group)
        self.check("a captured call takes memory", AT_FIRST < self.held(group) <= AT_MOST)
        for _ in range(3):
            x.fill_(1.0)
            graph.replay()
            self.wrong += int((x != self.world).sum().item())
            self.sums(group, MANY)
            self.sums(group, 1000)
        dist.destroy_process_group(group)

    def takes_none_where_a_device_is_full(self):
        group = self.group()
        full = []
        if self.me == self.world - 1:
            torch.cuda.empty_cache()
            left = torch.cuda.mem_get_info()[0] - 200 * MIB
            full.append(torch.empty(left, dtype=torch.uint8, device=self.device))
        dist.barrier(group)
        self.sums(group, 5 * MANY)
        self.check("a full device keeps memory as it is", self.held(group) <= AT_FIRST)
        full.clear()
        torch.cuda.empty_cache()
        for _ in range(2):
            self.sums(group, MANY)
            self.sums(group, 1000)
        self.check("it is not tried again at once", self.held(group) <= AT_FIRST)
        self.sums(group, MANY)
        self.check("it is tried again after two calls", AT_FIRST < self.held(group) <= AT_MOST)
        dist.destroy_process_group(group)


def main():
    options = ranks_start.parser(__doc__, 1, "nothing").parse_args()
    device = ranks_start.device_of(options.device)
    if device is None or device.type != "cuda":
        print("skipped: communicators in host memory do not grow")
        return 0
    dist.init_process_group("cpu:gloo,cuda:symmpool")
    runner = Runner(device)
    for name, call in runner.calls():
        runner.takes_memory_before(name, call)
    runner.takes_memory_after_a_capture()
    runner.takes_memory_in_a_capture()
    runner.takes_none_where_a_device_is_full()
    print(f"{runner.groups} groups on {runner.world} ranks, {runner.wrong} wrong", flush=True)
    dist.destroy_process_group()
    return int(runner.wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
