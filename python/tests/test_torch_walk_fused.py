"""A walk over fused calls and operators with odd tensors: right, or a typed error on every rank at once."""

import contextlib
import functools
import time

import pytest
import torch
import walk
from ranks import values
from test_torch_distributed import begin

import symmpool
from symmpool import fused, ops
from symmpool.communicators.entry import Preparation

TOKENS, HIDDEN = 4, 128


class Norm:
    """`all_reduce_rms_norm` with all tensors that it takes."""

    def __init__(self, me, dtype=torch.float32, quantised=False):
        torch.manual_seed(me)
        row = torch.Generator().manual_seed(7)
        self.given = {
            "x": torch.randn(TOKENS, HIDDEN).to(dtype),
            "residual": torch.randn(TOKENS, HIDDEN).to(dtype),
            "weight": torch.randn(HIDDEN, generator=row).to(dtype),
            "bias": torch.randn(HIDDEN, generator=row).to(dtype),
        }
        self.written = {"residual_out": torch.empty(TOKENS, HIDDEN, dtype=dtype)}
        if quantised:
            self.given["scale"] = torch.tensor([0.5])
            self.written["norm_out"] = torch.empty(TOKENS, HIDDEN, dtype=dtype)
            self.written["out"] = torch.empty(TOKENS, HIDDEN, dtype=torch.float8_e4m3fn)
        else:
            self.written["out"] = torch.empty(TOKENS, HIDDEN, dtype=dtype)

    def __call__(self, **changed):
        given = {**self.given, **{name: each.clone() for name, each in self.written.items()}, **changed}
        quant = fused.fp8_static(given.pop("scale")) if "scale" in given else None
        found = fused.all_reduce_rms_norm(given.pop("x"), quant=quant, **given)
        return [found.out.float(), found.residual, *([given["norm_out"]] if quant else [])]


class Matmul:
    """A fused matmul, by its function and its tensors."""

    def __init__(self, me, call, **given):
        self.call, self.given, self.written = call, given, {}

    def __call__(self, **changed):
        found = self.call(**{**self.given, **changed})
        return list(flat(found))


def close(found, expected):
    """Matrix products that lie otherwise in memory are rounded otherwise."""
    same = found.shape == expected.shape and found.dtype == expected.dtype
    return same and torch.allclose(found.float(), expected.float(), rtol=1e-4, atol=1e-4)


def flat(found):
    for each in found if isinstance(found, (list, tuple)) else [found]:
        if isinstance(each, (list, tuple)):
            yield from flat(each)
        elif each is not None:
            yield each


