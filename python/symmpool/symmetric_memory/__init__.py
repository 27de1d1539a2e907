"""torch's symmetric memory on pools: `torch.distributed._symmetric_memory` and what is below it.

    from symmpool import symmetric_memory

    symmetric_memory.install()

From then on torch's names give memory of pools, whoever calls them: `empty`, `rendezvous`, `get_mem_pool`,
`_SymmetricMemory.empty_strided_p2p`, `torch.ops.symm_mem`. docs/python.md has the operators that are served.

Memory gets its place when its group is known. `empty` names none, so its tensor lies in torch's own memory
until the first `rendezvous`, which moves it to the pool of that group. So groups never wait for ranks outside
of them, and places follow from the order of a group's own rendezvous. It needs torch."""

from symmpool.memory.handle import SymmetricMemory
from symmpool.symmetric_memory.allocation import group, rendezvous
from symmpool.symmetric_memory.names import install, is_installed, uninstall

__all__ = ["SymmetricMemory", "group", "install", "is_installed", "rendezvous", "uninstall"]
