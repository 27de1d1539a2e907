"""Replacements in a process of SGLang, by the devices that it has."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

import torch

from symmpool.engines import sglang as adapters
from symmpool.errors import Error, InvalidStateError
from symmpool.plugins import deep_ep_names
from symmpool.plugins.presence import PresenceCheck
from symmpool.plugins.report import ServiceReport
from symmpool.torch_backend import registration

__all__ = ["put_in_place"]

logger = logging.getLogger("sglang.srt.plugins.symmpool")

BACKEND = "symmpool"
_GROUPS = "sglang.srt.distributed.parallel_state.init_distributed_environment"
# Where it stands among the function's arguments.
_PLACE = 4


def put_in_place() -> ServiceReport:
    """Called before this process makes groups."""
    cuda = torch.version.hip is None and torch.cuda.is_available()
    report = ServiceReport("CUDA" if cuda else "the CPU")
    if torch.version.hip is not None:
        return ServiceReport("ROCm", [], ["everything, as symmpool has CPUs and NVIDIA GPUs"])
    _groups(report)
    if not cuda:
        report.left.append("all-reduces of SGLang's own CPU kernels, where it has these (AMX, Arm)")
        return report
    _replace(
        report,
        (adapters.ALL_REDUCE, "dispatch_custom_allreduce"),
        adapters.install_custom_allreduce,
        "all-reduces (CustomAllReduceV2, and CustomAllreduce where SGLang has not that)",
    )
    _replace(
        report,
        (adapters.NCCL, "PyNcclCommunicator"),
        adapters.install_nccl_communicator,
        "what SGLang asks NCCL in graphs and for unequal parts (PyNcclCommunicator) within a host, without "
        "--enable-symm-mem",
    )
    try:
        adapters.install_fusion()
        report.served.append("fused norms of --flashinfer-allreduce-fusion-backend trtllm or mnnvl")
    except Error as error:
        report.left.append(f"fused norms: {error}")
    try:
        adapters.install()
        report.served.append("memory of --enable-symm-mem")
    except InvalidStateError as error:
        report.left.append(f"memory of --enable-symm-mem: {error}")
    deep_ep_names.put_in_place(report, "--moe-a2a-backend deepep")
    return report


def _replace(report: ServiceReport, name: tuple[str, str], install: Callable[[], None], served: str) -> None:
    """Puts ours in place of a name of one of SGLang's modules, unless another plug-in has done so with its
    own."""
    module, attribute = name
    theirs = getattr(getattr(importlib.import_module(module), attribute, None), "__module__", module)
    if theirs.partition(".")[0] not in ("sglang", "symmpool"):
        report.left.append(f"{served}, as another plug-in has put {theirs} in place")
        return
    install()
    report.served.append(served)


def _groups(report: ServiceReport) -> None:
    """The groups of devices are made on our backend."""
    registration.register()
    registration.before_groups.append(PresenceCheck("SGLang", logger))
    hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
    hooks.HookRegistry.register(_GROUPS, on_our_backend, hooks.HookType.BEFORE)
    report.served.append("groups (broadcasts, all-gathers, reduce-scatters, all-to-alls, messages)")


def on_our_backend(*arguments: object, **options: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of SGLang's `init_distributed_environment`, with our backend in place of torch's. One
    that is neither gloo nor NCCL stays, and a warning says so."""
    asked = arguments[_PLACE] if len(arguments) > _PLACE else options.get("backend", "nccl")
    if asked not in ("nccl", "gloo", BACKEND):
        logger.warning("symmpool serves no groups: SGLang was told to make them on %r", asked)
    elif len(arguments) > _PLACE:
        arguments = (*arguments[:_PLACE], BACKEND, *arguments[_PLACE + 1 :])
    else:
        options = {**options, "backend": BACKEND}
    return arguments, options