def calls(me, world):
    torch.manual_seed(me)
    a, b = torch.randn(2 * world, 16), torch.randn(16, 8)
    scaled = a.to(torch.float8_e4m3fn), b.t().contiguous().to(torch.float8_e4m3fn).t()
    scales = torch.rand(2 * world, 1) + 0.5, torch.tensor([0.5])
    name = ops.name_of(None)
    matmul = lambda call, **given: Matmul(me, call, **given)  # noqa: E731
    x = torch.randn(2 * world, 3)
    found = {
        "norm": Norm(me),
        "norm of bfloat16": Norm(me, torch.bfloat16),
        "quantised norm": Norm(me, quantised=True),
        "all_gather_matmul": matmul(lambda A, B: fused.fused_all_gather_matmul(A, [B], 0, None), A=a, B=b),
        "all_gather_matmul of columns": matmul(
            lambda A, B: fused.fused_all_gather_matmul(A, [B], 1, None), A=a, B=torch.randn(16 * world, 8)
        ),
        "scaled all_gather_matmul": matmul(
            lambda A, B, A_scale, B_scale, bias: fused.fused_all_gather_scaled_matmul(
                A, [B], A_scale, [B_scale], 0, None, [bias], [None], [torch.float32], [False]
            ),
            A=scaled[0],
            B=scaled[1],
            A_scale=scales[0],
            B_scale=scales[1],
            bias=torch.randn(8),
        ),
        "matmul_reduce_scatter": matmul(
            lambda A, B: fused.fused_matmul_reduce_scatter(A, B, "sum", 0, None), A=a, B=b
        ),
        "matmuls_reduce_scatter": matmul(
            lambda A, B, A2, B2: fused.fused_matmuls_reduce_scatter([A, A2], [B, B2], "sum", 0, None),
            A=a,
            B=b,
            A2=a + 1,
            B2=b + 1,
        ),
        "scaled matmul_reduce_scatter": matmul(
            lambda A, B, A_scale, B_scale: fused.fused_scaled_matmul_reduce_scatter(
                A, B, A_scale, B_scale, "sum", 0, 0, None, None, None, None, torch.float32
            ),
            A=scaled[0],
            B=scaled[1],
            A_scale=scales[0],
            B_scale=scales[1],
        ),
        "matmul_all_reduce": matmul(lambda A, B: fused.matmul_all_reduce(A, B, "sum", None), A=a, B=b),
        "low_contention_all_gather": matmul(lambda A: fused.low_contention_all_gather(A, None), A=a),
        "low_contention_reduce_scatter": matmul(
            lambda A: fused.low_contention_reduce_scatter(A, "sum", None), A=a
        ),
        "ops.all_reduce": matmul(lambda x: ops.all_reduce(x, "sum"), x=x),
        "ops.all_gather_tensor": matmul(lambda x: ops.all_gather_tensor(x), x=x),
        "ops.reduce_scatter_tensor": matmul(lambda x: ops.reduce_scatter_tensor(x, "sum"), x=x),
        "ops.all_to_all_single": matmul(lambda x: ops.all_to_all_single(x), x=x),
    }
    of = torch.ops.symmpool

    def written(call, out):
        def into(x, out):
            out = out.clone() if out is default else out
            call(out, x)
            return out

        default = out
        return matmul(into, x=x, out=out)

    for operator, call, shape in (
        ("all_reduce_into_", lambda *given: of.all_reduce_into_(*given, "sum", name), (2 * world, 3)),
        ("all_gather_into_", lambda *given: of.all_gather_into_(*given, name), (2 * world * world, 3)),
        ("reduce_scatter_into_", lambda *given: of.reduce_scatter_into_(*given, "sum", name), (2, 3)),
        ("all_to_all_into_", lambda *given: of.all_to_all_into_(*given, [], [], name), (2 * world, 3)),
    ):
        found[operator] = written(call, x.new_empty(shape))
    return found


def views(group, folder):
    me, world = begin(group, folder)
    failures = []
    for name, call in calls(me, world).items():
        expected = call()
        for argument, tensor in {**call.given, **call.written}.items():
            of = tensor.float() if tensor.dtype.itemsize == 1 else tensor
            for kind, view in walk.views_of(of).items():
                if of is not tensor:
                    # torch negates no 8-bit floats.
                    if kind in ("negative", "imaginary"):
                        continue
                    view = walk.VIEWS[kind](tensor)
                # A tensor that is written to must lie where its elements are said to lie.
                with torch.no_grad():
                    try:
                        found = call(**{argument: view})
                    except symmpool.InvalidArgumentError:
                        found = None  # on every rank alike
                    except Exception as error:
                        failures.append(f"{name}, {argument} {kind}: {error!r:.300}")
                        continue
                if found is not None and not all(map(close, found, expected)):
                    failures.append(f"{name}, {argument} {kind}: wrong")
                if found is None and kind in ("inference", "requires grad"):
                    failures.append(f"{name}, {argument} {kind}: refused")
                if found is None and kind == "negative" and argument in call.given:
                    failures.append(f"{name}, {argument} {kind}: refused")
    return failures


def test_fused_calls_and_operators_take_tensors_as_they_show_themselves(tmp_path):
    for failures in values(2, views, str(tmp_path), limit=300):
        assert not failures, "\n".join(failures)


OPTIONAL = {"residual", "bias", "weight", "out", "residual_out", "norm_out"}


