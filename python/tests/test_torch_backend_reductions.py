"""The backend of torch.distributed: every reduction of every type that torch has, of every kind of tensor."""

import datetime
import itertools

import pytest
import torch
import torch.distributed as dist
from ranks import values
from test_torch_distributed import begin
from walk import views_of

import symmpool
from symmpool import backend

INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)

SUMMED = {"SUM": torch.add, "PRODUCT": torch.mul, "MIN": torch.minimum, "MAX": torch.maximum}
BITS = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}


def values_of(rank, dtype, shape=(2, 3)):
    """Small values of a rank: any order of any reduction is exact."""
    numbers = (torch.arange(6) * 5 + rank * 3) % 4 + (0 if dtype == torch.bool else 1)
    if dtype == torch.bool:
        numbers = (numbers + rank) % 2
    found = numbers.to(dtype).reshape(shape)
    return found * (1 + 1j) if dtype.is_complex else found


def total_of(world, dtype, name):
    """The reduction of all ranks' values, by torch alone."""
    parts = [values_of(rank, dtype) for rank in range(world)]
    if name == "AVG":
        if dtype.is_complex:
            return torch.view_as_complex(sum(map(torch.view_as_real, parts)) / world)
        return (sum(part.to(torch.float64) for part in parts) / world).to(dtype)
    if dtype == torch.bool:
        names = {"SUM": "BOR", "MAX": "BOR", "PRODUCT": "BAND", "MIN": "BAND"}
        function = BITS[names.get(name, name)]
    else:
        function = {**SUMMED, **BITS}[name]
    # torch has few operations of the larger unsigned types.
    wide = torch.int64 if dtype in UNSIGNED else dtype
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = function(total, part.to(wide))
    return total.to(dtype)


def operations_of(dtype):
    if dtype.is_complex:
        return ["SUM", "AVG"]  # torch itself refuses the others
    if dtype.is_floating_point:
        return [*SUMMED, "AVG"]
    return [*SUMMED, *BITS]


def reduced(group, folder):
    me, world = begin(group, folder, "symmpool")
    failures = []
    for dtype in (*INTEGERS, *UNSIGNED, *FLOATS, *COMPLEX, torch.bool):
        for name in operations_of(dtype):
            op, expected = getattr(dist.ReduceOp, name), total_of(world, dtype, name)
            for view in ("plain", *views_of(values_of(me, dtype))):
                mine = values_of(me, dtype)
                x = mine if view == "plain" else views_of(mine)[view]
                if dtype.is_complex and (x.is_conj() or x.is_neg()):
                    continue  # torch views them as real numbers, which refuses these
                with torch.no_grad():
                    dist.all_reduce(x, op)
                found = {"all_reduce": x.detach()}
                y = values_of(me, dtype) if view == "plain" else views_of(values_of(me, dtype))[view]
                with torch.no_grad():
                    dist.reduce(y, 1, op)
                if me == 1:
                    found["reduce"] = y.detach()
                for call, result in found.items():
                    same = torch.equal(result, expected)
                    if dtype == torch.bool:
                        same = same and int(result.clone().view(torch.uint8).max()) <= 1
                    if not same:
                        failures.append((call, str(dtype), name, view, result.tolist(), expected.tolist()))
    counts = backend.backend_counts()
    dist.destroy_process_group()
    return failures[:5], {each for where in counts.values() for each in where}


@pytest.mark.parametrize("world", [2, 3])
def test_every_type_and_view_is_reduced_by_every_operation(world, tmp_path):
    assert values(world, reduced, str(tmp_path)) == [([], {"symmpool"})] * world


