"""Tests of errors on one rank before its call of `experts` or `deep_ep` is made: an error on every rank at
once, and the ranks' next calls pair."""

import functools
import itertools
import sys
import threading
from pathlib import Path

import pytest
import torch
from ranks import values
from test_torch_fused_moe import config

import symmpool
from symmpool import deep_ep, experts
from symmpool.engines import fused_moe

BFLOAT16 = torch.bfloat16
HIDDEN, EXPERTS, TOP_K = 128, 4, 2
PACKAGE = Path(symmpool.__file__).parent


def freed():
    tensor = torch.ones(4, HIDDEN, dtype=BFLOAT16)
    tensor.untyped_storage().resize_(0)
    return tensor


def fake():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(4, HIDDEN, dtype=BFLOAT16)


def nonsense():
    """Values that no argument takes, or few. Tensors fit by shape where tokens are meant."""
    like = torch.ones(4, HIDDEN, dtype=BFLOAT16)
    ids = torch.zeros(4, TOP_K, dtype=torch.int64)
    return {
        "5": 5,
        "-1": -1,
        "1.5": 1.5,
        "text": "4",
        "None": None,
        "list": [1],
        "tuple": (like,),
        "pair": (like, like),
        "2**40": 2**40,
        "2**70": 2**70,
        "object": object(),
        "scalar": torch.tensor(1.0),
        "vector": torch.ones(3),
        "strided": torch.ones(HIDDEN, 4, dtype=BFLOAT16).t(),
        "expanded": torch.ones(1, HIDDEN, dtype=BFLOAT16).expand(4, HIDDEN),
        "conjugated": torch.ones(4, HIDDEN, dtype=torch.complex64).conj(),
        "negative": torch.ones(4, HIDDEN, dtype=torch.complex64).conj().imag,
        "freed": freed(),
        "fake": fake(),
        "meta": torch.ones(4, HIDDEN, dtype=BFLOAT16, device="meta"),
        "with grad": torch.ones(4, HIDDEN, dtype=BFLOAT16, requires_grad=True),
        "ids": ids,
        "strided ids": ids.repeat(1, 2)[:, ::2],
        "sparse": torch.ones(4, HIDDEN).to_sparse(),
        "float8": like.to(torch.float8_e4m3fn),
    }


