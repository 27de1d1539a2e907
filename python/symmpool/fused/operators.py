"""Fused matmuls as operators: `torch.ops.symmpool.*`, and in place of torch's own under
`torch.ops.symm_mem`."""

from __future__ import annotations

import functools
import inspect
import threading
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from symmpool import ops
from symmpool.communicators.devices import name_of, number_of_tensor
from symmpool.errors import InvalidArgumentError, InvalidStateError
from symmpool.fused import low_contention, matmul_gather, matmul_scatter, matmul_sum
from symmpool.fused.arguments import refuse_gradients
from symmpool.groups import pool_registry, process_groups
from symmpool.groups.names import group_of

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["has_ours", "install", "uninstall"]

_SIGNATURES = {
    "fused_all_gather_matmul": "Tensor A, Tensor[] Bs, int gather_dim, str group_name, *, "
    "bool return_A = True) -> (Tensor?, Tensor[])",
    "fused_all_gather_scaled_matmul": "Tensor A, Tensor[] Bs, Tensor A_scale, Tensor[] B_scales, "
    "int gather_dim, str group_name, Tensor?[] biases, Tensor?[] result_scales, ScalarType?[] out_dtypes, "
    "bool[] use_fast_accum) -> (Tensor, Tensor[])",
    "fused_matmul_reduce_scatter": "Tensor A, Tensor B, str reduce_op, int scatter_dim, str group_name) "
    "-> Tensor",
    "fused_scaled_matmul_reduce_scatter": "Tensor A, Tensor B, Tensor A_scale, Tensor B_scale, "
    "str reduce_op, int orig_scatter_dim, int scatter_dim_after_maybe_reshape, str group_name, "
    "SymInt[]? output_shape, Tensor? bias = None, Tensor? result_scale = None, ScalarType? out_dtype = None, "
    "bool use_fast_accum = False) -> Tensor",
    "_low_contention_all_gather": "Tensor tensor, str group_name) -> Tensor",
    "_low_contention_reduce_scatter": "Tensor tensor, str reduce_op, str group_name) -> Tensor",
    "fused_matmuls_reduce_scatter": "Tensor[] As, Tensor[] Bs, str reduce_op, int scatter_dim, "
    "str group_name) -> Tensor",
    "matmul_all_reduce": "Tensor A, Tensor B, str reduce_op, str group_name, *, "
    "str algorithm='auto') -> Tensor",
}
# Types by the numbers that operators are given for elements of lists.
_TYPES = {
    5: torch.float16,
    6: torch.float32,
    7: torch.float64,
    15: torch.bfloat16,
    23: torch.float8_e5m2,
    24: torch.float8_e4m3fn,
}


def _dtype(given: torch.dtype | int | None) -> torch.dtype | None:
    return _TYPES[given] if isinstance(given, int) else given


# Implementations of the operators.


def _all_gather_matmul(
    A: torch.Tensor,
    Bs: Sequence[torch.Tensor],
    gather_dim: int,
    group_name: str,
    *,
    return_A: bool = True,
    in_front: bool = False,
) -> Any:
    how = {"return_A": return_A, "in_front": in_front}
    return matmul_gather.fused_all_gather_matmul(A, Bs, gather_dim, group_of(group_name), **how)


def _all_gather_scaled_matmul(
    A: torch.Tensor,
    Bs: Sequence[torch.Tensor],
    A_scale: torch.Tensor,
    B_scales: Sequence[torch.Tensor],
    gather_dim: int,
    group_name: str,
    biases: Sequence[torch.Tensor | None],
    result_scales: Sequence[torch.Tensor | None],
    out_dtypes: Sequence[torch.dtype | None],
    use_fast_accum: Sequence[bool],
    *,
    in_front: bool = False,
) -> Any:
    types = [_dtype(each) for each in out_dtypes]
    group = group_of(group_name)
    given = (A, Bs, A_scale, B_scales, gather_dim, group, biases, result_scales, types, use_fast_accum)
    return matmul_gather.fused_all_gather_scaled_matmul(*given, in_front=in_front)


def _matmul_reduce_scatter(
    A: torch.Tensor, B: torch.Tensor, reduce_op: str, scatter_dim: int, group_name: str
) -> torch.Tensor:
    return matmul_scatter.fused_matmul_reduce_scatter(A, B, reduce_op, scatter_dim, group_of(group_name))


def _matmuls_reduce_scatter(
    As: Sequence[torch.Tensor], Bs: Sequence[torch.Tensor], reduce_op: str, scatter_dim: int, group_name: str
) -> Any:
    return matmul_scatter.fused_matmuls_reduce_scatter(As, Bs, reduce_op, scatter_dim, group_of(group_name))


