"""Tests of the properties of calls that ranks compare, and of those that may differ: docs/python.md has the
table that these cases are.

In each case all ranks make a call, and rank 1's differs in one thing. COMPARED: every rank raises
DivergedError, and the next call is right. FREE: every rank has the result that it has without the difference.
"""

import torch
from ranks import values
from test_torch_distributed import begin

import symmpool
from symmpool import experts, fused

COMPARED, FREE = "compared", "free"


def collectives(me, world, pool):
    """Cases by call: a function that makes it, and by what differs the change and its outcome."""
    x = torch.arange(8.0) + me
    inside = pool.zeros(8)
    pool.commit()

    def reduced(odd, change):
        given = {"op": "sum", "dtype": torch.float32, "count": 8, **(change if odd else {})}
        y = x[: given["count"]].to(given["dtype"], copy=True)
        if given.get("out"):
            out = torch.empty_like(y)
            symmpool.all_reduce(y, given["op"], pool, out=out, algorithm=given.get("algorithm"))
            return [out]
        if given.get("inside"):
            y = inside.copy_(y)
        if given.get("strided"):
            y = torch.stack([y, y], dim=1)[:, 0]
        if given.get("shape"):
            y = y.view(2, 4)
        work = symmpool.all_reduce(
            y, given["op"], pool, given.get("async", False), algorithm=given.get("algorithm")
        )
        if work is not None:
            work.wait()
        return [y.flatten().clone()]

    def scattered(odd, change):
        given = {"op": "sum", "dtype": torch.float32, "count": 8, **(change if odd else {})}
        y = x[: given["count"]].to(given["dtype"])
        out = torch.empty(y.numel() // world, dtype=y.dtype)
        symmpool.reduce_scatter_tensor(out, y, given["op"], pool)
        return [out]

    def gathered(odd, change):
        given = {"dtype": torch.float32, "count": 8, **(change if odd else {})}
        y = x[: given["count"]].to(given["dtype"])
        out = torch.empty(y.numel() * world, dtype=y.dtype)
        symmpool.all_gather_into_tensor(out, y, pool)
        return [out]

    def sent(odd, change):
        given = {"dtype": torch.float32, "count": 8, "src": 0, **(change if odd else {})}
        y = x[: given["count"]].to(given["dtype"], copy=True)
        symmpool.broadcast(y, given["src"], pool)
        return [y]

    def exchanged(odd, change):
        given = {"dtype": torch.float32, "count": 8, **(change if odd else {})}
        y = x[: given["count"]].to(given["dtype"])
        out = torch.empty_like(y)
        half = given["count"] // world
        sizes = [[half] * world] * 2 if given.get("sizes") is True else [None, None]
        if isinstance(given.get("sizes"), tuple):
            sizes = given["sizes"]
        symmpool.all_to_all_single(out, y, *sizes, group=pool)
        return [out]

    def rows(odd, change):
        given = {"dtype": torch.float32, "row": 2, "splits": torch.int64, **(change if odd else {})}
        y = x.to(given["dtype"]).view(-1, given["row"])
        out = torch.zeros(8, given["row"], dtype=y.dtype)
        symmpool.all_to_all_v(out, y, torch.tensor([1] * world, dtype=given["splits"]), group=pool)
        return [out]

    def another(odd, change):
        if odd:
            symmpool.barrier(pool)
        else:
            symmpool.all_reduce(x.clone(), group=pool)
        return []

    return {
        "all_reduce": (
            reduced,
            {
                "type": ({"dtype": torch.int32}, COMPARED),
                "length": ({"count": 7}, COMPARED),
                "op": ({"op": "max"}, COMPARED),
                "op by bits": ({"op": "bor", "dtype": torch.int32}, COMPARED),
                "another algorithm": ({"algorithm": "one_shot"}, COMPARED),
                "memory of the pool": ({"inside": True}, COMPARED),
                "in place or not": ({"out": True}, COMPARED),
                "shape": ({"shape": True}, FREE),
                "strides": ({"strided": True}, FREE),
                "async_op": ({"async": True}, FREE),
            },
        ),
        "reduce_scatter_tensor": (
            scattered,
            {
                "type": ({"dtype": torch.int32}, COMPARED),
                "length": ({"count": 6}, COMPARED),
                "op": ({"op": "max"}, COMPARED),
            },
        ),
        "all_gather_into_tensor": (
            gathered,
            {"type": ({"dtype": torch.int32}, COMPARED), "length": ({"count": 7}, COMPARED)},
        ),
        "broadcast": (
            sent,
            {
                "type": ({"dtype": torch.int32}, COMPARED),
                "length": ({"count": 7}, COMPARED),
                "root": ({"src": 1}, COMPARED),
            },
        ),
        "all_to_all_single": (
            exchanged,
            {
                "type": ({"dtype": torch.int32}, COMPARED),
                "length": ({"count": 6}, COMPARED),
                "sizes or equal parts": ({"sizes": True}, FREE),
                "sizes of what is sent": ({"sizes": ([4, 4], [3, 4])}, COMPARED),
                "sizes of what is received": ({"sizes": ([3, 4], [4, 4])}, COMPARED),
            },
        ),
        "all_to_all_v": (
            rows,
            {
                "type": ({"dtype": torch.int32}, COMPARED),
                "length of a row": ({"row": 4}, COMPARED),
                "type of the splits": ({"splits": torch.int32}, FREE),
            },
        ),
        "any": (another, {"another collective": ({}, COMPARED)}),
    }


def norms(me, world, pool):
    shared = torch.Generator().manual_seed(3)
    torch.manual_seed(me)
    usual = {
        "x": torch.randn(4, 128),
        "residual": torch.randn(4, 128),
        "weight": torch.randn(128, generator=shared),
        "bias": torch.randn(128, generator=shared),
        "eps": 1e-6,
        "weight_bias": 0.0,
        "quant": None,
        "algorithm": "auto",
    }

    def call(odd, change, **base):
        given = {**usual, **base, **(change if odd else {})}
        given = {name: each() if callable(each) else each for name, each in given.items()}
        found = fused.all_reduce_rms_norm(given.pop("x"), group=pool, **given)
        return [found.out.float(), found.residual, *([found.scale] if found.scale is not None else [])]

    inside = pool.empty(4, 128, dtype=torch.float32).copy_(usual["x"])
    pool.commit()
    per_group = fused.fp8_per_group(layout="column")

    def quantised(odd, change):
        return call(odd, change, quant=fused.fp8_per_group())

    plain = {
        "eps": ({"eps": 1e-5}, COMPARED),
        "weight_bias": ({"weight_bias": 1.0}, COMPARED),
        "a residual or none": ({"residual": None}, COMPARED),
        "a bias or none": ({"bias": None}, COMPARED),
        "a weight or none": ({"weight": None}, COMPARED),
        "quant": ({"quant": fused.fp8_per_token()}, COMPARED),
        "type": ({name: usual[name].half() for name in ("x", "residual", "weight", "bias")}, COMPARED),
        "number of tokens": ({name: usual[name][:3] for name in ("x", "residual")}, COMPARED),
        "length of rows": (
            {name: usual[name][..., :64].contiguous() for name in ("x", "residual", "weight", "bias")},
            COMPARED,
        ),
        # On the CPU there is one; on devices algorithms are compared.
        "algorithm": ({"algorithm": "two_shot"}, FREE),
        "shape of equal rows": ({name: usual[name].view(2, 2, 128) for name in ("x", "residual")}, FREE),
        "outputs given": ({"out": lambda: torch.empty(4, 128)}, FREE),
        "in place": (
            {"residual": (kept := usual["residual"].clone()), "residual_out": kept},
            FREE,
        ),
        # On the CPU peers read rows where they lie; on devices this may differ.
        "memory of the pool": ({"x": inside}, COMPARED),
    }
    scales = {
        "rounding of scales": ({"quant": fused.fp8_per_group(powers_of_two=True)}, COMPARED),
        "a scale for each token": ({"quant": fused.fp8_per_token()}, COMPARED),
        "layout of scales": ({"quant": per_group}, FREE),
        "scales given": ({"quant": lambda: fused.fp8_per_group(torch.empty(4, 1))}, FREE),
        "norm_out": ({"norm_out": lambda: torch.empty(4, 128)}, FREE),
    }
    return {"all_reduce_rms_norm": (call, plain), "quantised all_reduce_rms_norm": (quantised, scales)}


def products(me, world, pool):
    torch.manual_seed(me)
    A, B = torch.randn(4, 16), torch.randn(16, 8)
    usual = {"A": A, "B": B, "dim": 0, "op": "sum", "return_A": True, "algorithm": "auto"}

    def gathered(odd, change):
        given = {**usual, "Bs": [B], **(change if odd else {})}
        how = {"return_A": given["return_A"], "in_front": given.get("in_front", False)}
        found = fused.fused_all_gather_matmul(given["A"], given["Bs"], given["dim"], pool, **how)
        return found[1][:1]

    def scattered(odd, change):
        given = {**usual, **(change if odd else {})}
        if "As" in given:
            return [fused.fused_matmuls_reduce_scatter(given["As"], given["Bs"], "sum", 0, pool)]
        return [fused.fused_matmul_reduce_scatter(given["A"], given["B"], given["op"], given["dim"], pool)]

    def summed(odd, change):
        given = {**usual, **(change if odd else {})}
        return [
            fused.matmul_all_reduce(given["A"], given["B"], given["op"], pool, algorithm=given["algorithm"])
        ]

    def carried(odd, change):
        given = {**usual, **(change if odd else {})}
        return [fused.low_contention_reduce_scatter(given["A"], given["op"], pool)]

    def carried_whole(odd, change):
        given = {**usual, **(change if odd else {})}
        return [fused.low_contention_all_gather(given["A"], pool)]

    longer = torch.cat([A, A])
    double = {"A": A.double(), "B": B.double(), "Bs": [B.double()]}
    halves = {"As": [A[:, :8], A[:, 8:]], "Bs": [B[:8], B[8:]]}
    wide = torch.randn(16, 12)
    return {
        "fused_all_gather_matmul": (
            gathered,
            {
                "type": (double, COMPARED),
                "rows": ({"A": longer}, COMPARED),
                "columns of A": ({"A": A[:, :8], "Bs": [B[:8]]}, COMPARED),
                "dimension": ({"dim": 1, "Bs": [torch.cat([B, B])]}, COMPARED),
                "products or none": ({"Bs": []}, COMPARED),
                "number of Bs": ({"Bs": [B, wide]}, FREE),
                "return_A": ({"return_A": False}, FREE),
                "in_front": ({"in_front": True}, FREE),
            },
        ),
        "fused_matmul_reduce_scatter": (
            scattered,
            {
                "type": (double, COMPARED),
                "rows": ({"A": longer}, COMPARED),
                "columns of B": ({"B": wide}, COMPARED),
                "reduce_op": ({"op": "avg"}, COMPARED),
                "dimension": ({"dim": 1}, COMPARED),
                "inner dimension": ({"A": torch.cat([A, A * 0], 1), "B": torch.cat([B, B])}, FREE),
                "number of products": (halves, FREE),
            },
        ),
        "matmul_all_reduce": (
            summed,
            {
                "type": (double, COMPARED),
                "rows": ({"A": longer}, COMPARED),
                "columns of B": ({"B": wide}, COMPARED),
                "reduce_op": ({"op": "avg"}, COMPARED),
                "algorithm": ({"algorithm": "separate"}, FREE),
                "inner dimension": ({"A": torch.cat([A, A * 0], 1), "B": torch.cat([B, B])}, FREE),
            },
        ),
        "low_contention_reduce_scatter": (
            carried,
            {"type": (double, COMPARED), "rows": ({"A": longer}, COMPARED), "op": ({"op": "avg"}, COMPARED)},
        ),
        "low_contention_all_gather": (
            carried_whole,
            {
                "type": (double, COMPARED),
                "rows": ({"A": longer}, COMPARED),
                "shape of as many elements": ({"A": A.view(4, 4, 4)}, COMPARED),
            },
        ),
    }


def of_experts(me, world, pool):
    hidden, tokens = 128, 8
    buffer = experts.ExpertBuffer(pool, hidden=hidden, experts=4, top_k=2, max_tokens=16, dtype=torch.float32)
    torch.manual_seed(me)
    x = torch.randn(tokens, hidden)
    ids = torch.stack([torch.randperm(4)[:2] for _ in range(tokens)])
    weights = torch.rand(tokens, 2)

    def dispatched(odd, change, **base):
        given = {"layout": "rank", "x": x, "ids": ids, "weights": weights, **base, **(change if odd else {})}
        named = {
            name: given[name]
            for name in ("layout", "quantize", "alignment", "exact", "scales")
            if name in given
        }
        if "out" in given:
            named["out"] = torch.zeros(buffer.rows_by_expert(named.get("alignment", 1)), hidden)
        got, handle = buffer.dispatch(given["x"], given["ids"], given["weights"], **named)
        count = int(got.num_rows)
        rows = got.x[:count].clone().float()
        if named["layout"] == "expert":
            # Expert by expert: rows between them are there for the alignment.
            begins, counts = got.expert_offsets.tolist(), got.expert_counts.tolist()
            rows = torch.cat([got.x[b : b + n] for b, n in zip(begins, counts, strict=False)]).clone().float()
        return got, handle, rows

    def scaled(odd, change):
        given = {"scales": torch.ones(tokens, 1), **(change if odd else {})}
        got, _, rows = dispatched(False, {}, x=x.to(torch.float8_e4m3fn), **given)
        return [rows, got.scales[: int(got.num_rows)].clone()]

    def dispatch(odd, change):
        return [dispatched(odd, change)[2]]

    def quantised(odd, change):
        return [dispatched(odd, change, quantize="fp8")[2]]

    def dispatch_by_expert(odd, change):
        return [dispatched(odd, change, layout="expert")[2]]

    def combined(odd, change, **base):
        got, handle, _ = dispatched(False, {}, **base)
        y = got.x.clone()
        out = torch.empty(tokens, hidden) if odd and "out" in change else None
        given = change.get("weights") if odd else None
        return [buffer.combine(y, handle, out=out, weights=given)]

    def combine_by_expert(odd, change):
        return combined(odd, change, layout="expert")

    _, kept, _ = dispatched(False, {})

    def again(odd, change):
        if odd:
            got, handle, rows = dispatched(False, {})
        else:
            got, handle = buffer.dispatch(x, handle=kept)
            rows = got.x[: int(got.num_rows)].clone()
        return [rows]

    none = torch.full_like(ids, -1)
    return {
        "dispatch": (
            dispatch,
            {
                "layout": ({"layout": "expert"}, COMPARED),
                "quantize": ({"quantize": "fp8"}, COMPARED),
                "weights or none": ({"weights": None}, FREE),
                "type of ids": ({"ids": ids.int()}, FREE),
                "exact": ({"exact": True}, FREE),
                "number of tokens": ({"x": x[:0], "ids": ids[:0], "weights": weights[:0]}, "other rows"),
                "ids": ({"ids": none}, "other rows"),
            },
        ),
        "dispatch with scales": (
            scaled,
            {
                "type of scales": ({"scales": torch.ones(tokens, 1, dtype=torch.int32)}, COMPARED),
                "bytes of scales": ({"scales": torch.ones(tokens, 1, dtype=torch.uint8)}, COMPARED),
            },
        ),
        "quantised dispatch": (
            quantised,
            {"rounding of scales": ({"quantize": "fp8_pow2"}, COMPARED)},
        ),
        "dispatch by expert": (
            dispatch_by_expert,
            {
                "alignment": ({"alignment": 4}, FREE),
                "out": ({"out": True}, FREE),
                "quantize": ({"quantize": "fp8_pow2"}, COMPARED),
            },
        ),
        "combine": (combined, {"out": ({"out": True}, FREE)}),
        "combine by expert": (
            combine_by_expert,
            {"out": ({"out": True}, FREE), "weights given": ({"weights": weights}, COMPARED)},
        ),
        "dispatch with a handle": (again, {"a handle or ids": ({}, COMPARED)}),
    }


FAMILIES = (collectives, norms, products, of_experts)


def walk(group, folder):
    me, world = begin(group, folder)
    pool = symmpool.Pool(device="cpu")
    observed = {}
    for family in FAMILIES:
        for call, (act, cases) in family(me, world, pool).items():
            for what, (change, expected) in cases.items():
                usual = act(False, change)
                try:
                    found = act(me == 1, change)
                    right = len(found) == len(usual) and all(
                        a.numel() == b.numel() and torch.allclose(a.reshape(b.shape), b, atol=1e-5)
                        for a, b in zip(found, usual, strict=True)
                    )
                    outcome = FREE if right else "other values"
                except symmpool.DivergedError:
                    outcome = COMPARED
                except Exception as error:
                    outcome = repr(error)[:300]
                try:
                    y = torch.ones(1)
                    symmpool.all_reduce(y, group=pool)
                    if y.item() != world:
                        outcome += ", and the next call is wrong"
                except symmpool.Error as error:
                    return {**observed, (call, what): (expected, f"{outcome}, then {error!r:.400}")}
                observed[call, what] = (expected, outcome)
    return observed


def test_what_differs_is_compared_or_free(tmp_path):
    found = values(2, walk, str(tmp_path))
    failures = []
    for rank, cases in enumerate(found):
        for (call, what), (expected, outcome) in cases.items():
            free = expected == "other rows" and outcome in (FREE, "other values")
            if outcome != expected and not free:
                failures.append(f"rank {rank}, {call}: {what}: {outcome}, not {expected}")
    assert not failures, "\n".join(failures)