class Calls:
    """Every public call, with arguments that are right."""

    def __init__(self, group):
        self.pool = symmpool.Pool(group, "cpu")
        self.me = self.pool.rank
        self.buffer = experts.ExpertBuffer(
            self.pool, hidden=HIDDEN, experts=EXPERTS, top_k=TOP_K, max_tokens=4, count_load=True
        )
        x = torch.ones(4, HIDDEN, dtype=BFLOAT16)
        ids = torch.tensor([[0, 2], [3, 1], [1, 3], [2, -1]])
        weights = torch.rand(4, TOP_K)
        buffer = self.buffer
        with torch.no_grad():
            received, by_rank = buffer.dispatch(x, ids, weights)
            received, by_expert = buffer.dispatch(x, ids, weights, layout="expert")
        rows = torch.ones(buffer.capacity, HIDDEN, dtype=BFLOAT16)
        expert_rows = torch.ones_like(received.x)
        options = {
            "scales": None, "quantize": None, "layout": "rank", "alignment": 1, "exact": False, "hook": False,
            "out": None, "out_scales": None, "copy": None,
        }  # fmt: skip
        grad = x.clone().requires_grad_()
        low = {
            "x": x, "topk_idx": ids, "num_max_dispatch_tokens_per_rank": 4, "num_experts": EXPERTS,
            "cumulative_local_expert_recv_stats": None, "dispatch_wait_recv_cost_stats": None,
            "use_fp8": False, "round_scale": False, "use_ue8m0": False, "async_finish": False,
            "return_recv_hook": False,
        }  # fmt: skip
        dispatch = {**options, "x": x, "topk_ids": ids, "topk_weights": weights, "handle": None}
        expert_dispatch = {
            **dispatch, "layout": "expert", "out": torch.empty(64, HIDDEN, dtype=BFLOAT16), "quantize": None,
        }  # fmt: skip
        combine = {"expert_output": rows, "handle": by_rank, "weights": None, "out": None, "hook": False}
        expert_combine = {**combine, "expert_output": expert_rows, "handle": by_expert, "weights": weights}
        with_grad = rows.clone().requires_grad_()
        made = {"hidden": 64, "experts": EXPERTS, "top_k": TOP_K, "max_tokens": 4, "dtype": BFLOAT16}
        made.update(device="cpu", num_sms=None, capacity=None, count_load=False)
        self.all = {
            "Buffer": (lambda **given: experts.ExpertBuffer(self.pool, **given), made),
            "dispatch": (buffer.dispatch, dispatch),
            "dispatch by expert": (buffer.dispatch, expert_dispatch),
            "dispatch with a gradient": (buffer.dispatch, {**dispatch, "x": grad}),
            "dispatch again": (buffer.dispatch, {**options, "x": x, "handle": by_rank}),
            "combine": (buffer.combine, combine),
            "combine by expert": (buffer.combine, expert_combine),
            "combine with a gradient": (buffer.combine, {**combine, "expert_output": with_grad}),
        }
        deep = self.deep = deep_ep.Buffer(self.pool, low_latency_mode=True)
        of_ranks, _, of_experts, in_rank, _ = deep.get_dispatch_layout(ids, EXPERTS)
        normal = {
            "x": x, "handle": None, "num_tokens_per_rank": of_ranks, "is_token_in_rank": in_rank,
            "num_tokens_per_expert": of_experts, "topk_idx": ids, "topk_weights": weights,
            "expert_alignment": 1, "num_worst_tokens": 0, "config": None, "previous_event": None,
            "async_finish": False, "allocate_on_comm_stream": False,
        }  # fmt: skip
        found, found_ids, found_weights, _, handle, _ = deep.dispatch(**normal)
        low_found, _, low_handle, _, _ = deep.low_latency_dispatch(**low)
        events = {"config": None, "previous_event": None, "async_finish": False}
        events["allocate_on_comm_stream"] = False
        low_combine = {
            "x": low_found, "topk_idx": ids, "topk_weights": weights, "handle": low_handle,
            "use_logfmt": False, "zero_copy": False, "async_finish": False, "return_recv_hook": False,
            "out": None, "combine_wait_recv_cost_stats": None,
        }  # fmt: skip
        untopped = {**normal, "topk_idx": None, "topk_weights": None}
        combined = {"x": found, "handle": handle, "topk_weights": found_weights, "bias": x, **events}
        self.all.update(
            {
                "deep dispatch": (deep.dispatch, normal),
                "deep dispatch without ids": (deep.dispatch, untopped),
                "deep dispatch of at most": (deep.dispatch, {**normal, "num_worst_tokens": 16}),
                "deep dispatch again": (deep.dispatch, {"x": x, "handle": handle, **events}),
                "deep combine": (deep.combine, combined),
                "low-latency dispatch": (deep.low_latency_dispatch, low),
                "low-latency combine": (deep.low_latency_combine, low_combine),
            }
        )
        kernel = fused_moe.PrepareAndFinalize(buffer)
        prepare = {
            "a1": x, "topk_weights": weights, "topk_ids": ids, "num_experts": EXPERTS, "expert_map": None,
            "apply_router_weight_on_input": False, "quant_config": config(), "defer_input_quant": False,
        }  # fmt: skip
        self.kernel = kernel
        self.all["prepare"] = (kernel.prepare, prepare)
        self.all["prepare_async"] = (lambda **given: kernel.prepare_async(**given)[1](), prepare)
        given = kernel.prepare(**prepare)
        made_rows = given[0].clone()
        kernel._handles.clear()
        self.finalized = kernel.buffer.dispatch(x, ids, weights, exact=True)[1]
        finalize = {
            "output": torch.empty_like(x), "fused_expert_output": made_rows, "topk_weights": given[4],
            "topk_ids": given[3], "apply_router_weight_on_input": False, "weight_and_reduce_impl": None,
        }  # fmt: skip
        self.all["finalize"] = (self.finalize, finalize)
        self.step = 0

    def finalize(self, **given):
        self.kernel._handles[0] = self.finalized
        return self.kernel.finalize(**given)

    def check_next(self):
        """The next call of all ranks is the same one: what arrives is of this step."""
        self.step += 1
        x = torch.full((1, HIDDEN), float(self.step % 251), dtype=BFLOAT16)
        received, _ = self.buffer.dispatch(x, torch.tensor([[0, 2]]), exact=True)
        assert torch.equal(received.x, x.expand(self.pool.world, HIDDEN)), f"step {self.step}"


