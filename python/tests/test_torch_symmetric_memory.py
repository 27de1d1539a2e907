"""torch's own names for symmetric memory on pools, between processes on the CPU."""

import datetime
import gc

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from ranks import run, values
from test_torch_distributed import begin
from torch._C._distributed_c10d import _SymmetricMemory

import symmpool
from symmpool import symmetric_memory
from symmpool.symmetric_memory import operators

SHORT = datetime.timedelta(seconds=2)


def installed(group, folder, **options):
    found = begin(group, folder, **options)
    symmetric_memory.install()
    symmetric_memory.install()
    return found


def by_torchs_names(group, folder):
    me, world = installed(group, folder)
    name = dist.group.WORLD.group_name
    x = symm_mem.empty(4, 8, dtype=torch.float32, device="cpu").fill_(me)
    handle = symm_mem.rendezvous(x, name)
    right = [bool((x == me).all()), x.shape == (4, 8), handle is symm_mem.rendezvous(x, dist.group.WORLD)]
    right.append(handle is _SymmetricMemory.rendezvous(x))
    right.append((handle.rank, handle.world_size, handle.buffer_size, handle.offset) == (me, world, 128, 0))
    right.append(handle.buffer_ptrs[me] == x.data_ptr() and handle.multicast_ptr == 0)
    right.append(handle.signal_pad_size == getattr(_SymmetricMemory, "signal_pad_size", 2048))
    handle.barrier()
    theirs = handle.get_remote_tensor(1 - me, (4, 8), torch.float32)
    right.append(bool((theirs == 1 - me).all()))
    handle.get_buffer(1 - me, (8,), torch.float32, 8).fill_(50 + me)
    handle.barrier(channel=1)
    right.append(x[1].tolist() == [51.0 - me] * 8)
    # One after the other: puts with a signal.
    if me == 0:
        handle.get_remote_tensor(1, (4,), torch.float32).copy_(torch.arange(4.0))
        handle.put_signal(1)
    else:
        handle.wait_signal(0)
        right.append(x[0, :4].tolist() == [0, 1, 2, 3])
    right.append(symm_mem.is_symm_mem_enabled_for_group(name))
    right.append(not symm_mem.is_symm_mem_enabled_for_group("nobody's"))
    right.append(symm_mem.get_backend("cpu") == "symmpool")
    right.append(not _SymmetricMemory.has_multicast_support(None, 0))
    y = _SymmetricMemory.empty_strided_p2p((8,), (1,), torch.float64, torch.device("cpu"), name)
    place, of_y = y.data_ptr(), symm_mem.rendezvous(y, name)
    right.append(y.data_ptr() == place == of_y.buffer_ptrs[me])
    # Tensors whose group is known from the beginning do not move, and may have views.
    with symmetric_memory.group(dist.group.WORLD):
        z = symm_mem.empty((2, 4), dtype=torch.bfloat16, device="cpu")
    part, place = z[1:], z.data_ptr()
    right.append(
        symm_mem.rendezvous(z, name).buffer_ptrs[me] == place == z.data_ptr() and part.shape == (1, 4)
    )
    symm_mem.barrier() if hasattr(symm_mem, "barrier") else dist.barrier()
    symmetric_memory.uninstall()
    right.append(symm_mem.empty.__module__ == symm_mem.__name__)
    dist.destroy_process_group()
    return right


def test_torchs_names_give_memory_of_pools(tmp_path):
    for right in values(2, by_torchs_names, str(tmp_path)):
        assert all(right), right


def test_handles_have_all_names_of_torchs():
    static = {
        "empty_strided_p2p",
        "get_backend",
        "get_mempool_allocator",
        "has_multicast_support",
        "is_symm_mem_tensor",
        "memset32",
        "rendezvous",
        "set_backend",
        "set_group_info",
        "stream_write_value32",
    }
    names = {name for name in dir(_SymmetricMemory) if not name.startswith("_")} - static
    assert not names - set(dir(symmetric_memory.SymmetricMemory))


