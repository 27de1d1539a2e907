"""Random programs of tensors made in a pool's scope, on a GPU a rank.

    python -m torch.distributed.run --nproc-per-node N python/tests/gpu/ranks_mempool.py [PROGRAMS]

Ranks make the same tensors in the same order; their address spaces, what else they allocate, and
the order in which they let go of tensors differ. After every step each rank reads what its peers
hold at the places of its own tensors, and sums are checked.
"""

import gc
import random
import sys

import ranks_start
import torch

import symmpool

MIB = 1 << 20


def program(pool, comm, seed):
    """One random program; returns how many tensors had a wrong sum."""
    same, own = random.Random(seed), random.Random(seed * 1000 + pool.rank)
    held, holes, wrong = [], [], 0
    for step in range(same.randrange(3, 8)):
        # Holes that differ between ranks.
        holes += [
            torch.empty(own.randrange(1, 32 * MIB), dtype=torch.uint8, device="cuda")
            for _ in range(own.randrange(4))
        ]
        own.shuffle(holes)
        del holes[: own.randrange(len(holes) + 1)]
        with pool:
            for _ in range(same.randrange(1, 12)):
                count = 4 * same.randrange(1, same.choice([64, 4096, MIB, 4 * MIB]))
                held.append(torch.empty(count, device="cuda"))
        for number, tensor in enumerate(held):
            tensor.fill_((pool.rank + 1) * (number + 1 + step))
        for number, tensor in enumerate(held):
            comm.all_reduce(tensor)
            expected = pool.world * (pool.world + 1) // 2 * (number + 1 + step)
            wrong += not bool((tensor == expected).all())
        # All ranks drop the same tensors, but in an order of each rank's own.
        keep = [same.random() < 0.5 for _ in held]
        gone = [t for t, kept in zip(held, keep, strict=True) if not kept]
        held = [t for t, kept in zip(held, keep, strict=True) if kept]
        tensor = None
        own.shuffle(gone)
        while gone:
            gone.pop()
        if own.random() < 0.2:
            gc.collect()
    return wrong


def main():
    programs = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    if ranks_start.device_of("cuda") is None:
        return
    pool = symmpool.Pool(symmpool.Group.from_env(timeout=120), "cuda")
    comm = symmpool.Communicator(pool)
    wrong = sum(program(pool, comm, seed) for seed in range(programs))
    found = torch.tensor([wrong], dtype=torch.int64, device="cuda")
    comm.all_reduce(found)
    torch.cuda.synchronize()
    if pool.rank == 0:
        numbers = pool.stats()
        print(
            f"{programs} programs on {pool.world} ranks: {int(found)} wrong sums; "
            f"{numbers['commits']} commits, {numbers['windows']} windows, "
            f"{numbers['reserved'] / MIB:.0f} MiB"
        )
    assert int(found) == 0


if __name__ == "__main__":
    main()