def _scaled_matmul_reduce_scatter(
    A: torch.Tensor,
    B: torch.Tensor,
    A_scale: torch.Tensor,
    B_scale: torch.Tensor,
    reduce_op: str,
    orig_scatter_dim: int,
    scatter_dim_after_maybe_reshape: int,
    group_name: str,
    output_shape: Sequence[int],
    bias: torch.Tensor | None = None,
    result_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    dims = (orig_scatter_dim, scatter_dim_after_maybe_reshape)
    more: tuple[Any, ...] = (output_shape, bias, result_scale, _dtype(out_dtype), use_fast_accum)
    call = matmul_scatter.fused_scaled_matmul_reduce_scatter
    return call(A, B, A_scale, B_scale, reduce_op, *dims, group_of(group_name), *more)


def _all_gather(tensor: torch.Tensor, group_name: str) -> torch.Tensor:
    return low_contention.low_contention_all_gather(tensor, group_of(group_name))


def _reduce_scatter(tensor: torch.Tensor, reduce_op: str, group_name: str) -> torch.Tensor:
    return low_contention.low_contention_reduce_scatter(tensor, reduce_op, group_of(group_name))


def _all_reduce(
    A: torch.Tensor, B: torch.Tensor, reduce_op: str, group_name: str, *, algorithm: str = "auto"
) -> torch.Tensor:
    return matmul_sum.matmul_all_reduce(A, B, reduce_op, group_of(group_name), algorithm=algorithm)


_IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "fused_all_gather_matmul": _all_gather_matmul,
    "fused_all_gather_scaled_matmul": _all_gather_scaled_matmul,
    "fused_matmul_reduce_scatter": _matmul_reduce_scatter,
    "fused_matmuls_reduce_scatter": _matmuls_reduce_scatter,
    "fused_scaled_matmul_reduce_scatter": _scaled_matmul_reduce_scatter,
    "_low_contention_all_gather": _all_gather,
    "_low_contention_reduce_scatter": _reduce_scatter,
    "matmul_all_reduce": _all_reduce,
}


# Implementations in the place of torch's operators, whose results lie in memory in another way.
_AS_TORCH: dict[str, Callable[..., Any]] = {
    **_IMPLEMENTATIONS,
    "fused_all_gather_matmul": functools.partial(_all_gather_matmul, in_front=True),
    "fused_all_gather_scaled_matmul": functools.partial(_all_gather_scaled_matmul, in_front=True),
}


# Their shapes, for compiled code.


def _gathered_fake(
    A: torch.Tensor, rights: Sequence[torch.Tensor], types: Sequence[torch.dtype], dim: int, group_name: str
) -> Any:
    whole = list(A.shape)
    whole[dim] *= ops.world_of(group_name)
    leading = A.shape[:-1] if dim == A.dim() - 1 else whole[:-1]
    found = [
        A.new_empty((*leading, right.shape[1]), dtype=dtype)
        for right, dtype in zip(rights, types, strict=True)
    ]
    return A.new_empty(whole), found


def _all_gather_matmul_fake(
    A: torch.Tensor, Bs: Sequence[torch.Tensor], gather_dim: int, group_name: str, *, return_A: bool = True
) -> Any:
    whole, found = _gathered_fake(A, Bs, [right.dtype for right in Bs], gather_dim, group_name)
    return whole if return_A else None, found


def _all_gather_scaled_matmul_fake(
    A: torch.Tensor,
    Bs: Sequence[torch.Tensor],
    A_scale: torch.Tensor,
    B_scales: Sequence[torch.Tensor],
    gather_dim: int,
    group_name: str,
    biases: Sequence[torch.Tensor | None],
    result_scales: Sequence[torch.Tensor | None],
    out_dtypes: Sequence[torch.dtype | None],
    use_fast_accum: Sequence[bool],
) -> Any:
    return _gathered_fake(A, Bs, [_dtype(each) or A.dtype for each in out_dtypes], gather_dim, group_name)


def _scattered_fake(
    A: torch.Tensor, shape: Sequence[int], dim: int, group_name: str, dtype: torch.dtype
) -> torch.Tensor:
    part = list(shape)
    part[dim] //= ops.world_of(group_name)
    return A.new_empty(part, dtype=dtype)


def _matmul_reduce_scatter_fake(
    A: torch.Tensor, B: torch.Tensor, reduce_op: str, scatter_dim: int, group_name: str
) -> torch.Tensor:
    return _scattered_fake(A, (*A.shape[:-1], B.shape[1]), scatter_dim, group_name, B.dtype)


