"""Cases of torch's tests of asynchronous tensor parallelism with our operators in place of torch's.

    torchrun --nproc-per-node 2 python/tests/gpu/ranks_async_tp.py [--device cpu]

`fused.install()` is active, so what is called is `torch.ops.symm_mem`, eagerly and in captured graphs, and
programs are compiled by Inductor with its micro-pipelining. With 4 ranks there is a mesh of two dimensions
too. Exits with 1 if anything was wrong.
"""

import sys
import time
from pathlib import Path

import ranks_start
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent))
from async_tp import Cases
from micro_pipeline import Programs, by_inductor, by_the_pass

import symmpool
from symmpool import fused


def main():
    options = ranks_start.parser(__doc__, 1, "rounds").parse_args()
    device = ranks_start.device_of(options.device)
    if device is None:
        return 0
    on_cuda = device.type == "cuda"
    dist.init_process_group(ranks_start.PEER if on_cuda else "gloo")
    world, began = dist.get_world_size(), time.monotonic()
    pool = symmpool.Pool(device=str(device))
    fused.install()
    # gloo, which takes NCCL's place where ranks share a device, gathers no 8-bit floats.
    has_scaled = on_cuda and not ranks_start.SHARED and torch.cuda.get_device_capability() >= (8, 9)
    count, wrong = 0, []
    for _ in range(options.count):
        cases = Cases(device)
        cases.gathers()
        cases.scatters()
        cases.layouts()
        if has_scaled:
            cases.scaled_gathers()
            cases.scaled_scatters()
        programs = Programs(device, by_inductor if on_cuda else by_the_pass, has_scaled)
        programs.gathers()
        programs.scatters()
        programs.scaled()
        programs.sequence_parallel()
        if world == 4:
            mesh = dist.init_device_mesh(device.type, (2, 2), mesh_dim_names=("tp", "other"))
            of_products, other = mesh.get_group("tp"), mesh.get_group("other")
            pools = symmpool.Pool(of_products, device=str(device))
            programs.other_groups(of_products, other)
            assert pools.world == 2
        count += cases.count + programs.count
        wrong += cases.wrong + programs.wrong
    for what in wrong:
        print(f"rank {dist.get_rank()}: {what}", flush=True)
    took = time.monotonic() - began
    print(f"rank {dist.get_rank()}: {count} cases, {len(wrong)} wrong, {took:.0f} s", flush=True)
    fused.uninstall()
    del pool
    dist.barrier()
    dist.destroy_process_group()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
