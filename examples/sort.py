"""Sorts numbers that lie on all ranks, without torch: each rank gets one part of their range.

    export WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500
    RANK=0 python examples/sort.py & RANK=1 python examples/sort.py; wait

It needs numpy. Any launcher that sets these variables will do, such as torchrun. Ranks are processes on one
host, and the numbers lie in host memory.
"""

import argparse
import os
import sys

import numpy as np

import symmpool


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=1_000_000, help="numbers on each rank")
    options = parser.parse_args()
    if options.count < 1:
        parser.error(f"--count {options.count}: each rank needs a number at least")
    if "RANK" not in os.environ:
        sys.exit("RANK is not set: this needs a launcher, or the variables that --help shows")

    group = symmpool.Group.from_env()
    # On each rank a tensor of the pool lies at the same place, so that the others can write into it.
    pool = symmpool.Pool(group, device="cpu")
    comm = symmpool.Communicator(pool)
    rank, world = group.rank, group.world_size

    # Numbers from 0 to 1. Rank r shall have those from r / world on.
    numbers = np.sort(np.random.default_rng(rank).random(options.count))
    bounds = np.searchsorted(numbers, np.arange(1, world) / world)
    send = np.diff(bounds, prepend=0, append=options.count)

    # Each rank learns how many numbers every other one has for it.
    receive = np.empty_like(send)
    comm.all_to_all_single(receive, send)

    # Every rank must allocate as much, so all take what the fullest needs. The call commits the new memory.
    room = np.array([receive.sum()])
    comm.all_reduce(room, "max")
    inbox = pool.empty(int(room[0]), np.float64)
    comm.all_to_all_v(inbox, numbers, send, receive)
    mine = np.sort(np.asarray(inbox)[: receive.sum()])

    # The sum of all counts shows that no number was lost.
    total = np.array([len(mine)])
    comm.all_reduce(total)
    within = bool((mine >= rank / world).all() and (mine < (rank + 1) / world).all())
    print(f"rank {rank} has {len(mine)} of {total[0]} numbers, from {rank / world:.2f} on")
    return 0 if within and total[0] == world * options.count else 1


if __name__ == "__main__":
    sys.exit(main())