def _matmuls_reduce_scatter_fake(
    As: Sequence[torch.Tensor], Bs: Sequence[torch.Tensor], reduce_op: str, scatter_dim: int, group_name: str
) -> Any:
    return _matmul_reduce_scatter_fake(As[0], Bs[0], reduce_op, scatter_dim, group_name)


def _scaled_matmul_reduce_scatter_fake(
    A: torch.Tensor,
    B: torch.Tensor,
    A_scale: torch.Tensor,
    B_scale: torch.Tensor,
    reduce_op: str,
    orig_scatter_dim: int,
    scatter_dim_after_maybe_reshape: int,
    group_name: str,
    output_shape: Sequence[int],
    bias: torch.Tensor | None = None,
    result_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    shape = output_shape if output_shape is not None else (*A.shape[:-1], B.shape[1])
    return _scattered_fake(A, shape, orig_scatter_dim, group_name, _dtype(out_dtype) or A.dtype)


def _all_gather_fake(tensor: torch.Tensor, group_name: str) -> torch.Tensor:
    return tensor.new_empty((tensor.shape[0] * ops.world_of(group_name), *tensor.shape[1:]))


def _reduce_scatter_fake(tensor: torch.Tensor, reduce_op: str, group_name: str) -> torch.Tensor:
    return _scattered_fake(tensor, tensor.shape, 0, group_name, tensor.dtype)


def _all_reduce_fake(
    A: torch.Tensor, B: torch.Tensor, reduce_op: str, group_name: str, *, algorithm: str = "auto"
) -> torch.Tensor:
    return A.new_empty((*A.shape[:-1], B.shape[1]))


_FAKES: dict[str, Callable[..., Any]] = {
    "fused_all_gather_matmul": _all_gather_matmul_fake,
    "fused_all_gather_scaled_matmul": _all_gather_scaled_matmul_fake,
    "fused_matmul_reduce_scatter": _matmul_reduce_scatter_fake,
    "fused_matmuls_reduce_scatter": _matmuls_reduce_scatter_fake,
    "fused_scaled_matmul_reduce_scatter": _scaled_matmul_reduce_scatter_fake,
    "_low_contention_all_gather": _all_gather_fake,
    "_low_contention_reduce_scatter": _reduce_scatter_fake,
    "matmul_all_reduce": _all_reduce_fake,
}


def _without_gradients(name: str) -> Any:
    """The shapes of an operator's results, where no tensor requires grad. In compiled code nothing else
    looks: the operator itself is given tensors of which autograd knows nothing any more."""
    fake = _FAKES[name]
    signature = inspect.signature(fake)

    @functools.wraps(fake)
    def checked(*given: Any, **named: Any) -> Any:
        for which, argument in signature.bind(*given, **named).arguments.items():
            for each in argument if isinstance(argument, (list, tuple)) else [argument]:
                if isinstance(each, torch.Tensor):
                    refuse_gradients(name, **{which: each})
        return fake(*given, **named)

    return checked


_library = torch.library.Library("symmpool", "FRAGMENT")
for _name, _signature in _SIGNATURES.items():
    _library.define(f"{_name}({_signature}", tags=(torch.Tag.needs_fixed_stride_order,))
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _IMPLEMENTATIONS[_name], _key)
    torch.library.register_fake(f"symmpool::{_name}", _without_gradients(_name), lib=_library)


# In place of torch's.

_lock = threading.Lock()
_installed: list[torch.library.Library] = []
# torch's own function, while ours is in its place.
_torchs_enabled: list[Any] = []
_reported: set[str] = set()
# Not empty while ours serve every group.
_for_all: list[bool] = []


def install() -> None:
    """Has torch's operators `torch.ops.symm_mem.fused_*` and `_low_contention_*` be ours on groups that
    have a pool on the tensor's device, or symmpool for a backend: so programs, and Inductor's
    micro-pipelining, use ours as they are; it looks for them on such groups without torch's
    `enable_symm_mem_for_group`. On other groups torch's own kernels run, which a RuntimeWarning says once
    for each. Such operators come to exist on the CPU as well. All ranks of a group install them, or none.
    Again does nothing."""
    with _lock:
        if _installed:
            return
        theirs = _module_of_torch()
        library = torch.library.Library("symm_mem", "IMPL")
        with warnings.catch_warnings():
            # torch says that a kernel is replaced, which is what was asked for.
            warnings.filterwarnings("ignore", message="Warning only once for all operators")
            for name in _SIGNATURES:
                if not hasattr(torch.ops.symm_mem, name):
                    continue
                for key in ("CPU", "CUDA"):
                    library.impl(name, _chosen(name, theirs), key, allow_override=True)
        _installed.append(library)
        _enable_for_inductor(theirs)