def groups_of_some(group, folder):
    me, _ = installed(group, folder)
    first, everyone = dist.new_group([0, 1]), dist.group.WORLD
    right = []
    # The last rank has no part in it, before and between (pytorch#196082).
    if me < 2:
        a = symm_mem.empty(64, device="cpu").fill_(me)
        handle = symm_mem.rendezvous(a, first)
        right.append(handle.world_size == 2 and handle.get_remote_tensor(1 - me, (64,), a.dtype)[0] == 1 - me)
    b = symm_mem.empty(64, device="cpu").fill_(me)
    of_all = symm_mem.rendezvous(b, everyone)
    right.append([of_all.get_remote_tensor(rank, (64,), b.dtype)[5].item() for rank in range(3)] == [0, 1, 2])
    # Groups that overlap have pads of their own for one tensor (pytorch#192581): 1 is another rank in each.
    outer = dist.new_group([0, 2])
    if me != 1:
        of_outer = symm_mem.rendezvous(b, outer)
        right.append(of_outer.rank == me // 2 and of_outer.world_size == 2)
        right.append(of_outer.get_remote_tensor(1, (64,), b.dtype)[0].item() == 2)
        right.append(of_outer.buffer_ptrs == [of_all.buffer_ptrs[rank] for rank in (0, 2)])
        right.append(not set(of_outer.signal_pad_ptrs) & set(of_all.signal_pad_ptrs))
        if me == 0:
            of_outer.get_signal_pad(1).fill_(7)
            of_outer.put_signal(1, channel=3)
        else:
            of_outer.wait_signal(0, channel=3)
            right.append(
                of_outer.get_signal_pad(1)[0].item() == 7 and of_all.get_signal_pad(2)[0].item() == 0
            )
            try:
                of_all.wait_signal(0, channel=3, timeout_ms=50)
                right.append(False)
            except symmpool.TimeoutError:
                right.append(True)
    dist.barrier()
    if me < 2:
        # Its group has not all ranks of this one.
        with pytest.raises(symmpool.Error, match="not all ranks of"):
            symm_mem.rendezvous(a, everyone)
    else:
        c = symm_mem.empty(64, device="cpu")
        with pytest.raises(symmpool.DivergedError, match="rank 0 refuses"):
            symm_mem.rendezvous(c, everyone)
    dist.destroy_process_group()
    return right


def test_groups_have_memory_and_pads_of_their_own(tmp_path):
    for right in values(3, groups_of_some, str(tmp_path)):
        assert all(right), right


def operators_of_torch(group, folder):
    me, world = installed(group, folder)
    name, ops = dist.group.WORLD.group_name, torch.ops.symm_mem
    total = sum(range(1, world + 1))

    def fresh():
        x = symm_mem.empty(8, 4, device="cpu").fill_(me + 1)
        symm_mem.rendezvous(x, name)
        return x

    x, plain = fresh(), torch.full((8, 4), me + 1.0)
    right = {"one_shot_all_reduce": ops.one_shot_all_reduce(x, "sum", name)}
    right["one_shot_all_reduce_copy"] = ops.one_shot_all_reduce_copy(x, plain, "sum", name)
    right["multimem_one_shot_all_reduce"] = ops.multimem_one_shot_all_reduce(x, "sum", name)
    for each in ("one_shot_all_reduce_out", "two_shot_all_reduce_out", "multimem_one_shot_all_reduce_out"):
        right[each] = getattr(ops, each)(fresh(), "sum", name, torch.empty(8, 4))
    right["copy_out"] = ops.one_shot_all_reduce_copy_out(x, plain, "sum", name, torch.empty(8, 4))
    for each in ("two_shot_all_reduce_", "multimem_all_reduce_"):
        y = fresh()
        right[each] = getattr(ops, each)(y, "sum", name)
        right[f"{each} in place"] = y
    wrong = [each for each, found in right.items() if not bool((found == total).all())]
    out = torch.full((8, 4), -1.0)
    ops.multimem_one_shot_reduce_out(x, "sum", 1, name, out)
    wrong += [] if bool((out == (total if me == 1 else -1)).all()) else ["reduce_out"]
    gathered = ops.multimem_all_gather_out(x, name, symm_mem.empty(8 * world, 4, device="cpu"))
    wrong += [] if gathered[:, 0].tolist() == [float(1 + i // 8) for i in range(8 * world)] else ["gather"]
    rows = torch.arange(32.0).view(8, 4) * (me + 1)
    by_rows = ops.reduce_scatter_out(rows, name, False, torch.empty(8 // world, 4))
    summed = torch.arange(32.0).view(8, 4) * total
    wrong += [] if torch.equal(by_rows, summed.chunk(world)[me]) else ["scatter"]
    by_columns = ops.reduce_scatter_out(rows, name, True, torch.empty(8, 4 // world))
    wrong += [] if torch.equal(by_columns, summed.chunk(world, 1)[me]) else ["scatter of columns"]
    remote = ops.get_remote_tensors(x[2:], name)
    wrong += [] if [r[0, 0].item() for r in remote] == [1.0 + rank for rank in range(world)] else ["remote"]
    wrong += [] if remote[0].shape == (6, 4) else ["shape of remote"]
    gathered = ops._low_contention_all_gather(plain, name)
    wrong += [] if gathered.shape == (8 * world, 4) else ["low contention"]
    with pytest.raises(
        symmpool.UnsupportedError, match="nvshmem_broadcast is not served.*symmpool.broadcast"
    ):
        ops.nvshmem_broadcast(x, 0, name)
    dist.destroy_process_group()
    return wrong


def test_torchs_operators_are_made_by_collectives(tmp_path):
    assert values(2, operators_of_torch, str(tmp_path)) == [[], []]


def test_every_operator_of_this_torch_is_served_refused_or_left():
    names = torch._C._dispatch_get_all_op_names()
    found = {name.removeprefix("symm_mem::") for name in names if name.startswith("symm_mem::")}
    fused = {name for name in found if name.startswith("fused_")}
    fused |= {"_low_contention_all_gather", "_low_contention_reduce_scatter"}
    known = {*operators.SERVED, *operators.REFUSED, *operators.LEFT}
    assert not found - fused - known
    assert not set(operators.SERVED) & set(operators.REFUSED)


def handles_end_with_their_memory(group, folder):
    installed(group, folder)
    right = []
    pool = None
    for _ in range(20):
        x = symm_mem.empty(1 << 20, dtype=torch.uint8, device="cpu")
        symm_mem.rendezvous(x, dist.group.WORLD)
        pool = pool or next(iter(symmpool.groups.pool_registry.holding(x)))
        del x
        gc.collect()
    pool.commit()
    pool.commit()
    right.append(pool.stats()["allocated"] < 8 << 20)
    # Persistent memory is the same for each of its tensors, and not for two at once.
    shape = ((64,), (1,), torch.float32, torch.device("cpu"))
    y = _SymmetricMemory.empty_strided_p2p(*shape, "0", 3)
    handle, place = _SymmetricMemory.rendezvous(y), y.data_ptr()
    with pytest.raises(symmpool.InvalidArgumentError, match="is still there"):
        _SymmetricMemory.empty_strided_p2p(*shape, "0", 3)
    del y
    with pytest.raises(symmpool.InvalidArgumentError, match="one size"):
        _SymmetricMemory.empty_strided_p2p((65,), *shape[1:], "0", 3)
    y = _SymmetricMemory.empty_strided_p2p(*shape, "0", 3)
    right.append(y.data_ptr() == place and _SymmetricMemory.rendezvous(y, "0") is handle)
    dist.destroy_process_group()
    return right


def test_handles_and_memory_end_with_the_tensor(tmp_path):
    for right in values(2, handles_end_with_their_memory, str(tmp_path)):
        assert all(right), right


def refused(group, folder):
    me, _ = installed(group, folder)
    name = dist.group.WORLD.group_name
    said = []
    x = symm_mem.empty(8, device="cpu")
    views = [x[:2]] if me == 0 else []
    for tensor, pattern in [(x, "has views"), (torch.ones(8) if me == 0 else x, "no symmetric memory")]:
        try:
            symm_mem.rendezvous(tensor, name)
        except symmpool.Error as error:
            said.append((type(error).__name__, pattern in str(error)))
    views.clear()
    x.fill_(me)
    handle = symm_mem.rendezvous(x, name)
    said.append(handle.get_remote_tensor(1 - me, (8,), x.dtype)[0].item() == 1 - me)
    for wrong in (
        lambda: symm_mem.rendezvous(x, "nobody's"),
        lambda: symm_mem.rendezvous([1.0], name),
        lambda: symm_mem.set_backend("NVSHMEM"),
        lambda: symm_mem.get_mem_pool("cpu"),
        lambda: symm_mem.empty(8, device="meta"),
        lambda: handle.boxed(),
    ):
        with pytest.raises(symmpool.Error) as caught:
            wrong()
        said.append(len(str(caught.value)) > 30)
    symm_mem.set_backend("CUDA")
    dist.destroy_process_group()
    return said


def test_what_is_refused_is_an_error_on_every_rank(tmp_path):
    first, second = values(2, refused, str(tmp_path))
    assert first[:2] == [("InvalidArgumentError", True)] * 2
    assert second[:2] == [("DivergedError", True)] * 2
    assert first[2:] == second[2:] == [True] * 7


def one_comes_late(group, folder):
    me, _ = installed(group, folder, timeout=SHORT)
    x = symm_mem.empty(8, device="cpu")
    symm_mem.rendezvous(x, "0")
    if me == 1:
        return None
    try:
        symm_mem.rendezvous(symm_mem.empty(8, device="cpu"), "0")
    except symmpool.Error as error:
        return type(error).__name__, error.ranks
    return "none"


def test_a_rendezvous_ends_where_a_rank_does_not_come(tmp_path):
    first, second = run(2, one_comes_late, str(tmp_path))
    assert second.status == 0
    assert first.value in [("TimeoutError", (1,)), ("PeerLostError", (1,))]
