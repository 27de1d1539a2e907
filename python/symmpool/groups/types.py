"""The types of arguments that name groups and devices, for type checkers. Programs import nothing of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import TypeAlias

    import torch
    import torch.distributed

    from symmpool._symmpool import Group, Pool

    #: A process group of torch or its name, a group or a pool of this package, or what makes one of a store;
    #: None is the default group.
    GroupLike: TypeAlias = (
        torch.distributed.ProcessGroup | str | Group | Pool | tuple[torch.distributed.Store, int, int] | None
    )
    #: A device or its name: "cpu", "cuda" or "cuda:N". None is the one that the call's text says.
    DeviceLike: TypeAlias = torch.device | str | None
