"""vLLM's own `CudaCommunicator` on ranks of the CPU, with our classes for NCCL and `CustomAllreduce`.
What stands in for a GPU: the device is the CPU, and FlashInfer's all-reduces find that there is no CUDA."""

import os

import pytest
import torch
import torch.distributed as dist
from ranks import values
from test_torch_distributed import begin

WORLD = 3


def rows(rank, count, columns=4):
    return torch.arange(count * columns, dtype=torch.float32).reshape(count, columns) + 100 * rank


def communicator(group, folder, custom):
    """Makes vLLM's communicator of a tensor-parallel group and calls all of its collectives. Returns what
    went otherwise than it should."""
    os.environ["VLLM_ALLREDUCE_USE_SYMM_MEM"] = "0"
    from vllm.distributed import parallel_state
    from vllm.distributed.device_communicators import pynccl
    from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator

    from symmpool.engines import CustomAllreduce, vllm

    theirs = pynccl.PyNcclCommunicator
    vllm.install_nccl_communicator()
    vllm.install_nccl_communicator()
    vllm.install_custom_allreduce()
    me, world = begin(group, folder)
    parallel_state._ENABLE_CUSTOM_ALL_REDUCE = custom
    cpu_group = dist.new_group(backend="gloo")
    ours = dist.new_group(backend="symmpool")
    made = CudaCommunicator(cpu_group, torch.device("cpu"), ours, "tp:0")
    wrong = []

    def check(what, found, expected):
        if not torch.equal(found, expected):
            wrong.append((what, found.tolist(), expected.tolist()))

    nccl = made.pynccl_comm
    if not isinstance(nccl, theirs) or type(nccl) is theirs or nccl.disabled:
        wrong.append(("class", type(nccl)))
    if custom != isinstance(made.ca_comm, CustomAllreduce):
        wrong.append(("custom", made.ca_comm))
    mine, every = rows(me, 6), [rows(rank, 6) for rank in range(world)]
    total = sum(every)
    check("all_reduce", made.all_reduce(mine.clone()), total)
    if nccl.all_reduce(mine).data_ptr() == mine.data_ptr():
        wrong.append("all_reduce is in place")
    check("all_gather", made.all_gather(mine, 0), torch.cat(every))
    check("all_gather of columns", made.all_gather(mine, -1), torch.cat(every, 1))
    check("reduce_scatter", made.reduce_scatter(mine, 0), total[2 * me : 2 * me + 2])
    # Unequal parts, one of them empty, as ranks of experts have.
    sizes = [1, 0, 5]
    begins = [0, 1, 1]
    part = slice(begins[me], begins[me] + sizes[me])
    check("reduce_scatterv", made.reduce_scatterv(mine, 0, sizes), total[part])
    gathered = torch.cat([each[: sizes[rank]] for rank, each in enumerate(every)])
    check("all_gatherv", made.all_gatherv(mine[: sizes[me]], 0, sizes), gathered)
    several = made.all_gatherv([mine[: sizes[me]], mine[: sizes[me], :1].contiguous()], 0, sizes)
    check("all_gatherv, first", several[0], gathered)
    check("all_gatherv, second", several[1], gathered[:, :1])
    check("broadcast", made.broadcast(mine.clone(), 1), every[1])
    # A ring, in which all send first.
    if me == 0:
        made.send(mine, 1)
        check("recv", made.recv(mine.shape, mine.dtype, world - 1), every[world - 1])
    else:
        check("recv", made.recv(mine.shape, mine.dtype, me - 1), every[me - 1])
        made.send(mine, (me + 1) % world)
    into = torch.empty_like(mine)
    ring = [
        dist.P2POp(dist.isend, mine, group=cpu_group, group_peer=(me + 1) % world),
        dist.P2POp(dist.irecv, into, group=cpu_group, group_peer=(me - 1) % world),
    ]
    made.batch_isend_irecv(ring)
    check("batch_isend_irecv", into, every[me - 1])
    # Weights of experts that move, as vLLM's balancing of their load has them.
    from vllm.distributed.eplb.eplb_communicator import PyNcclEplbCommunicator, TorchDistNcclEplbCommunicator

    for eplb in (PyNcclEplbCommunicator(nccl), TorchDistNcclEplbCommunicator(ours)):
        into = [torch.empty_like(mine), torch.empty(6, 1)]
        eplb.add_send([mine, mine[:, :1].contiguous()], (me + 1) % world, 0)
        eplb.add_recv(into, (me - 1) % world, 0)
        eplb.execute()
        check(f"{type(eplb).__name__}, first", into[0], every[me - 1])
        check(f"{type(eplb).__name__}, second", into[1], every[me - 1][:, :1])
    # Parts of a reduce-scatter in vLLM's batch-invariant mode.
    reduced, mine_of_it = torch.full_like(mine, -1), torch.empty(sizes[me], 4)
    nccl.reduce(reduced, mine, root=1)
    check("reduce", reduced, total if me == 1 else torch.full_like(mine, -1))
    nccl.scatter(mine_of_it, reduced, sizes, root=1)
    check("scatter", mine_of_it, total[part])
    # Sleep with `enable_nccl_comm_suspend`: the calls are served before and after.
    made.suspend()
    made.resume()
    check("all_reduce after sleep", made.all_reduce(mine.clone()), total)
    with pytest.raises(NotImplementedError, match=f"register_comm_window on rank {me}.*SYMMPOOL_ENGINES=off"):
        nccl.register_comm_window(mine)
    made.destroy()
    if not nccl.disabled or nccl.all_reduce(mine) is not None:
        wrong.append("destroyed")
    dist.destroy_process_group()
    return wrong


@pytest.mark.parametrize("custom", [True, False])
def test_vllms_communicator_of_gpus_makes_its_calls_by_ours(tmp_path, custom):
    assert values(WORLD, communicator, str(tmp_path), custom) == [[]] * WORLD


def left_to_nccl(group, folder):
    """Returns the classes of communicators that stay NCCL's. vLLM is told that there is no NCCL here, as it
    needs a GPU, so these are disabled."""
    from vllm.distributed.device_communicators import pynccl
    from vllm.distributed.utils import StatelessProcessGroup
    from vllm.utils.network_utils import get_open_port

    from symmpool.engines import vllm

    def no_library(path):
        raise OSError(path)

    pynccl.NCCLLibrary, theirs = no_library, pynccl.PyNcclCommunicator
    vllm.install_nccl_communicator()
    me, world = begin(group, folder)
    kind, made = pynccl.PyNcclCommunicator, []
    alone = [dist.new_group([rank], backend="gloo") for rank in range(world)][me]
    made.append(kind(alone, torch.device("cpu")))
    # Groups of other programs with the engine's workers, in which no plug-in is.
    port = [get_open_port()]
    dist.broadcast_object_list(port, 0)
    made.append(kind(StatelessProcessGroup.create("127.0.0.1", port[0], me, world), torch.device("cpu")))
    for variable in ("VLLM_USE_NCCL_SYMM_MEM", "VLLM_DISABLE_PYNCCL"):
        os.environ[variable] = "1"
        made.append(kind(dist.new_group(backend="gloo"), torch.device("cpu")))
        del os.environ[variable]
    dist.destroy_process_group()
    return [(type(each) is theirs, each.disabled) for each in made]


def test_what_needs_nccl_stays_nccls(tmp_path):
    assert values(2, left_to_nccl, str(tmp_path)) == [[(True, True)] * 4] * 2
