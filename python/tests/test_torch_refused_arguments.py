"""Arguments of experts and fused calls that are refused, and what their errors say."""

import pytest
import torch

import symmpool
from symmpool import experts, fused


@pytest.fixture
def pool():
    (group,) = symmpool.Group.in_process(1)
    return symmpool.Pool(group, "cpu")


@pytest.mark.parametrize("wrong", [5, 1.5, [], {}, set()])
def test_what_is_no_group_is_named_by_every_door(pool, wrong):
    for door in (
        lambda: experts.ExpertBuffer(wrong, hidden=128, experts=2, top_k=1, max_tokens=4),
        lambda: symmpool.all_reduce(torch.ones(3), group=wrong),
        lambda: symmpool.communicator(wrong),
        lambda: symmpool.Pool(wrong, "cpu"),
    ):
        with pytest.raises(symmpool.InvalidArgumentError, match="group: .* no "):
            door()


def test_scales_that_no_call_would_write_are_refused(pool):
    buffer = experts.ExpertBuffer(pool, hidden=128, experts=2, top_k=1, max_tokens=4)
    x, ids = torch.ones(4, 128, dtype=torch.bfloat16), torch.zeros(4, 1, dtype=torch.int64)
    for wrong, kind in ((torch.empty(8, 1), symmpool.InvalidArgumentError), (5, TypeError)):
        with pytest.raises(kind, match="out_scales"):
            buffer.dispatch(x, ids, layout="expert", out_scales=wrong)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", ["fp8_per_token", "fp8_per_group", "fp8_static"])
def test_scales_that_require_grad_are_refused_where_autograd_is_on(pool, kind, compiled):
    x, weight = torch.ones(4, 128), torch.ones(128)
    scale = torch.ones((1,) if kind == "fp8_static" else (4, 1), requires_grad=True)

    def call():
        quant = getattr(fused, kind)(scale)
        return fused.all_reduce_rms_norm(x, x, weight, quant=quant, group=pool).out

    run = torch.compile(call, backend="aot_eager") if compiled else call
    with pytest.raises(Exception, match="quant: scale requires grad"):
        run()
    if not compiled:
        with torch.no_grad():
            assert call().shape == x.shape