def scattered(group, folder):
    me, world = begin(group, folder, "symmpool")
    failures = []
    for dtype in (*INTEGERS, *FLOATS, torch.complex64, torch.bool):
        for name in operations_of(dtype):
            op, expected = getattr(dist.ReduceOp, name), total_of(world, dtype, name)
            inputs = [values_of(me, dtype) for _ in range(world)]
            for view in ("plain", *views_of(inputs[0])):
                viewed = [each if view == "plain" else views_of(each)[view] for each in inputs]
                if dtype.is_complex and (viewed[0].is_conj() or viewed[0].is_neg()):
                    continue
                with torch.no_grad():
                    whole = torch.stack([each.detach() for each in viewed]).transpose(-1, -2).contiguous()
                    parts = torch.empty(2, 3, dtype=dtype)
                    dist.reduce_scatter(parts, viewed, op)
                    # A view with other strides, of all parts at once.
                    single = torch.empty(3, 2, dtype=dtype).t()
                    dist.reduce_scatter_tensor(single, whole.transpose(-1, -2), op)
                for call, result in {"list": parts, "tensor": single}.items():
                    same = torch.equal(result, expected)
                    if dtype == torch.bool:
                        same = same and int(result.clone().view(torch.uint8).max()) <= 1
                    if not same:
                        failures.append((call, str(dtype), name, view, result.tolist(), expected.tolist()))
    counts = backend.backend_counts()
    dist.destroy_process_group()
    return failures[:5], {each for where in counts.values() for each in where}


def test_every_type_and_view_is_reduced_and_scattered(tmp_path):
    assert values(2, scattered, str(tmp_path)) == [([], {"symmpool"})] * 2


def booleans(group, folder):
    """Tensors of bool whose bytes are not 0 and 1, as a view of other bytes shows them."""
    me, _ = begin(group, folder, "symmpool")
    right = {}
    raw = [torch.tensor([2, 0, 255, 4], dtype=torch.uint8), torch.tensor([1, 0, 3, 0], dtype=torch.uint8)][me]
    expected = {
        "SUM": [1, 0, 1, 1],
        "PRODUCT": [1, 0, 1, 0],
        "MIN": [1, 0, 1, 0],
        "MAX": [1, 0, 1, 1],
        "BAND": [1, 0, 1, 0],
        "BOR": [1, 0, 1, 1],
        "BXOR": [0, 0, 0, 1],
    }
    for module, (name, bits) in itertools.product((dist, symmpool), expected.items()):
        x = raw.clone().view(torch.bool)
        module.all_reduce(x, getattr(dist.ReduceOp, name))
        right[module.__name__, name] = x.view(torch.uint8).tolist() == bits
    dist.destroy_process_group()
    return [each for each, found in right.items() if not found]


def test_reduced_bools_are_zero_or_one(tmp_path):
    assert values(2, booleans, str(tmp_path)) == [[], []]


def multiplied(group, folder):
    me, world = begin(group, folder, "symmpool")
    failures = []
    for dtype in (*FLOATS, *COMPLEX):
        for factor in (0.5, 3.0, "tensor"):
            scale = 0.25 if factor == "tensor" else factor
            given = torch.tensor([0.25], dtype=torch.float32) if factor == "tensor" else factor
            op = dist._make_nccl_premul_sum(given)
            expected = (sum(values_of(rank, dtype).to(torch.complex128) for rank in range(world)) * scale).to(
                torch.complex128
            )
            x, y = values_of(me, dtype), values_of(me, dtype).t().contiguous().t()
            part, whole = torch.empty(2, 3, dtype=dtype), values_of(me, dtype).repeat(world, 1)
            dist.all_reduce(x, op)
            dist.all_reduce(y, op, async_op=True).wait()
            dist.reduce_scatter_tensor(part, whole, op)
            parts = torch.empty(2, 3, dtype=dtype)
            dist.reduce_scatter(parts, [values_of(me, dtype) for _ in range(world)], op)
            for call, found in {"plain": x, "strided": y, "scattered": part, "list": parts}.items():
                if not torch.equal(found.to(torch.complex128), expected):
                    failures.append((call, str(dtype), factor, found.tolist(), expected.tolist()))
    with pytest.raises(symmpool.InvalidArgumentError, match="PREMUL_SUM of elements of int32"):
        dist.all_reduce(torch.ones(3, dtype=torch.int32), dist._make_nccl_premul_sum(0.5))
    counts = backend.backend_counts()
    dist.destroy_process_group()
    return failures[:5], {each for where in counts.values() for each in where}


