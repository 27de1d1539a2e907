"""Rows have the same bits alone and in batches, in the calls that engines make of the adapters: what engines
call batch invariance. docs/recipes/equal_bits.md tells of it."""

import torch
import torch.distributed as dist
from ranks import values
from test_torch_distributed import begin
from test_torch_engine_nccl import PyNcclCommunicator, never

from symmpool.engines import CustomAllreduce, flashinfer_comm
from symmpool.engines.nccl_communicator import derived
from symmpool.plugins.vllm_cpu import VllmCollectives

PATTERN = flashinfer_comm.AllReduceFusionPattern
HIDDEN = 256
# The first row is the same in each batch; the largest goes in pieces.
BATCHES = (1, 2, 3, 7, 64, 257, 4096)


def rows(me, count, dtype):
    """Rows whose sum depends on the order of its terms, the first ones the same in every batch."""
    chance = torch.Generator().manual_seed(1000 + me)
    return (torch.randn(max(BATCHES), HIDDEN, generator=chance) * 10 ** (me % 3)).to(dtype)[:count].clone()


def calls(me, world, dtype):
    """The adapters' calls by name: from rows to the tensors that come of them."""
    group = dist.group.WORLD
    # With no limit of size, as where vLLM's VLLM_BATCH_INVARIANT is set.
    custom = CustomAllreduce(group, torch.device("cpu"), max_size=1 << 40)
    collectives = VllmCollectives(group)
    workspace = flashinfer_comm.create_allreduce_fusion_workspace("trtllm", world, me, dtype=dtype)
    nccl = derived(PyNcclCommunicator, False, never)(group, torch.device("cpu"))
    weight = torch.linspace(0.5, 2, HIDDEN).to(dtype)

    def scattered(x):
        # The first rank has all rows of the sum, and gives them to the others.
        part = x.new_empty((len(x) if me == 0 else 0, HIDDEN))
        nccl.reduce_scatterv(part, x, [len(x)] + [0] * (world - 1))
        rows = part if me == 0 else torch.empty_like(x)
        nccl.broadcast(rows, 0)
        return [rows]

    def reduced(x):
        # So vLLM's batch-invariant mode begins a reduce-scatter.
        rows = torch.empty_like(x)
        nccl.reduce(rows, x, root=1)
        nccl.broadcast(rows, 1)
        return [rows]

    def in_place(x):
        collectives.all_reduce(x)
        return [x]

    def norm(one_shot):
        def call(x):
            residual = torch.linspace(-1, 1, HIDDEN).to(dtype).repeat(len(x), 1)
            out, rest = torch.empty_like(x), torch.empty_like(x)
            flashinfer_comm.allreduce_fusion(
                x, workspace, PATTERN.kARResidualRMSNorm, norm_out=out, residual_out=rest,
                residual_in=residual, rms_gamma=weight, use_oneshot=one_shot,
            )  # fmt: skip
            return [out, rest]

        return call

    return {
        "CustomAllreduce": lambda x: [custom.custom_all_reduce(x)],
        "vLLM on the CPU": in_place,
        "PyNcclCommunicator": lambda x: [nccl.all_reduce(x)],
        "PyNcclCommunicator's reduce_scatterv": scattered,
        "PyNcclCommunicator's reduce": reduced,
        "FlashInfer's sum": lambda x: [flashinfer_comm.allreduce_fusion(x, workspace, PATTERN.kAllReduce)],
        "FlashInfer's norm": norm(None),
        "FlashInfer's norm, one shot": norm(True),
        "FlashInfer's norm, two shots": norm(False),
    }


def bits(group, folder):
    me, world = begin(group, folder)
    wrong, sums = [], {}
    for dtype in (torch.bfloat16, torch.float32):
        for name, call in calls(me, world, dtype).items():
            alone = [each.clone() for each in call(rows(me, 1, dtype))]
            sums.setdefault(dtype, {})[name] = alone[0] if "norm" not in name else None
            for batch in BATCHES[1:]:
                for one, many in zip(alone, call(rows(me, batch, dtype)), strict=True):
                    if not torch.equal(one.view(torch.uint8), many[:1].contiguous().view(torch.uint8)):
                        wrong.append((name, str(dtype), batch))
        # All ways of making a sum give one.
        first, *others = [each for each in sums[dtype].values() if each is not None]
        wrong += [("sums differ", str(dtype)) for each in others if not torch.equal(first, each)]
        # In another order they are others, or the test could not fail.
        parts = [rows(rank, 1, torch.float32) for rank in range(world)]
        if dtype == torch.float32 and torch.equal(
            parts[2] + parts[1] + parts[0], parts[0] + parts[1] + parts[2]
        ):
            wrong.append("the order of terms does not matter")
    dist.destroy_process_group()
    return wrong


def test_a_row_has_the_same_bits_alone_and_in_any_batch(tmp_path):
    assert values(3, bits, str(tmp_path)) == [[]] * 3
