"""Questions of calls about torch: whether code is compiled, whether a mode sees it, which group is the
default.

Programs may import torch after this package, or never. Until it is there, stand-ins answer; `look_for_torch`
puts torch's own objects in their place, so that a small call pays for one attribute only.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from symmpool.groups import process_groups

if TYPE_CHECKING:
    from symmpool.collectives.types import Tensor
    from symmpool.groups.types import GroupLike

__all__ = ["is_seen", "is_traced", "look_for_torch", "opaque"]

# Functions that the compiler is to call as they are, once torch is known.
_opaque: list[Any] = []


def _compiling_yet() -> bool:
    """Stands in for `compiling` while torch is not known: it may have been imported after this package."""
    if "torch" not in sys.modules:
        return False
    import torch

    return torch.compiler.is_dynamo_compiling()


# torch.compiler.is_dynamo_compiling, once torch is known. The compiler replaces its result by a constant.
compiling: Any = _compiling_yet


class _Modes:
    """Whether a mode of torch sees what is called, as `_is_in_torch_dispatch_mode`. torch's own module has
    the answer as an attribute of this name, which is read at no cost; older versions are asked here."""

    @property
    def _is_in_torch_dispatch_mode(self) -> bool:
        torch = sys.modules.get("torch")
        length = getattr(getattr(torch, "_C", None), "_len_torch_dispatch_stack", None)
        return length is not None and length() > 0


# torch.utils._python_dispatch, once torch is known.
modes: Any = _Modes()


class _World:
    """Where the default group is found, as `_default_pg`. torch's own object has it under this name, which
    saves a call; other versions are asked here."""

    def __init__(self, world: Any = None):
        self.world = world

    @property
    def _default_pg(self) -> Any:
        return getattr(self.world, "default_pg", None)


torch_world: Any = _World()
_torch_is_known = False


def look_for_torch() -> None:
    """Takes torch's own objects for the stand-ins above, once the program has imported torch."""
    global compiling, modes, torch_world, _torch_is_known
    if _torch_is_known:
        return
    torch = sys.modules.get("torch")
    compiling = getattr(getattr(torch, "compiler", None), "is_dynamo_compiling", _compiling_yet)
    found = sys.modules.get("torch.utils._python_dispatch")
    modes = found if hasattr(found, "_is_in_torch_dispatch_mode") else _Modes()
    dist = process_groups.distributed() if torch is not None else None
    world = getattr(getattr(dist, "distributed_c10d", None), "_world", None)
    _torch_is_known = world is not None
    torch_world = world if "_default_pg" in getattr(world, "__dict__", ()) else _World(world)
    if torch is not None:
        while _opaque:
            skip(_opaque.pop())


def opaque(function: Any) -> Any:
    """A function that the compiler calls as it is, as it does torch's own process groups, which are C++. It
    is marked as `torch._dynamo.disable` marks its wrapper, without one: calls cost nothing more."""
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = "a collective is no part of a graph; see functional collectives"
    if _torch_is_known:
        skip(function)
    else:
        _opaque.append(function)
    return function


def skip(function: Any) -> None:
    """Has the compiler take no frame of a function for a program to trace, nor those that it calls."""
    frames: Any = getattr(sys.modules["torch"]._C._dynamo, "eval_frame", None)
    if hasattr(frames, "set_code_exec_strategy"):
        action = frames._FrameAction.SKIP
        # The frame, and those that it calls.
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(action, action))
    elif hasattr(frames, "skip_code"):
        frames.skip_code(function.__code__)


def is_seen(tensor: Tensor | None, group: GroupLike) -> bool:
    """Whether a call can be made as an operator, which modes of torch see: make_fx, fake tensors."""
    import torch

    named = group is None or isinstance(group, str) or hasattr(group, "group_name")
    return named and (tensor is None or isinstance(tensor, torch.Tensor))


def is_traced(tensor: Tensor | None, group: GroupLike) -> bool:
    """Whether a call on a tensor is to be made as an operator: it is compiled, or a mode of torch sees it."""
    return compiling() or (modes._is_in_torch_dispatch_mode and is_seen(tensor, group))


look_for_torch()