def outcome(call, given):
    try:
        call(**given)
    except symmpool.DivergedError:
        return "diverged"
    except (symmpool.errors.Error, TypeError) as error:
        return f"refused: {error}"
    except BaseException as error:
        return f"untyped: {type(error).__name__}: {error}"
    return "made"


def wrong_on_one_rank(group, part):
    calls = Calls(group)
    bad = nonsense()
    found = []
    for name in sorted(calls.all)[part::3]:
        call, good = calls.all[name]
        for argument, (what, value) in itertools.product(good, bad.items()):
            given = {**good, argument: value} if calls.me == 1 else good
            found.append((f"{name}, {argument}={what}", outcome(call, given)))
            calls.check_next()
    return found


@pytest.mark.parametrize("part", range(3))
def test_each_argument_that_is_wrong_on_one_rank_is_an_error_on_every_rank(part):
    right, wrong = values(2, wrong_on_one_rank, part, limit=600)
    odd = []
    for (what, here), (_, there) in zip(right, wrong):
        fits = {"made": here == "made", "diverged": here != "made"}.get(there, here != "made")
        if not fits or here.startswith("untyped") or there.startswith("untyped"):
            odd.append((what, here, there))
    refused = sum(there.startswith("refused") for _, there in wrong)
    assert not odd, f"{len(odd)} of {len(wrong)}:\n" + "\n".join(map(str, odd[:40]))
    assert refused > len(wrong) // 2


# --- a failure that is no wrong argument


class Interruption:
    """Raises an error at the n-th line that runs behind a door, in what serves these calls."""

    def __init__(self, at, error):
        self.at, self.error, self.lines, self.is_behind = at, error, 0, False

    def global_trace(self, frame, event, _):
        name = frame.f_code.co_filename
        if name.endswith("experts/door.py"):
            self.is_behind = self.is_behind or frame.f_code.co_name == "__enter__"
            return None
        parts = Path(name).parts[-2:-1]
        return self.trace if parts and parts[0] in ("experts", "deep_ep", "engines") else None

    def trace(self, frame, event, _):
        if event == "line" and self.is_behind:
            self.lines += 1
            if self.lines == self.at:
                raise self.error("raised by a test")
        return self.trace


def backward(calls, of, layout):
    """Runs a backward pass through a dispatch alone, or through a combine."""
    grad = of == "dispatch"
    x = torch.ones(4, HIDDEN, dtype=BFLOAT16, requires_grad=grad)
    weights = torch.rand(4, TOP_K, requires_grad=True)
    ids = torch.tensor([[0, 2], [3, 1], [1, 3], [2, -1]])
    if grad:
        received, _ = calls.buffer.dispatch(x, ids, weights, layout=layout)
        made = received.x.float()
        if layout == "rank":
            made = made * received.topk_weights.sum(1, keepdim=True)
        return made.sum()
    received, handle = calls.buffer.dispatch(x, ids, layout=layout)
    rows = received.x.clone().requires_grad_()
    return calls.buffer.combine(rows, handle, weights=weights if layout == "expert" else None).float().sum()