def uninstall() -> None:
    """Ends `install`: torch's own kernels run again."""
    with _lock:
        while _installed:
            _installed.pop()._destroy()
        if _torchs_enabled:
            _module_of_torch().is_symm_mem_enabled_for_group = _torchs_enabled.pop()


def install_for_all() -> None:
    """Installs ours as `install` does, on all groups: one without a pool gets it at its first call. Called by
    `symmpool.symmetric_memory.install`, after which torch's own kernels would find no memory."""
    was_installed = bool(_installed)
    install()
    _for_all.append(not was_installed)


def end_for_all() -> None:
    """Ends `install_for_all`."""
    if _for_all.pop():
        uninstall()


def _enable_for_inductor(theirs: Any) -> None:
    """Has Inductor, which asks torch whether a group has symmetric memory, look for matmuls on groups of
    ours too."""
    of_torch = getattr(theirs, "is_symm_mem_enabled_for_group", None)
    if of_torch is None:
        return

    @functools.wraps(of_torch)
    def enabled(group_name: str) -> bool:
        if of_torch(group_name):
            return True
        return not getattr(theirs, "_is_test_mode", False) and has_ours(group_name)

    _torchs_enabled.append(of_torch)
    theirs.is_symm_mem_enabled_for_group = enabled


def has_ours(name: str) -> bool:
    """Whether there is a group of this name that has symmpool for a backend, or a pool, on any kind of
    device."""
    try:
        group = group_of(name)
    except InvalidArgumentError:
        return False
    return "symmpool" in process_groups.backends_of(group).values() or bool(pool_registry.pools_of(group))


def _module_of_torch() -> Any:
    try:
        import torch.distributed._symmetric_memory as theirs
    except ImportError as error:
        raise InvalidStateError(
            f"install: torch {torch.__version__} has no symmetric memory ({error})"
        ) from error
    return theirs


def _chosen(name: str, theirs: Any) -> Any:
    """An operator that is ours or torch's, by its group."""
    ours = _AS_TORCH[name]
    place = _SIGNATURES[name].split(")")[0].split(", ").index("str group_name")

    def call(*given: Any, **named: Any) -> Any:
        group = given[place] if len(given) > place else named["group_name"]
        if _is_ours(given[0], group, theirs):
            return ours(*given, **named)
        return _of_torch(name, theirs, given[0].device.type)(*given, **named)

    return call


def _is_ours(tensor: torch.Tensor, name: str, theirs: Any) -> bool:
    """Whether a group of this name has our pool on the tensor's device. The same on all ranks, as pools
    are."""
    if getattr(theirs, "_is_test_mode", False):
        return False
    if _for_all:
        return True
    group = group_of(name)
    if process_groups.backends_of(group).get(tensor.device.type) == "symmpool":
        return True
    device = name_of(number_of_tensor(tensor))
    if any(pool.device == device for pool in pool_registry.pools_of(group)):
        return True
    if name not in _reported:
        _reported.add(name)
        warnings.warn(
            f"symmpool: group {name!r} has no pool of symmpool on {device}: torch's own kernels make its "
            "fused matmuls",
            RuntimeWarning,
            stacklevel=4,
        )
    return False


def _of_torch(name: str, theirs: Any, device: str) -> Any:
    """torch's own kernel. It has none for the CPU, where its definition by separate operations is run."""
    if device == "cuda":
        return getattr(theirs, name if name.startswith("_") else f"_{name}")
    found = getattr(theirs, f"_{name}_fallback", None)
    return found if found is not None else _SEPARATE[name]


def _separate_all_gather(tensor: torch.Tensor, group_name: str) -> torch.Tensor:
    functional = torch.ops._c10d_functional
    world = ops.world_of(group_name)
    return functional.wait_tensor(functional.all_gather_into_tensor(tensor, world, group_name))


def _separate_reduce_scatter(tensor: torch.Tensor, reduce_op: str, group_name: str) -> torch.Tensor:
    functional = torch.ops._c10d_functional
    world = ops.world_of(group_name)
    return functional.wait_tensor(functional.reduce_scatter_tensor(tensor, reduce_op, world, group_name))


_SEPARATE = {
    "_low_contention_all_gather": _separate_all_gather,
    "_low_contention_reduce_scatter": _separate_reduce_scatter,
}
