"""The types of arguments that name groups and devices, for type checkers. Programs import nothing of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import datetime
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
    #: What pools and communicators are found by: the object that stands for a group, or a pool without one.
    GroupKey: TypeAlias = torch.distributed.ProcessGroup | Group | Pool
    #: Seconds, or torch's way to say them. None stands for no limit of the call's own.
    Timeout: TypeAlias = datetime.timedelta | float | None