def interrupted(group, which, error):
    calls = Calls(group)
    if which.startswith("backward"):
        call, good, prepare = torch.Tensor.backward, {}, lambda: backward(calls, *which.split()[1:])
    else:
        call, good, prepare = (lambda _, **given: calls.all[which][0](**given)), calls.all[which][1], bool
    # How many lines there are.
    counting, prepared = Interruption(0, error), prepare()
    sys.settrace(counting.global_trace)
    call(prepared, **good)
    sys.settrace(None)
    lines = torch.tensor([counting.lines])
    most = torch.empty(calls.pool.world, dtype=torch.int64)
    symmpool.all_gather_into_tensor(most, lines, group=calls.pool)
    calls.check_next()
    found = []
    for at in range(1, int(most.max()) + 1):
        tracer, prepared = Interruption(at, error), prepare()
        if calls.me == 1:
            sys.settrace(tracer.global_trace)
        try:
            call(prepared, **good)
            result = "made"
        except symmpool.DivergedError:
            result = "diverged"
        except error:
            result = "raised"
        finally:
            sys.settrace(None)
        found.append(result)
        calls.check_next()
    return found


INTERRUPTED = [
    "dispatch by expert",
    "dispatch with a gradient",
    "combine",
    "deep dispatch",
    "deep dispatch without ids",
    "deep dispatch of at most",
    "deep dispatch again",
    "deep combine",
    "low-latency dispatch",
    "low-latency combine",
    "prepare_async",
    "finalize",
    "backward dispatch rank",
    "backward dispatch expert",
    "backward combine rank",
    "backward combine expert",
]
# Calls in which memory runs out, at the lines at which Ctrl-C comes.
WITHOUT_MEMORY = ["dispatch by expert", "deep combine", "backward combine expert"]


@pytest.mark.parametrize(
    "which, error",
    [(which, KeyboardInterrupt) for which in INTERRUPTED]
    + [(which, MemoryError) for which in WITHOUT_MEMORY],
)
def test_an_error_at_any_line_before_a_call_reaches_every_rank(which, error):
    right, interrupted_rank = values(2, interrupted, which, error, limit=300)
    assert interrupted_rank.count("raised") > 5
    pairs = list(zip(right, interrupted_rank))
    assert set(pairs) <= {("diverged", "raised"), ("made", "raised"), ("made", "made")}, pairs
    assert ("diverged", "raised") in pairs


def made_together(group):
    """A buffer is made by all ranks or by none."""
    pool = symmpool.Pool(group, "cpu")
    options = {"hidden": 64, "experts": 4, "top_k": 2, "max_tokens": 4}
    for wrong in ({"hidden": 5}, {"count_load": 7}, {"device": "cuda:x"}, {"max_tokens": 0}):
        if pool.rank == 1:
            with pytest.raises((symmpool.InvalidArgumentError, TypeError)):
                experts.ExpertBuffer(pool, **{**options, **wrong})
        else:
            with pytest.raises(symmpool.DivergedError):
                experts.ExpertBuffer(pool, **options)
    buffer = experts.ExpertBuffer(pool, **options)
    x = torch.full((1, 64), float(pool.rank), dtype=BFLOAT16)
    received, _ = buffer.dispatch(x, torch.tensor([[0, 2]]), exact=True)
    assert received.x[:, 0].tolist() == [0.0, 1.0]


def test_a_buffer_is_made_by_all_ranks_or_by_none():
    values(2, made_together)


def callbacks(group):
    """Raises errors in a program's own functions, of `PrepareAndFinalize`."""
    calls = Calls(group)
    kernel = fused_moe.PrepareAndFinalize(calls.buffer, batch=lambda: raising() or 0)
    good_prepare, good_finalize = calls.all["prepare"][1], calls.all["finalize"][1]
    kind = [None]

    def raising():
        if kind[0] is not None:
            raise kind[0]("a program's error")

    class Reduce:
        def apply(self, **_):
            raising()
            return good_finalize["fused_expert_output"]

    def check(call, error):
        kind[0] = error if calls.me == 1 else None
        with pytest.raises(error if calls.me == 1 else symmpool.DivergedError):
            call()
        kind[0] = None
        calls.check_next()

    check(lambda: kernel.prepare(**good_prepare), LookupError)
    check(lambda: kernel.prepare_async(**good_prepare), KeyboardInterrupt)
    kernel.prepare(**good_prepare)
    reduced = {**good_finalize, "weight_and_reduce_impl": Reduce()}
    check(lambda: kernel.finalize(**reduced), LookupError)
    # The batch is there still.
    kernel.finalize(**good_finalize)
    with pytest.raises(symmpool.InvalidStateError, match="no prepare before"):
        kernel.finalize(**good_finalize)


