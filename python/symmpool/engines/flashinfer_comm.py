"""FlashInfer's names for an all-reduce with a residual and a norm, served by `symmpool.fused`.

    import symmpool.engines.flashinfer_comm
    symmpool.engines.flashinfer_comm.install()     # in every process of an engine, before it makes groups

vLLM's pass `allreduce_rms_fusion` and SGLang's `flashinfer_comm_fusion` call
`flashinfer.comm.allreduce_fusion` with a workspace. `install()` puts the functions of this module in its
place, so both use symmpool unpatched. All ranks get the same bits in every run, which FlashInfer does not
promise.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch

import symmpool
from symmpool import fused
from symmpool.communicators import cache
from symmpool.engines import core
from symmpool.errors import InvalidArgumentError, InvalidStateError, UnsupportedError
from symmpool.groups import process_groups

if TYPE_CHECKING:
    from symmpool.groups.types import GroupLike

__all__ = [
    "AllReduceFusionPattern",
    "AllReduceFusionWorkspace",
    "allreduce_fusion",
    "create_allreduce_fusion_workspace",
    "install",
    "is_installed",
    "uninstall",
]

#: The module of FlashInfer whose functions are replaced, and the functions.
REPLACES = "flashinfer.comm"
FUNCTIONS = ("allreduce_fusion", "create_allreduce_fusion_workspace")


class AllReduceFusionPattern:
    """Results made of the sum, with FlashInfer's numbers. Patterns with "Out" give the norm besides."""

    kAllReduce = 0
    kARResidualRMSNorm = 1
    kARResidualRMSNormFP8Quant = 2
    kARResidualRMSNormOutFP8Quant = 4
    kARResidualRMSNormDynamicFP8Quant = 10
    kARResidualRMSNormOutDynamicFP8Quant = 11


_STATIC = (
    AllReduceFusionPattern.kARResidualRMSNormFP8Quant,
    AllReduceFusionPattern.kARResidualRMSNormOutFP8Quant,
)
_DYNAMIC = (
    AllReduceFusionPattern.kARResidualRMSNormDynamicFP8Quant,
    AllReduceFusionPattern.kARResidualRMSNormOutDynamicFP8Quant,
)
_NORM_TOO = (
    AllReduceFusionPattern.kARResidualRMSNormOutFP8Quant,
    AllReduceFusionPattern.kARResidualRMSNormOutDynamicFP8Quant,
)
_ALL = (AllReduceFusionPattern.kAllReduce, AllReduceFusionPattern.kARResidualRMSNorm, *_STATIC, *_DYNAMIC)


class _NoAddress(int):
    """A number that is 0, and true."""

    def __bool__(self) -> bool:
        return True


_NO_ADDRESS = _NoAddress(0)


class AllReduceFusionWorkspace:
    """A group whose communicator serves the calls. It holds no memory of its own: rows travel through the
    communicator's inboxes, which other calls of the group use, too. So it is large enough for any number
    of tokens."""

    def __init__(
        self, group: GroupLike, world_size: int, rank: int, backend: str, dtype: torch.dtype | None = None
    ):
        self.group = group
        self.world_size, self.rank = world_size, rank
        self._backend = backend
        self._destroyed = False
        # SGLang reads these entries of a workspace of "trtllm". Entries about FlashInfer's own memory are
        # left out.
        self.metadata = {
            "tp_rank": rank,
            "tp_size": world_size,
            "use_fp32_lamport": dtype == torch.float32,
        }

    @property
    def backend(self) -> str:
        """The backend that was asked for, as engines compare it with that; "trtllm" for "auto"."""
        return self._backend

    @property
    def mc_ptr(self) -> int:
        """True for "mnnvl" and 0 as a number: vLLM drops a workspace of "mnnvl" whose `mc_ptr` is false, and
        no function here uses multicast."""
        return _NO_ADDRESS if self._backend == "mnnvl" and not self._destroyed else 0

    def is_buffer_size_sufficient(
        self,
        tp_size: int,
        num_tokens: int,
        hidden_dim: int,
        dtype: torch.dtype,
        use_oneshot: bool | None = None,
    ) -> bool:
        """Whether calls of such rows are served: of float32, float16 or bfloat16, a multiple of 8 of them."""
        fits = tp_size == self.world_size and hidden_dim % 8 == 0 and 8 <= hidden_dim <= 65536
        return fits and dtype in (torch.float32, torch.float16, torch.bfloat16) and not self._destroyed

    def checkpoint_prepare(self) -> None:
        """Always raises UnsupportedError, a NotImplementedError: engines that suspend communicators go on
        then, and those that write a checkpoint report it."""
        raise UnsupportedError(self._stays("checkpoint_prepare"))

    def checkpoint_restore(self, comm_backend: object = None) -> None:
        """Refuses like `checkpoint_prepare`."""
        raise UnsupportedError(self._stays("checkpoint_restore"))

    def _stays(self, call: str) -> str:
        return (
            f"{call} on rank {self.rank}: the memory of symmpool's communicators cannot be given back while "
            "the engine lives; do without checkpoints of the process, or set SYMMPOOL_ENGINES=off"
        )

    def destroy(self) -> None:
        """Refuses further calls. The group's communicator stays."""
        self._destroyed = True


