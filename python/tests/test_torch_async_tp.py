"""Cases of torch's tests of asynchronous tensor parallelism, with our operators in place of torch's."""

import torch
import torch.distributed as dist
from async_tp import Cases
from micro_pipeline import Programs, by_the_pass
from ranks import values
from test_torch_distributed import begin

import symmpool
from symmpool import fused


def started(group, folder):
    begin(group, folder)
    pool = symmpool.Pool(device="cpu")
    fused.install()
    return pool


def has_scaled():
    """Whether this processor has products of 8-bit floats."""
    one = torch.ones(())
    try:
        torch._scaled_mm(*[torch.ones(16, 16).to(torch.float8_e4m3fn).t()] * 2, one, one)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def operators(group, folder):
    pool = started(group, folder)
    cases = Cases(torch.device("cpu"))
    cases.gathers()
    cases.scatters()
    cases.layouts()
    if has_scaled():
        cases.scaled_gathers()
        cases.scaled_scatters()
    assert pool.world == dist.get_world_size()
    fused.uninstall()
    dist.destroy_process_group()
    return cases.count >= 50, cases.wrong


def test_operators_are_as_exact_as_separate_ones(tmp_path):
    assert values(2, operators, str(tmp_path), limit=200) == [(True, [])] * 2


def programs(group, folder):
    pool = started(group, folder)
    cases = Programs(torch.device("cpu"), by_the_pass, has_scaled())
    cases.gathers()
    cases.scatters()
    cases.scaled()
    cases.sequence_parallel()
    assert pool.world == dist.get_world_size()
    fused.uninstall()
    dist.destroy_process_group()
    return cases.count > 0, cases.wrong


def test_compiled_programs_have_fused_matmuls(tmp_path):
    assert values(2, programs, str(tmp_path), limit=200) == [(True, [])] * 2


def two_groups(group, folder):
    me, _ = begin(group, folder)
    pairs = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
    of_products, other = (
        next(each for each, ranks in [(dist.new_group(ranks), ranks) for ranks in pair] if me in ranks)
        for pair in pairs
    )
    pool = symmpool.Pool(of_products, device="cpu")
    fused.install()
    cases = Programs(torch.device("cpu"), by_the_pass, False)
    cases.other_groups(of_products, other)
    assert pool.world == 2
    fused.uninstall()
    dist.destroy_process_group()
    return cases.wrong


def test_collectives_of_other_groups_stay(tmp_path):
    assert values(4, two_groups, str(tmp_path), limit=200) == [[]] * 4