def test_inputs_are_multiplied_by_any_factor_before_a_sum(tmp_path):
    assert values(2, multiplied, str(tmp_path)) == [([], {"symmpool"})] * 2


def another_type(group, folder, name):
    """Rank 1 passes a type that nothing reduces so: the others hear of it at once."""
    me, _ = begin(group, folder, "symmpool")
    dist.all_reduce(torch.ones(1))
    op = getattr(dist.ReduceOp, name)
    x = torch.ones(4) if (me == 1) == (name == "BAND") else torch.ones(4, dtype=torch.int32)
    if name == "AVG":
        x = torch.ones(4, dtype=torch.bool) if me == 1 else torch.ones(4)
    kind = symmpool.InvalidArgumentError if me == 1 else symmpool.DivergedError
    with pytest.raises(kind):
        dist.all_reduce(x, op)
    total = torch.full((2,), me + 1.0)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.tolist()


@pytest.mark.parametrize("name", ["BAND", "AVG"])
def test_a_type_that_nothing_reduces_so_is_an_error_on_all_ranks(name, tmp_path):
    assert values(2, another_type, str(tmp_path), name) == [[3.0] * 2] * 2


def messages(group, folder):
    """Views that are sent and received, which gloo does not look at."""
    me, _ = begin(group, folder, "symmpool")
    failures = []
    for dtype in (torch.float32, torch.complex64, torch.int32, torch.bool):
        values_here = values_of(7, dtype)
        for view in ("plain", *views_of(values_here)):
            for begun in (False, True):
                if view == "conjugated":
                    continue  # torch itself refuses it, as it views complex numbers as real ones
                sent = values_here if view == "plain" else views_of(values_here)[view]
                blank = torch.zeros_like(values_here)
                got = blank if view == "plain" else views_of(blank)[view]
                with torch.no_grad():
                    calls = (dist.isend, dist.irecv) if begun else (dist.send, dist.recv)
                    work = calls[me](sent if me == 0 else got, 1 - me)
                    if begun:
                        work.wait()
                if me == 1 and not torch.equal(got.detach(), values_here):
                    failures.append((str(dtype), view, begun, got.tolist()))
    if me == 1:
        with pytest.raises(symmpool.InvalidArgumentError, match="share their memory"):
            dist.recv(torch.ones(1).expand(4), 0)
    dist.destroy_process_group()
    return failures


def test_views_are_sent_and_received_by_what_they_show(tmp_path):
    assert values(2, messages, str(tmp_path)) == [[], []]


def waited_by_torch(group, folder):
    """torch's `wait_tensor` on what eager calls are filling, which compiled code begins with."""
    from torch._C import _distributed_c10d as c10d
    from torch.distributed._functional_collectives import allow_inflight_collective_as_graph_input_ctx

    me, world = begin(group, folder, "symmpool")
    late, wait = _late(me), torch.ops._c10d_functional.wait_tensor
    found = {}
    with allow_inflight_collective_as_graph_input_ctx():
        for name, (call, result, expected) in _under_way(me, world).items():
            late()
            work = call()
            wait(result)
            found[name] = result.tolist() == expected
            work.wait()
        found["nothing is left"] = c10d._get_work_registry_size() == 0
        # Two calls on one tensor: a wait for the first leaves the second to `wait_tensor`.
        x = torch.ones(4)
        first = dist.all_reduce(x, async_op=True)
        late()
        second = dist.all_reduce(x, async_op=True)
        first.wait()
        wait(x)
        found["two"] = x.tolist() == [world * world] * 4 and second.is_completed()
        works = [dist.all_reduce(x, async_op=True) for _ in range(3)]
        for work in works:
            work.wait()
        found["all waited for"] = c10d._get_work_registry_size() == 0
    works = [dist.all_reduce(x, async_op=True) for _ in range(3)]
    found["not registered"] = c10d._get_work_registry_size() == 0
    for work in works:
        work.wait()
    dist.destroy_process_group()
    return [name for name, is_right in found.items() if not is_right]


