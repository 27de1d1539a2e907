"""Memory that torch asks a group's backend for lies in windows."""

import pytest
import torch
import torch.distributed as dist
from ranks import values
from test_torch_distributed import begin

import symmpool
from symmpool.communicators import cache
from symmpool.groups.process_groups import ours
from symmpool.torch_backend import allocation
from symmpool.torch_backend.registration import has_python_backends

CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(
    not hasattr(dist.ProcessGroupGloo, "allocate_tensor"), reason="torch before 2.8 asks nobody"
)


def asked(group, folder):
    me, world = begin(group, folder, "symmpool")
    backend = dist.group.WORLD._get_backend(CPU)
    found = {"before": backend.supports_tensor_alloc(CPU)}
    # The group's first call, which makes its pool.
    out = backend.allocate_tensor(1000 * world, dtype=torch.bfloat16, device=CPU)
    pool = cache.pool_of(None, -1)
    found["shape"] = (tuple(out.shape), out.dtype, pool.holds(out))
    dist.all_gather_into_tensor(out, torch.full((1000,), me + 1.0, dtype=torch.bfloat16))
    found["sums"] = [part.float().mean().item() for part in out.chunk(world)]
    # It is at one place on all ranks.
    peers = symmpool.rendezvous(out).get_buffer(1 - me, out.shape, out.dtype)
    found["peers"] = torch.equal(peers, out)
    dist.barrier()
    nothing = backend.allocate_tensor(0, dtype=torch.float32, device=CPU)
    found["nothing"] = tuple(nothing.shape)
    # Tensors that are let go of come back, so that steps do not take more and more.
    del out, nothing, peers
    sizes = []
    for _ in range(150):
        x = backend.allocate_tensor(1 << 20, dtype=torch.float32, device="cpu")
        dist.all_reduce(x.fill_(1))
        assert x[0] == world
        del x
        sizes.append(pool.stats()["reserved"])
    found["grown"] = sizes[-1] - sizes[80]
    # Another pool on the group changes nothing, however the first one was found before.
    other = symmpool.Pool(device="cpu")
    x = backend.allocate_tensor(10, dtype=torch.float32, device=CPU)
    found["first"] = (pool.holds(x), other.holds(x))
    del x, other
    dist.destroy_process_group()
    found["after"] = backend.supports_tensor_alloc(CPU)
    return found


def test_a_backends_tensors_are_windows_at_one_place(tmp_path):
    right = {
        "before": True,
        "shape": ((2000,), torch.bfloat16, True),
        "sums": [1.0, 2.0],
        "peers": True,
        "nothing": (0,),
        "grown": 0,
        "first": (True, False),
        "after": False,
    }
    assert values(2, asked, str(tmp_path)) == [right] * 2


def elsewhere(group, folder):
    begin(group, folder, "cuda:symmpool,cpu:gloo")
    backend = dist.group.WORLD._get_backend(CPU)
    made = ours(dist.group.WORLD)
    found = [backend.supports_tensor_alloc(CPU), made is not None and allocation.has_windows(made, CPU)]
    # Where the group is torch's own, so is gloo, which allocates nothing.
    given = {"dtype": torch.int32, "device": CPU}
    x = torch.empty(10, **given) if has_python_backends() else backend.allocate_tensor(10, **given)
    dist.all_reduce(x.fill_(1))
    dist.destroy_process_group()
    return [*found, x.tolist()]


def test_where_ours_is_not_asked_for_memory_is_ordinary(tmp_path):
    assert values(2, elsewhere, str(tmp_path)) == [[False, False, [2] * 10]] * 2
