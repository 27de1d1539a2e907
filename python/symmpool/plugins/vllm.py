"""Replacements in a process of vLLM, by the platform that it runs on."""

from __future__ import annotations

import importlib
import logging
import os
from typing import Any

from symmpool.engines import vllm as adapters
from symmpool.errors import Error
from symmpool.plugins import deep_ep_names
from symmpool.plugins.presence import PresenceCheck
from symmpool.plugins.report import ServiceReport

__all__ = ["put_in_place"]

logger = logging.getLogger("vllm.plugins.symmpool")

#: The name of our backend of torch.distributed.
BACKEND = "symmpool"
CPU_COMMUNICATOR = "symmpool.plugins.vllm_cpu.CpuCommunicator"


def put_in_place() -> ServiceReport:
    """Called before this process makes groups."""
    platform = importlib.import_module("vllm.platforms").current_platform
    if platform.is_cpu():
        return _on_cpu(platform)
    if platform.is_cuda():
        return _on_cuda(platform)
    name = getattr(platform, "device_name", type(platform).__name__)
    return ServiceReport(
        str(name), [], [f"everything, as symmpool has CPUs and NVIDIA GPUs, and this is {name}"]
    )


def _groups(platform: Any, report: ServiceReport) -> None:
    """The groups of the platform's devices are made on our backend."""
    from symmpool.torch_backend import registration

    # torch looks for backends of packages by itself, unless TORCH_DEVICE_BACKEND_AUTOLOAD=0.
    registration.register()
    kind = type(platform)
    before = getattr(kind, "dist_backend", None)
    if before not in ("gloo", "nccl", BACKEND):
        report.left.append(f"groups, which another plug-in has put on {before!r}")
        return
    if os.environ.get("VLLM_DISTRIBUTED_USE_SPLIT_GROUP", "0") not in ("", "0"):
        report.left.append("groups, which VLLM_DISTRIBUTED_USE_SPLIT_GROUP has NCCL split; unset that")
        return
    kind.dist_backend = BACKEND
    registration.before_groups.append(PresenceCheck("vLLM", logger))
    report.served.append("groups (broadcasts, all-gathers, reduce-scatters, all-to-alls, messages)")


def _on_cpu(platform: Any) -> ServiceReport:
    report = ServiceReport("the CPU")
    _groups(platform, report)
    kind = type(platform)
    theirs = kind.get_device_communicator_cls()
    if theirs not in (
        CPU_COMMUNICATOR,
        "vllm.distributed.device_communicators.cpu_communicator.CpuCommunicator",
    ):
        report.left.append(f"all-reduces, as another plug-in has put {theirs} in place")
    else:
        kind.get_device_communicator_cls = classmethod(lambda cls: CPU_COMMUNICATOR)
        report.served.append("all-reduces and gathers of tensor-parallel groups")
    report.left.append("tensors between pipeline stages (vLLM's shared memory)")
    if os.environ.get("VLLM_CPU_OMP_THREADS_BIND") == "nobind":
        # A rank that sleeps is woken on the other one's core, and both take turns there.
        report.advice.append(
            "For speed set VLLM_CPU_OMP_THREADS_BIND to the cores of each rank, such as 0|1, not to nobind"
        )
    return report


def _on_cuda(platform: Any) -> ServiceReport:
    report = ServiceReport("CUDA")
    _groups(platform, report)
    module = importlib.import_module(adapters.ALL_REDUCE)
    theirs = module.CustomAllreduce
    if theirs.__module__ not in (adapters.ALL_REDUCE, adapters.CustomAllreduce.__module__):
        report.left.append(f"all-reduces, as another plug-in has put {theirs.__module__} in place")
    else:
        _flashinfer(report)
        adapters.install_custom_allreduce()
        report.served.append("all-reduces, small all-gathers and reduce-scatters (CustomAllreduce)")
        _other_all_reduces(report)
    _nccl(report)
    deep_ep_names.put_in_place(report, "expert managers deepep_high_throughput and deepep_low_latency")
    report.left.append("sleep with checkpoints of communicators (refused by name)")
    return report


def _is_set(variable: str, default: str = "0") -> bool:
    """Whether one of vLLM's variables is set."""
    return os.environ.get(variable, default) not in ("", "0")


def _other_all_reduces(report: ServiceReport) -> None:
    """Names what vLLM asks for sums before or behind ours, and the variable that keeps it from that."""
    if _is_set("VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC"):
        report.left.append(
            "sums that FlashInfer's PCIe all-reduce takes, which "
            "VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC has vLLM ask first; unset that"
        )
    if _is_set("VLLM_ALLREDUCE_USE_SYMM_MEM", "1"):
        report.left.append(
            "sums of more than 8 MiB that torch's symmetric memory takes; VLLM_ALLREDUCE_USE_SYMM_MEM=0 "
            "leaves them to symmpool"
        )


def _nccl(report: ServiceReport) -> None:
    """Serves what vLLM asks its communicator of NCCL, or names why not."""
    calls = "large sums, gathers, reduce-scatters and messages (PyNcclCommunicator)"
    if _is_set("VLLM_USE_NCCL_SYMM_MEM"):
        adapters.install()
        report.served.append("memory in NCCL's windows (VLLM_USE_NCCL_SYMM_MEM)")
        report.left.append(f"{calls}, which VLLM_USE_NCCL_SYMM_MEM leaves to NCCL")
        return
    if os.environ.get("VLLM_DISABLE_PYNCCL", "").lower() in ("true", "1"):
        report.left.append(f"{calls}, as VLLM_DISABLE_PYNCCL is set")
        return
    module = importlib.import_module(adapters.NCCL)
    theirs = module.PyNcclCommunicator.__module__
    if theirs != adapters.NCCL:
        report.left.append(f"{calls}, as another plug-in has put {theirs} in place")
        return
    adapters.install_nccl_communicator()
    report.served.append(f"{calls} within a host")


def _flashinfer(report: ServiceReport) -> None:
    from symmpool.engines import flashinfer_comm

    try:
        flashinfer_comm.install()
        report.served.append("fused norms and all-reduces asked of FlashInfer")
    except Error as error:
        report.left.append(f"fused norms: {error}")