def _late(me):
    import time

    def late():
        # Not torch's, whose Work is registered under a tensor that nobody waits for.
        symmpool.barrier()
        if me == 1:
            time.sleep(0.2)

    return late


def _under_way(me, world):
    x, strided, gathered = torch.ones(4), torch.ones(4, 2)[:, 0], torch.zeros(2 * world)
    part, swapped, sent = torch.zeros(2), torch.zeros(world), torch.full((3,), float(me))
    return {
        "all_reduce": (lambda: dist.all_reduce(x, async_op=True), x, [world] * 4),
        "strided": (lambda: dist.all_reduce(strided, async_op=True), strided, [world] * 4),
        "all_gather": (
            lambda: dist.all_gather_into_tensor(gathered, torch.ones(2), async_op=True),
            gathered,
            [1] * 2 * world,
        ),
        "reduce_scatter": (
            lambda: dist.reduce_scatter_tensor(part, torch.ones(2 * world), async_op=True),
            part,
            [world] * 2,
        ),
        "all_to_all": (
            lambda: dist.all_to_all_single(swapped, torch.ones(world), async_op=True),
            swapped,
            [1] * world,
        ),
        "broadcast": (lambda: dist.broadcast(sent, 1, async_op=True), sent, [1] * 3),
    }


def test_torchs_wait_for_a_tensor_waits_for_eager_calls(tmp_path):
    assert values(2, waited_by_torch, str(tmp_path)) == [[], []]


def of_another_type(group, folder, length):
    """A message of float32 for a receiver of int32, which has elements of the same size."""
    me, _ = begin(group, folder, "symmpool", timeout=datetime.timedelta(seconds=20))
    x = torch.full((length,), 7.5) if me == 0 else torch.zeros(length, dtype=torch.int32)
    with pytest.raises(symmpool.DivergedError) as raised:
        if me == 0:
            dist.send(x, 1)
            # A small message has gone before it is refused, which the next one reports once it has ended.
            dist.recv(torch.zeros(1), 1)
        else:
            dist.recv(x, 0)
    if me == 1 and length < 100:
        dist.send(torch.zeros(1), 0)
    # The next ones arrive.
    y = torch.full((2,), float(me))
    (dist.send if me == 0 else dist.recv)(y, 1 - me)
    dist.destroy_process_group()
    return raised.value.ranks, str(raised.value), x.unique().tolist(), y.tolist()


@pytest.mark.parametrize("length", [4, 100_000])
def test_a_message_of_another_type_is_an_error_on_both_ranks(length, tmp_path):
    sent, got = values(2, of_another_type, str(tmp_path), length)
    for ranks, error, _, y in (sent, got):
        assert ranks == (0, 1) and y == [0.0] * 2
        assert f"rank 0 sends {length} f32" in error and f"which expects {length} i32" in error, error
    assert got[2] == [0]


def from_anybody(group, folder):
    """Messages with tags, from a rank that is not named."""
    me, world = begin(group, folder, "symmpool")
    found = []
    for tag in (0, 5, (1 << 26) - 1, 1 << 27):
        for dtype in (torch.float32, torch.bool, torch.int64):
            x = torch.tensor([me, 1, 0]).to(dtype)
            if me == 1:
                dist.send(x, 0, tag=tag)
            elif me == 0:
                got = torch.zeros(3, 2, dtype=dtype)[:, 0]
                source = dist.recv(got, tag=tag)
                found.append(source == 1 and got.tolist() == torch.tensor([1, 1, 0]).to(dtype).tolist())
    dist.destroy_process_group()
    return found


def test_messages_are_found_by_tag_and_type_from_any_rank(tmp_path):
    zero, one = values(2, from_anybody, str(tmp_path))
    assert zero == [True] * 12 and one == []
