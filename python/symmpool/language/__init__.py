"""Collectives as programs: one rank's steps over chunks, proved before they run.

    from symmpool import language as sl

    @sl.algorithm("all_gather")
    def direct(me: sl.Rank) -> None:
        me.barrier()
        for peer in me.peers():
            me.put(peer.output[me.rank], me.input[0])
            me.signal(peer)
        me.copy(me.output[me.rank], me.input[0])
        for peer in me.peers():
            me.wait(peer)

    direct.check(world_size=4)                       # proves it, or raises sl.PlanError
    comm.register(direct.compile(world_size=4))
    comm.all_gather_into_tensor(out, x, algorithm="direct")

The function runs once for each rank, when a program is checked or compiled, and never when data moves:
what it decides, it decides by `me.rank` and `me.world`. docs/language.md teaches the language.
"""

from symmpool._symmpool import Algorithm
from symmpool.errors import PlanError
from symmpool.language.program import Collective, Program, algorithm, load
from symmpool.language.rank import Chunks, Peer, Rank, Scratch

__all__ = [
    "Algorithm",
    "Chunks",
    "Collective",
    "Peer",
    "PlanError",
    "Program",
    "Rank",
    "Scratch",
    "algorithm",
    "load",
]