def create_allreduce_fusion_workspace(
    backend: str = "auto",
    world_size: int | None = None,
    rank: int | None = None,
    max_token_num: int | None = None,
    hidden_dim: int | None = None,
    dtype: torch.dtype | None = None,
    gpus_per_node: int | None = None,
    comm_backend: object = None,
    force_oneshot_support: bool = False,
    group: torch.distributed.ProcessGroup | None = None,
    **others: object,
) -> AllReduceFusionWorkspace:
    """Makes the communicator of a group ready, so that calls can be captured from the first on.
    Collective. The group is `group`, or that of `comm_backend`, or the default group; its backend may be
    gloo. The device is the current CUDA device, or the CPU where there is none. Other arguments are
    FlashInfer's, and change nothing.

    Raises InvalidArgumentError where `world_size` or `rank` are not those of the group."""
    found = group if group is not None else _group_of(comm_backend)
    dist = process_groups.distributed()
    if dist is None or not dist.is_initialized():
        raise InvalidStateError(
            "create_allreduce_fusion_workspace: torch.distributed has no default process group; call "
            "init_process_group first"
        )
    size, own = dist.get_world_size(found), dist.get_rank(found)
    for name, given, real in (("world_size", world_size, size), ("rank", rank, own)):
        if given is not None and given != real:
            raise InvalidArgumentError(
                f"{name}: {given} on rank {own}, but of the group it is {real}; pass the tensor-parallel "
                "group as `group`"
            )
    device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
    cache.communicator(found, device)
    name = "trtllm" if backend == "auto" else str(backend)
    return AllReduceFusionWorkspace(found, size, own, name, dtype)


def _group_of(comm_backend: object) -> torch.distributed.ProcessGroup | None:
    """The process group of an object with which engines have FlashInfer talk to other ranks."""
    dist = process_groups.distributed()
    if comm_backend is None or dist is None:
        return None
    for name in ("_cpu_group", "_group", "group"):
        found = getattr(comm_backend, name, None)
        if isinstance(found, dist.ProcessGroup):
            return found
    raise InvalidArgumentError(
        f"comm_backend: {type(comm_backend).__name__} has no process group; pass `group`"
    )