def wrong(group, folder, culprit):
    me, world = begin(group, folder)
    failures = []

    def following():
        found = torch.full((3,), me + 1.0)
        symmpool.all_reduce(found)
        return found.tolist() == [world * (world + 1) / 2] * 3

    for name, call in calls(me, world).items():
        for argument, tensor in {**call.given, **call.written}.items():
            odd = {
                kind: make(tensor)
                for kind, make in walk.WRONG.items()
                if kind != "sparse" or tensor.dtype.itemsize > 1
            }
            odd["shifted and freed"] = walk.shifted(tensor)
            odd["shifted and freed"].untyped_storage().resize_(0)
            if len(call.given) + len(call.written) > 1:
                # Another type of a single tensor is another call, which is nobody's fault.
                odd["of another type"] = walk.of_another_type(tensor)
            if argument in call.written:
                odd["expanded"] = walk.expanded(tensor)
                odd["overlapping"] = walk.overlapping(tensor)
            for kind, given in odd.items():
                if kind == "None" and (argument in OPTIONAL or name.startswith("ops")):
                    continue
                # Operators of torch take tensors alone: torch refuses others before a call of ours.
                is_operator = name.startswith("ops") or name.endswith("_into_")
                is_others = not isinstance(given, torch.Tensor) or kind in ("meta", "sparse", "fake")
                if is_operator and is_others:
                    continue
                found = walk.wrong_on_one_rank(
                    me,
                    culprit,
                    call,
                    functools.partial(call, **{argument: given}),
                    following,
                )
                if found:
                    failures.append(f"{name}, {argument} {kind}: {found:.300}")
                    if "seconds" in found or "has failed" in found:
                        return failures
    return failures


@pytest.mark.parametrize("culprit", [0, 1])
def test_what_no_fused_call_takes_is_an_error_on_every_rank_at_once(tmp_path, culprit):
    for failures in values(2, wrong, str(tmp_path), culprit, limit=400):
        assert not failures, "\n".join(failures)


class Stopped(BaseException):
    """Error that ends a call, as Ctrl-C does."""


class Stop(torch.overrides.TorchFunctionMode):
    """Raises at the nth call of torch, once a call of ours has found its communicator."""

    def __init__(self, nth, monkeypatch):
        super().__init__()
        self.left, self.is_open = nth, False
        enter = Preparation.__enter__

        def entered(preparation):
            self.is_open = True
            return enter(preparation)

        monkeypatch.setattr(Preparation, "__enter__", entered)

    def __torch_function__(self, function, types, arguments=(), named=None):
        if self.is_open:
            if self.left == 0:
                raise Stopped
            self.left -= 1
        return function(*arguments, **(named or {}))


def stopped(group, folder, culprit):
    me, world = begin(group, folder)
    failures = []
    for name, call in calls(me, world).items():
        call()
        for nth in range(400):
            begun, is_stopped, raised = time.monotonic(), torch.zeros(1), None
            with pytest.MonkeyPatch.context() as patch:
                try:
                    with Stop(nth, patch) if me == culprit else contextlib.nullcontext():
                        call()
                except Stopped:
                    is_stopped += 1
                except Exception as error:
                    raised = error
            if time.monotonic() - begun > walk.AT_ONCE:
                failures.append(f"{name}, {nth}: late")
            # Behind its last call, what happens to a rank is no business of the others.
            if raised is not None and not isinstance(raised, symmpool.DivergedError):
                failures.append(f"{name}, {nth}: {raised!r:.300}")
            try:
                symmpool.all_reduce(is_stopped)
            except symmpool.Error as error:
                failures.append(f"{name}, {nth}: next call: {error!r:.300}")
                return failures
            if not is_stopped.item():
                break
    return failures


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_rank_that_is_stopped_before_its_call_stops_the_others_at_once(tmp_path, culprit):
    for failures in values(2, stopped, str(tmp_path), culprit, limit=400):
        assert not failures, "\n".join(failures)
