"""`symmpool.engines.flashinfer_comm` on ranks of the CPU, called as vLLM and SGLang call FlashInfer."""

import sys
import types

import pytest
import torch
import torch.distributed as dist
from ranks import values
from test_torch_distributed import begin
from test_torch_fused import near, numbers, same_everywhere, unfused

from symmpool import fused
from symmpool.engines import flashinfer_comm as comm
from symmpool.errors import DivergedError, InvalidArgumentError, InvalidStateError, UnsupportedError

FP8 = torch.float8_e4m3fn
PATTERN = comm.AllReduceFusionPattern


class TorchDistBackend:
    """Stand-in for FlashInfer's class, which vLLM makes of its group."""

    def __init__(self, group):
        self._group = group


def inputs(me, tokens, hidden, dtype=torch.bfloat16):
    x = numbers((tokens, hidden), 31 * hidden + me, dtype)
    return x, numbers((tokens, hidden), hidden, dtype), numbers((hidden,), hidden + 1, dtype)


def of_vllm(group, folder):
    """Calls as `call_trtllm_fused_allreduce_norm` of vLLM's pass does, and its all-reduce alone."""
    me, world = begin(group, folder)
    cpu_group = dist.new_group(backend="gloo")
    workspace = comm.create_allreduce_fusion_workspace(
        backend="trtllm",
        world_size=world,
        rank=me,
        max_token_num=1024,
        hidden_dim=256,
        dtype=torch.bfloat16,
        comm_backend=TorchDistBackend(cpu_group),
        group=cpu_group,
    )
    wrong = []
    if workspace.backend != "trtllm":
        wrong.append("backend")

    def call(x, residual, weight, pattern, norm_out=None, **more):
        residual_out = residual if norm_out is None else x
        return comm.allreduce_fusion(
            input=x,
            workspace=workspace,
            pattern=pattern,
            launch_with_pdl=True,
            output=None,
            residual_out=residual_out,
            norm_out=x if norm_out is None else norm_out,
            residual_in=residual,
            rms_gamma=weight,
            rms_eps=1e-5,
            layout_code=0,
            fp32_acc=True,
            trigger_completion_at_end=False,
            **more,
        )

    for tokens in (1, 9):
        for one_shot in (True, False, None):
            x, residual, weight = inputs(me, tokens, 256)
            total, norm = unfused(x, residual, weight, 1e-5)
            # In place of the inputs.
            y, rest = x.clone(), residual.clone()
            made = call(y, rest, weight, PATTERN.kARResidualRMSNorm, use_oneshot=one_shot)
            right = made is y and torch.equal(rest, total) and near(y, norm, x.dtype)
            # Without a residual: zeros, and the sum takes the place of the input.
            y, out = x.clone(), torch.empty_like(x)
            call(y, torch.zeros_like(x), weight, PATTERN.kARResidualRMSNorm, out, use_oneshot=one_shot)
            summed, normed = unfused(x, None, weight, 1e-5)
            right = right and torch.equal(y, summed) and near(out, normed, x.dtype)
            if not right or not same_everywhere(y, out):
                wrong.append(("norm", tokens, one_shot))
        scale = torch.tensor([0.03])
        for pattern, gives_norm in (
            (PATTERN.kARResidualRMSNormFP8Quant, False),
            (PATTERN.kARResidualRMSNormOutFP8Quant, True),
        ):
            x, residual, weight = inputs(me, tokens, 256)
            total, norm = unfused(x, residual, weight, 1e-5)
            wanted = fused.all_reduce_rms_norm(x, residual, weight, 1e-5, quant=fused.fp8_static(scale))
            y, rest, quantized = x.clone(), residual.clone(), torch.empty_like(x, dtype=FP8)
            made = call(y, rest, weight, pattern, quant_out=quantized, scale_factor=scale, weight_bias=0.0)
            right = made is (y if gives_norm else quantized)
            right = right and torch.equal(quantized.float(), wanted.out.float())
            right = right and torch.equal(rest, total)
            right = right and (near(y, norm, x.dtype) if gives_norm else torch.equal(y, x))
            if not right:
                wrong.append(("static", pattern, tokens))
    # A number for a scale, whatever torch's default type is. Another backend gives 8-bit floats.
    torch.set_default_dtype(torch.float64)
    of_mnnvl = comm.create_allreduce_fusion_workspace("mnnvl", group=cpu_group)
    quantized = torch.empty_like(x, dtype=FP8)
    given = {"residual_out": rest, "norm_out": torch.empty_like(x), "quant_out": quantized}
    given |= {"residual_in": residual, "rms_gamma": weight, "rms_eps": 1e-5, "scale_factor": 0.03}
    made = comm.allreduce_fusion(x, of_mnnvl, PATTERN.kARResidualRMSNormOutFP8Quant, **given)
    torch.set_default_dtype(torch.float32)
    if made is not quantized or not torch.equal(quantized.float(), wanted.out.float()):
        wrong.append("a number for a scale")
    x, _, _ = inputs(me, 5, 256)
    total = comm.allreduce_fusion(
        input=x, workspace=workspace, pattern=PATTERN.kAllReduce, launch_with_pdl=True
    )
    if not torch.equal(total, unfused(x, None, torch.ones(256), 0)[0]) or total is x:
        wrong.append("all-reduce")
    workspace.destroy()
    with pytest.raises(InvalidStateError, match="destroyed"):
        comm.allreduce_fusion(input=x, workspace=workspace, pattern=PATTERN.kAllReduce)
    dist.destroy_process_group()
    return wrong