def allreduce_fusion(
    input: torch.Tensor,
    workspace: AllReduceFusionWorkspace,
    pattern: int,
    launch_with_pdl: bool = False,
    trigger_completion_at_end: bool = True,
    output: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    norm_out: torch.Tensor | None = None,
    quant_out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
    residual_in: torch.Tensor | None = None,
    rms_gamma: torch.Tensor | None = None,
    rms_eps: float = 1e-6,
    scale_factor: torch.Tensor | float | None = None,
    layout_code: int | None = None,
    use_oneshot: bool | None = None,
    fp32_acc: bool = False,
    weight_bias: float = 0.0,
    **others: object,
) -> torch.Tensor:
    """Adds up all ranks' `input`, of shape (tokens, hidden), and makes of it what `pattern` says (see
    `AllReduceFusionPattern`); gives the sum, the norm or its 8-bit floats. Where a pattern makes both, it
    gives what FlashInfer's backend does that the workspace names: "trtllm" `norm_out`, "mnnvl" `quant_out`.
    As `fused.all_reduce_rms_norm`: on the current stream, in captures, in float32 and always in the order of
    ranks, whatever `fp32_acc` says. Outputs may be the inputs. `use_oneshot` chooses the algorithm as
    FlashInfer's does.

    8-bit floats with a static scale are `norm / scale_factor`; dynamic ones have a scale for each token in
    `scale_out`, of shape (tokens, 1).

    Raises UnsupportedError for patterns of 4-bit floats, packed groups and experts; InvalidArgumentError
    for tensors that do not fit or are missing."""
    _check(workspace, pattern, residual_in, rms_gamma, quant_out, scale_factor, scale_out, norm_out)
    if pattern == AllReduceFusionPattern.kAllReduce:
        output = torch.empty_like(input) if output is None else output
        symmpool.all_reduce(input, group=workspace.group, out=output)
        return output
    quant = None
    if pattern in _STATIC:
        if not isinstance(scale_factor, torch.Tensor):
            assert scale_factor is not None  # the pattern needs it
            scale_factor = torch.full((1,), float(scale_factor), dtype=torch.float32, device=input.device)
        quant = fused.fp8_static(scale_factor.reshape(1))
    elif pattern in _DYNAMIC:
        quant = fused.fp8_per_token(scale_out)
    norm = norm_out if pattern in _NORM_TOO else None
    # A norm beside 8-bit floats has memory of its own.
    own = norm if norm is not None and norm.data_ptr() == input.data_ptr() else None
    separate = torch.empty_like(input) if own is not None else norm
    made = fused.all_reduce_rms_norm(
        input,
        residual_in,
        rms_gamma,
        rms_eps,
        out=quant_out if quant is not None else norm_out,
        residual_out=residual_out,
        norm_out=separate,
        quant=quant,
        weight_bias=weight_bias,
        group=workspace.group,
        algorithm={None: "auto", True: "one_shot", False: "two_shot"}[use_oneshot],
    )
    if own is not None and separate is not None:
        own.copy_(separate)
    if norm is not None and workspace.backend != "mnnvl":
        return norm
    return made.out


def _check(workspace: Any, pattern: int, *given: Any) -> None:
    """Refuses what is no workspace, what no pattern here is, and calls that lack what their pattern needs."""
    if not isinstance(workspace, AllReduceFusionWorkspace):
        raise InvalidArgumentError(
            f"workspace: {type(workspace).__name__} was not made by create_allreduce_fusion_workspace of "
            "symmpool; make workspaces after install()"
        )
    if workspace._destroyed:
        raise InvalidStateError(f"allreduce_fusion on rank {workspace.rank}: the workspace was destroyed")
    if pattern not in _ALL:
        raise UnsupportedError(
            f"pattern: {pattern} on rank {workspace.rank}; there are {', '.join(map(str, _ALL))}: the sum, "
            "its norm, and 8-bit floats of that with a scale that is given or one for each token"
        )
    residual_in, rms_gamma, quant_out, scale_factor, scale_out, norm_out = given
    needed: dict[str, Any] = {}
    if pattern != AllReduceFusionPattern.kAllReduce:
        needed |= {"residual_in": residual_in, "rms_gamma": rms_gamma}
    if pattern in _STATIC:
        needed |= {"quant_out": quant_out, "scale_factor": scale_factor}
    if pattern in _DYNAMIC:
        needed |= {"quant_out": quant_out, "scale_out": scale_out}
    if pattern in _NORM_TOO:
        needed |= {"norm_out": norm_out}
    for name, tensor in needed.items():
        if tensor is None:
            raise InvalidArgumentError(f"{name}: pattern {pattern} needs it, on rank {workspace.rank}")


# Former functions by name.
_before: dict[str, Any] = {}


def install() -> None:
    """Puts this module's functions in place of FlashInfer's, also where modules have imported them
    already. You must call this before workspaces are made. Raises UnsupportedError where `flashinfer.comm`
    cannot be imported or lacks them: engines look for it before they fuse."""
    if _before:
        return
    try:
        module = importlib.import_module(REPLACES)
    except ImportError as why:
        raise UnsupportedError(
            f"{REPLACES} cannot be imported ({why}); engines only fuse where it is installed: pip install "
            "flashinfer-python"
        ) from why
    if missing := [name for name in FUNCTIONS if not hasattr(module, name)]:
        raise UnsupportedError(f"{REPLACES} has no {missing[0]}; FlashInfer 0.6 and newer have it")
    for name in FUNCTIONS:
        _before[name] = getattr(module, name)
        core.rebind(_before[name], globals()[name], but=__name__)


def is_installed() -> bool:
    """Whether this module's functions are in place of FlashInfer's."""
    return bool(_before)


def uninstall() -> None:
    """Gives FlashInfer its functions back."""
    for name, function in _before.items():
        core.rebind(globals()[name], function, but=__name__)
    _before.clear()
