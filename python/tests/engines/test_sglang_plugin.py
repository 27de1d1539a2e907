"""SGLang's own groups on ranks of the CPU, with the plug-in of the installed package, which SGLang's own
loader finds. Its server needs kernels that are no package."""

import os

import pytest
import torch
import torch.distributed as dist
from ranks import values


def groups(group, folder, mode):
    """Begins as a worker of SGLang does. Returns the backend's name, and what went otherwise than it
    should."""
    os.environ["SYMMPOOL_ENGINES"] = mode
    me, world = group.rank, group.world
    from sglang.srt.plugins import load_plugins

    load_plugins()
    load_plugins()
    from sglang.srt.distributed import parallel_state

    parallel_state.init_distributed_environment(
        backend="gloo",
        world_size=world,
        rank=me,
        local_rank=me,
        distributed_init_method=f"file://{folder}/meeting-{mode}",
        timeout=60,
    )
    made = parallel_state.init_model_parallel_group(
        [list(range(world))],
        local_rank=me,
        backend=dist.get_backend(parallel_state.get_world_group().device_group),
        use_pynccl=False,
        use_custom_allreduce=False,
        group_name="tp",
    )
    wrong = []
    total = [[world * (world + 1) / 2] * 8] * 3
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.full((3, 8), me + 1.0, dtype=dtype)
        if made.all_reduce(x).tolist() != total:
            wrong.append(("all_reduce", dtype))
        every = made.all_gather(torch.full((2, 4), float(me), dtype=dtype), dim=0)
        if every[:, 0].tolist() != [float(rank) for rank in range(world) for _ in range(2)]:
            wrong.append(("all_gather", dtype))
        part = torch.empty(2, 4, dtype=dtype)
        # SGLang's own method has no form for CPUs.
        whole = torch.full((2 * world, 4), me + 1.0, dtype=dtype)
        dist.reduce_scatter_tensor(part, whole, group=made.device_group)
        if part.tolist() != [[world * (world + 1) / 2] * 4] * 2:
            wrong.append(("reduce_scatter", dtype))
    sent = made.broadcast(torch.full((4,), float(me)), src=1)
    if sent.tolist() != [1.0] * 4:
        wrong.append("broadcast")
    if made.broadcast_object({"from": me} if me == 0 else None, src=0) != {"from": 0}:
        wrong.append("broadcast_object")
    backend = dist.get_backend(made.device_group)
    dist.destroy_process_group()
    return backend, wrong


@pytest.mark.parametrize(("mode", "backend"), [("on", "symmpool"), ("off", "gloo")])
def test_sglangs_groups_are_on_our_backend_unless_it_is_turned_off(tmp_path, mode, backend):
    assert values(2, groups, str(tmp_path), mode) == [(backend, [])] * 2


def captured_calls(group, folder):
    """Calls what SGLang's groups ask NCCL: in captures, and for unequal parts. The device is the CPU, where
    SGLang's own switch of its communicator plays a capture. Returns what went otherwise than it should."""
    os.environ["SYMMPOOL_ENGINES"] = "on"
    me, world = group.rank, group.world
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.distributed import parallel_state
    from sglang.srt.distributed.device_communicators import pynccl

    from symmpool.engines import sglang

    theirs = pynccl.PyNcclCommunicator
    sglang.install()
    sglang.install_nccl_communicator()
    parallel_state.init_distributed_environment(
        backend="gloo",
        world_size=world,
        rank=me,
        local_rank=me,
        distributed_init_method=f"file://{folder}/meeting",
        timeout=60,
    )
    made = parallel_state.init_model_parallel_group(
        [list(range(world))],
        local_rank=me,
        backend="symmpool",
        use_pynccl=True,
        use_custom_allreduce=False,
        group_name="tp",
    )
    nccl, wrong = made.pynccl_comm, []
    if not isinstance(nccl, theirs) or type(nccl) is theirs or not nccl.available or not nccl.disabled:
        wrong.append(("class", type(nccl)))
    sizes = [1, 3]
    every = torch.arange(16.0).reshape(4, 4)
    mine = every[[slice(0, 1), slice(1, 4)][me]]
    for found in (made.all_gatherv(mine, sizes)[0], *made.all_gatherv([mine, mine], sizes)):
        if not torch.equal(found, every):
            wrong.append(("all_gatherv", found.tolist()))
    if not torch.equal(made.reduce_scatterv(every * (me + 1), sizes=sizes), mine * 3):
        wrong.append("reduce_scatterv")
    with nccl.change_state(enable=True):
        x = torch.full((2, 4), me + 1.0)
        if made._all_reduce_in_place(x) is not None or x.tolist() != [[3.0] * 4] * 2:
            wrong.append(("all_reduce", x.tolist()))
        gathered, part = torch.empty(2 * world, 4), torch.empty(1, 4)
        made._all_gather_into_tensor(gathered, torch.full((2, 4), float(me)))
        if gathered[:, 0].tolist() != [0.0, 0.0, 1.0, 1.0]:
            wrong.append(("all_gather", gathered.tolist()))
        made._reduce_scatter_tensor(part, torch.full((world, 4), me + 1.0))
        if part.tolist() != [[3.0] * 4]:
            wrong.append(("reduce_scatter", part.tolist()))
        if made.broadcast(torch.full((4,), float(me)), src=1).tolist() != [1.0] * 4:
            wrong.append("broadcast")
        if me == 0:
            made.send(every, 1)
        elif not torch.equal(made.recv(every.shape, every.dtype, 0), every):
            wrong.append("recv")
    dist.destroy_process_group()
    return wrong


def test_what_sglangs_groups_ask_nccl_is_ours(tmp_path):
    assert values(2, captured_calls, str(tmp_path)) == [[]] * 2