def test_calls_of_vllm_are_served(tmp_path):
    assert values(2, of_vllm, str(tmp_path)) == [[]] * 2


def of_sglang(group, folder):
    """Calls as SGLang's workspace manager and `flashinfer_allreduce_residual_rmsnorm` do, on a part of the
    ranks."""
    me, _ = begin(group, folder)
    parts = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    part = parts[me // 2]
    backend = types.SimpleNamespace(_cpu_group=part)
    workspace = comm.create_allreduce_fusion_workspace(
        backend="auto",
        world_size=2,
        rank=me % 2,
        max_token_num=2048,
        hidden_dim=512,
        dtype=torch.bfloat16,
        gpus_per_node=2,
        comm_backend=backend,
        force_oneshot_support=True,
        use_fp32_lamport=True,
    )
    wrong = []
    fits = {"tp_size": 2, "num_tokens": 1 << 20, "hidden_dim": 512, "dtype": torch.bfloat16}
    if not workspace.is_buffer_size_sufficient(**fits, use_oneshot=None):
        wrong.append("size")
    for change in ({"tp_size": 4}, {"hidden_dim": 12}, {"dtype": torch.float64}):
        if workspace.is_buffer_size_sufficient(**{**fits, **change}):
            wrong.append(change)
    x, residual, weight = inputs(me, 3, 512)
    every = [torch.empty_like(x) for _ in range(2)]
    dist.all_gather(every, x, group=part)
    residual_out, norm_out = torch.empty_like(residual), torch.empty_like(x)
    comm.allreduce_fusion(
        input=x,
        workspace=workspace,
        pattern=PATTERN.kARResidualRMSNorm,
        launch_with_pdl=True,
        trigger_completion_at_end=False,
        residual_out=residual_out,
        norm_out=norm_out,
        residual_in=residual,
        rms_gamma=weight,
        rms_eps=1e-6,
        use_oneshot=None,
        fp32_acc=False,
    )
    if not torch.equal(residual_out, (every[0].float() + every[1].float()).bfloat16() + residual):
        wrong.append("sum")
    # A scale for each token.
    quantized, scales = torch.empty_like(x, dtype=FP8), torch.empty(3, 1)
    comm.allreduce_fusion(
        input=x,
        workspace=workspace,
        pattern=PATTERN.kARResidualRMSNormDynamicFP8Quant,
        residual_out=residual_out,
        quant_out=quantized,
        scale_out=scales,
        residual_in=residual,
        rms_gamma=weight,
    )
    if not torch.allclose(quantized.float() * scales, norm_out.float(), rtol=0.07, atol=0.01):
        wrong.append("dynamic")
    dist.destroy_process_group()
    return wrong


def test_calls_of_sglang_are_served(tmp_path):
    assert values(4, of_sglang, str(tmp_path)) == [[]] * 4


def refused(group, folder):
    me, world = begin(group, folder)
    workspace = comm.create_allreduce_fusion_workspace(world_size=world, rank=me)
    x, residual, weight = inputs(me, 3, 64)
    whole = {"residual_in": residual, "rms_gamma": weight}

    def call(pattern=PATTERN.kARResidualRMSNorm, tensor=x, of=workspace, **more):
        return comm.allreduce_fusion(input=tensor, workspace=of, pattern=pattern, **more)

    static = PATTERN.kARResidualRMSNormFP8Quant
    for error, words, arguments in (
        (UnsupportedError, "pattern: 3", {"pattern": 3, **whole}),
        (InvalidArgumentError, "residual_in", {"rms_gamma": weight}),
        (InvalidArgumentError, "rms_gamma", {"residual_in": residual}),
        (InvalidArgumentError, "quant_out", {"pattern": static, **whole}),
        (InvalidArgumentError, "scale_factor", {"pattern": static, "quant_out": x.to(FP8), **whole}),
        (InvalidArgumentError, "install", {"of": object(), **whole}),
    ):
        with pytest.raises(error, match=words):
            call(**arguments)
    with pytest.raises(InvalidArgumentError, match="world_size: 7"):
        comm.create_allreduce_fusion_workspace(world_size=7)
    with pytest.raises(InvalidArgumentError, match="comm_backend: object"):
        comm.create_allreduce_fusion_workspace(comm_backend=object())
    # The other ranks hear why a tensor is refused, as with any call.
    bad = residual[:, ::2] if me == 0 else residual
    with pytest.raises((InvalidArgumentError, DivergedError), match="residual|rank 0"):
        call(residual_in=bad, rms_gamma=weight)
    dist.destroy_process_group()
    return True


def test_nonsense_is_refused_by_name(tmp_path):
    assert values(2, refused, str(tmp_path)) == [True] * 2


@pytest.fixture
def flashinfer(monkeypatch):
    """A stand-in for FlashInfer, and a module of an engine that has imported one of its functions."""
    package, module = types.ModuleType("flashinfer"), types.ModuleType("flashinfer.comm")
    engine = types.ModuleType("engine_of_a_test")
    for name in comm.FUNCTIONS:
        setattr(module, name, types.FunctionType((lambda: None).__code__, {}, name))
    package.comm, engine.make = module, module.create_allreduce_fusion_workspace
    for each in (package, module, engine):
        monkeypatch.setitem(sys.modules, each.__name__, each)
    yield module, engine
    comm.uninstall()


def test_installed_functions_take_the_place_of_flashinfers(flashinfer):
    module, engine = flashinfer
    before = module.allreduce_fusion, module.create_allreduce_fusion_workspace
    comm.install()
    comm.install()
    assert module.allreduce_fusion is comm.allreduce_fusion
    assert engine.make is module.create_allreduce_fusion_workspace is comm.create_allreduce_fusion_workspace
    comm.uninstall()
    assert (module.allreduce_fusion, engine.make) == before


def test_without_flashinfer_it_is_said_what_is_missing(monkeypatch, flashinfer):
    del flashinfer[0].allreduce_fusion
    with pytest.raises(UnsupportedError, match="allreduce_fusion"):
        comm.install()
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    monkeypatch.delitem(sys.modules, "flashinfer.comm")
    with pytest.raises(UnsupportedError, match="pip install"):
        comm.install()