def test_what_a_programs_own_function_raises_reaches_every_rank():
    values(2, callbacks)


def begun_before_the_lock(group):
    """Another thread begins a call whose callback dispatches, where this one has waited for what was begun
    and is about to take the buffer's lock, or holds it."""
    calls = Calls(group)
    buffer, entry = calls.buffer, calls.buffer._entry
    x = torch.ones((1, buffer.hidden), dtype=buffer.dtype)
    ids = torch.zeros((1, buffer.top_k), dtype=torch.int64)
    made, futures = [], []

    def follow(_):
        made.append(buffer.dispatch(x, ids)[0].x.shape)

    def begin():
        go = threading.Event()
        work = entry.begin(lambda: go.wait(5) and None, (), [])
        futures.append(work.get_future().then(follow))
        go.set()

    class Lock:
        def __init__(self, lock, times):
            self.lock, self.left = lock, times
            self._is_owned = lock._is_owned

        def __enter__(self):
            if threading.current_thread() is threading.main_thread() and self.left:
                self.left -= 1
                other = threading.Thread(target=begin)
                if self.left:
                    self.lock.acquire()
                other.start()
                other.join()
                if self.left:
                    return
            self.lock.acquire()

        def __exit__(self, *_):
            self.lock.release()

    for times in (1, 2):
        buffer._turn = Lock(threading.RLock(), times)
        for _ in range(2):
            buffer.dispatch(x, ids)
        for each in futures:
            each.wait()
    return len(made)


def test_a_call_begun_between_a_wait_and_the_lock_of_a_buffer_may_have_a_callback_that_needs_it():
    assert values(1, begun_before_the_lock, limit=60) == [3]


def no_collective(group):
    """Checks that calls which talk to nobody are refused here alone."""
    calls = Calls(group)
    deep, bad = calls.deep, nonsense()
    if calls.me == 1:
        for what in ("5", "None", "list", "object", "freed", "fake", "with grad", "2**70"):
            for call in (
                lambda given: deep.get_dispatch_layout(given, EXPERTS),
                lambda given: deep.get_dispatch_layout(bad["ids"], given),
                deep.get_next_low_latency_combine_buffer,
            ):
                with pytest.raises((symmpool.errors.Error, TypeError)):
                    call(bad[what])
    calls.check_next()


def test_what_talks_to_nobody_is_refused_on_one_rank_alone():
    values(2, no_collective)


def two_threads(group):
    """Two threads of each rank take turns on one buffer, whose rows they copy."""
    pool = symmpool.Pool(group, "cpu")
    buffer = experts.ExpertBuffer(pool, hidden=HIDDEN, experts=EXPERTS, top_k=TOP_K, max_tokens=4)
    ids, turn, wrong = torch.tensor([[0, 2]]), threading.Condition(), []
    next_ = [0]

    def is_next(step):
        return next_[0] == step

    def work(mine):
        for step in range(mine, 60, 2):
            x = torch.full((1, HIDDEN), float(step), dtype=BFLOAT16)
            with turn:
                turn.wait_for(functools.partial(is_next, step))
                next_[0] += 1
                received, _ = buffer.dispatch(x, ids, exact=step % 3 == 0)
                turn.notify_all()
            # Meanwhile the other thread is in its call.
            rows = received.x[: pool.world]
            if not torch.equal(rows, x.expand_as(rows)):
                wrong.append(step)

    threads = [threading.Thread(target=work, args=(mine,)) for mine in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong


def test_rows_of_one_thread_are_copied_before_another_ones_call():
    assert values(2, two_threads) == [[], []]
