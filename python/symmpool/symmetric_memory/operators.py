"""torch's operators `torch.ops.symm_mem`, by collectives of symmpool.

torch's own kernels look in C++ for the handle of a tensor's memory, which for memory of a pool there is none
of. So each operator is one of three kinds: made by a collective here, refused, or left as it is because it
looks for no handle (`memset32_`, `stream_write_value32_`, `_async_input_mm`). `fused_*` and
`_low_contention_*` are those of `symmpool.fused.install`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from symmpool.collectives import functions
from symmpool.errors import UnsupportedError
from symmpool.groups.names import group_of
from symmpool.ops import world_of
from symmpool.symmetric_memory import allocation

__all__ = ["LEFT", "REFUSED", "SERVED", "register"]


def _all_reduce(input: torch.Tensor, op: str, group: str) -> torch.Tensor:
    return _all_reduce_out(input, op, group, torch.empty_like(input))


def _all_reduce_out(input: torch.Tensor, op: str, group: str, out: torch.Tensor) -> torch.Tensor:
    functions.all_reduce(input, op, group_of(group), out=out)
    return out


def _all_reduce_(input: torch.Tensor, op: str, group: str) -> torch.Tensor:
    functions.all_reduce(input, op, group_of(group))
    return input


def _all_reduce_copy(buffer: torch.Tensor, input: torch.Tensor, op: str, group: str) -> torch.Tensor:
    return _all_reduce(input, op, group)


def _all_reduce_copy_out(
    buffer: torch.Tensor, input: torch.Tensor, op: str, group: str, out: torch.Tensor
) -> torch.Tensor:
    return _all_reduce_out(input, op, group, out)


def _reduce_out(input: torch.Tensor, op: str, root: int, group: str, out: torch.Tensor) -> torch.Tensor:
    """The sum on the root; other ranks' `out` stays as it is."""
    found = input.clone()
    members = group_of(group)
    functions.reduce(found, group_dst=root, op=op, group=members)
    if torch.distributed.get_rank(members) == root:
        out.copy_(found)
    return out


def _all_gather_out(input: torch.Tensor, group: str, out: torch.Tensor) -> torch.Tensor:
    functions.all_gather_into_tensor(out, input, group_of(group))
    return out


def _all_gather(input: torch.Tensor, group: str) -> torch.Tensor:
    rows = input.shape[0] * world_of(group)
    return _all_gather_out(input, group, input.new_empty((rows, *input.shape[1:])))


def _reduce_scatter_out(
    input: torch.Tensor, group: str, split_last_dim: bool, output: torch.Tensor
) -> torch.Tensor:
    """The sum of each rank's part: of the first dimension, or of the last one."""
    if split_last_dim:
        input = torch.stack(input.chunk(world_of(group), dim=-1))
    functions.reduce_scatter_tensor(output, input.reshape(-1), group=group_of(group))
    return output


def _remote_tensors(local: torch.Tensor, group: str) -> list[torch.Tensor]:
    handle = allocation.rendezvous(local, group)
    ranks, start = range(handle.world_size), int(local.storage_offset())
    return [handle.get_buffer(rank, local.size(), local.dtype, start) for rank in ranks]


#: Operators that collectives of ours make.
SERVED: dict[str, Callable[..., Any]] = {
    "one_shot_all_reduce": _all_reduce,
    "one_shot_all_reduce_out": _all_reduce_out,
    "one_shot_all_reduce_copy": _all_reduce_copy,
    "one_shot_all_reduce_copy_out": _all_reduce_copy_out,
    "two_shot_all_reduce_": _all_reduce_,
    "two_shot_all_reduce_out": _all_reduce_out,
    "multimem_all_reduce_": _all_reduce_,
    "multimem_one_shot_all_reduce": _all_reduce,
    "multimem_one_shot_all_reduce_out": _all_reduce_out,
    "multimem_one_shot_reduce_out": _reduce_out,
    "multimem_all_gather_out": _all_gather_out,
    "reduce_scatter_out": _reduce_scatter_out,
    "get_remote_tensors": _remote_tensors,
    "_low_contention_all_gather_ce_multicast": _all_gather,
    "_low_contention_all_gather_ce_multicast_out": _all_gather_out,
}
_A2A = "symmpool.all_to_all_v reads its splits from tensors, too"
_COPY = "use the handle's get_buffer and copy_, and its put_signal and wait_signal"
_TILES = "use symmpool.reduce on each tile"
#: Operators that are refused, and what to use instead.
REFUSED: dict[str, str] = {
    "all_to_all_vdev": _A2A,
    "all_to_all_vdev_2d": "use symmpool.experts.ExpertBuffer",
    "all_to_all_vdev_2d_offset": "use symmpool.experts.ExpertBuffer",
    "nvshmem_all_to_all": "use symmpool.all_to_all_single",
    "nvshmem_broadcast": "use symmpool.broadcast",
    "nvshmem_put": _COPY,
    "nvshmem_get": _COPY,
    "nvshmem_get_out": _COPY,
    "nvshmem_put_with_signal": _COPY,
    "nvshmem_wait_for_signal": _COPY,
    "nccl_put": _COPY,
    "nccl_get": _COPY,
    "nccl_get_out": _COPY,
    "nccl_put_signal": _COPY,
    "nccl_put_with_signal": _COPY,
    "nccl_wait_for_signal": _COPY,
    "nccl_all_to_all_nd": "use symmpool.all_to_all_single",
    "nccl_reduce_scatter_offset": "use symmpool.reduce on each block",
    "tile_reduce": _TILES,
    "multi_root_tile_reduce": _TILES,
    "memcpy_to_multicast_": "there is no multicast address; copy to each rank's get_buffer",
    "_rendezvous": "call torch.distributed._symmetric_memory.rendezvous",
}
#: Operators that look for no handle, so torch's own kernels run; and two that are given one of torch's, which
#: `boxed` of ours refuses to be.
LEFT = ("_async_input_mm", "memset32_", "stream_write_value32_", "_barrier", "nccl_wait_signal")


def _refusing(name: str, instead: str) -> Callable[..., Any]:
    def refused(*arguments: object, **options: object) -> Any:
        raise UnsupportedError(
            f"symmpool: torch.ops.symm_mem.{name} is not served on memory of pools: {instead}"
        )

    return refused


def register(library: torch.library.Library) -> None:
    """Puts the operators in the place of torch's, on the CPU and on CUDA. Those that this torch does not have
    stay out."""
    chosen = dict(SERVED) | {name: _refusing(name, instead) for name, instead in REFUSED.items()}
    for name, function in chosen.items():
        if not hasattr(torch.ops.symm_mem, name):
            continue
        keys = ("CompositeExplicitAutograd",) if name == "_rendezvous" else ("CPU", "CUDA")
        for key in keys:
            library.impl(name, function, key, allow_override=True)
