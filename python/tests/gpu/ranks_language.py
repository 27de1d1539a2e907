"""Every program of `symmpool.language.library`, and a kernel, on GPUs: eager, on a stream and in a graph.

    python -m torch.distributed.run --nproc-per-node N python/tests/gpu/ranks_language.py

A GPU a rank. Exits with 1 if anything was wrong.
"""

import sys

import torch

import symmpool
from symmpool.language import library

KERNEL = """
#include <symmpool/device.cuh>
using namespace symmpool;
extern "C" __global__ void gather(const __grid_constant__ DeviceComm comm,
                                  const __grid_constant__ DeviceCall call) {
    Collective collective(comm, call);
    if (!collective || !collective.await_peers()) {
        return;
    }
    const ByteRange share = collective.share(call.bytes);
    char* mine = call.output + comm.rank * call.bytes + share.from;
    for (u32 distance = 0; distance < comm.world; ++distance) {
        collective.copy(comm.peer_ptr(mine, comm.after(distance)), call.input + share.from, share.bytes());
    }
}
"""


def compiled(world):
    """All algorithms for so many ranks."""
    for name, program in library.ALL.items():
        if (name.startswith("halving") and world & (world - 1)) or (name.startswith("hier") and world % 2):
            continue
        yield program.compile(world)
        if name in library.LL:
            yield program.compile(world, protocol="ll")
    yield symmpool.native(KERNEL, kernel="gather", collective="all_gather", windows=["output"])


def expected(collective, total, rank, count, root):
    mine = slice(rank * count, (rank + 1) * count)
    match collective:
        case "all_reduce":
            return total.sum(0)
        case "reduce_scatter":
            return total.sum(0)[mine]
        case "all_gather":
            return total.reshape(-1)
        case "all_to_all":
            return total[:, mine].reshape(-1)
    return total[root]


def main():
    group = symmpool.Group.from_env()
    rank, world = group.rank, group.world
    torch.cuda.set_device(rank % torch.cuda.device_count())
    pool = symmpool.Pool(group, "cuda")
    comm = symmpool.Communicator(pool)
    wrong = []
    for algorithm in compiled(world):
        collective = algorithm.collective
        ins = world if collective in ("reduce_scatter", "all_to_all") else 1
        outs = world if collective in ("all_gather", "all_to_all") else 1
        for count in (1, 999, 100_000, 3_000_000):
            for dtype in (torch.float32, torch.int64):
                root = count % world if collective == "broadcast" else 0
                each = (torch.arange(ins * count, device="cuda") * 7 % 1009 - 300).to(dtype)
                total = torch.stack([each + of * 131 for of in range(world)])
                x, out = pool.empty(ins * count, dtype), pool.empty(outs * count, dtype)
                x.copy_(total[rank])
                right = expected(collective, total, rank, count, root)

                def call(stream=None, x=x, out=out, root=root, algorithm=algorithm):
                    algorithm.execute(comm, x, out, src=root, stream=stream)

                call()
                good = [torch.equal(out, right)]
                out.fill_(77)
                side = torch.cuda.Stream()
                side.wait_stream(torch.cuda.current_stream())
                call(side)
                side.synchronize()
                good.append(torch.equal(out, right))
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    call()
                    call()
                for _ in range(3):
                    out.fill_(77)
                    graph.replay()
                    torch.cuda.synchronize()
                    good.append(torch.equal(out, right))
                if not all(good):
                    wrong.append((algorithm, count, dtype, good))
    print(f"rank {rank}: {len(wrong)} wrong", *wrong, sep="\n  ")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
