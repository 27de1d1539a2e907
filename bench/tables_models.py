"""Tables of what models are made of: dispatch to experts and combine, and operators that are fused with
compute. In brackets stands a goal for two GPUs that was set beforehand, in microseconds.
"""

from statistics import median

from cells import TWO, exact, figure, recorded

#: Goals of a call on 2 H100s, hidden 7168 and 8 of 256 experts, by what it is and tokens of a rank.
EXPERT_BARS = {
    "dispatch": {128: 12, 512: 30, 4096: 180},
    "dispatch_fp8": {128: 10, 512: 20, 4096: 100},
    "combine": {128: 13, 512: 32, 4096: 190},
    "routed": {1: 10, 8: 12},
    "routed_fp8": {128: 34},
    "exact": {4096: 400},
    "low_latency_dispatch": {128: 18},
    "low_latency_dispatch_fp8": {128: 14},
    "low_latency_combine": {128: 20},
}
#: The same with 24 SMs.
EXPERT_BARS_24 = {"dispatch": {4096: 240}, "dispatch_fp8": {4096: 150}, "combine": {4096: 270}}
EXPERT_CASES = {
    "dispatch": "dispatch, bf16",
    "dispatch_fp8": "dispatch, cast to fp8",
    "combine": "combine, bf16",
    "routed": "dispatch with new routing + combine, bf16",
    "routed_fp8": "dispatch with new routing, cast to fp8 + combine, bf16",
    "exact": "the same in bf16, eager, with exact sizes",
    "low_latency_dispatch": "`low_latency_dispatch`, bf16",
    "low_latency_dispatch_fp8": "`low_latency_dispatch`, cast to fp8",
    "low_latency_combine": "`low_latency_combine`, bf16",
}
#: The same of an all-reduce with residual and RMSNorm, by channels and tokens.
NORM_BARS = {
    4096: {1: 3.0, 8: 3.4, 32: 4.0, 64: 4.8, 128: 6.0, 256: 9.5, 512: 16.5, 1024: 33, 2048: 63},
    8192: {1: 3.2, 8: 3.7, 32: 5.0, 64: 6.5, 128: 9.5, 256: 16.5, 512: 33, 1024: 63, 2048: 123},
}


def with_bar(value, bar):
    return exact(value) if bar is None or value is None else f"{exact(value)} ({bar:g})"


def peers_of(report, most=3):
    return [name for name in report["contenders"] if name != "ours"][:most]


def ours_at(place):
    """The heading of symmpool's times, which have goals on two GPUs."""
    return "symmpool us (goal)" if place in TWO else "symmpool us"


def experts_24(places):
    return experts(places, "experts_24", EXPERT_BARS_24, " with 24 SMs")


def experts(places, name="experts", bars=EXPERT_BARS, how=""):
    place, report = recorded(name, places)
    if report is None:
        return None
    peers = peers_of(report)
    rows = []
    for entry in report["results"]:
        us = {name: each.get("us") for name, each in entry["figures"].items()}
        has_goal = place in TWO and entry["routing"] == "uniform"
        bar = bars.get(entry["case"], {}).get(entry["tokens"]) if has_goal else None
        rows.append(
            [
                EXPERT_CASES.get(entry["case"], entry["case"]),
                entry["routing"],
                entry["tokens"],
                with_bar(us.get("ours"), bar),
                *(exact(us.get(name)) for name in peers),
            ]
        )
    head = ["call", "routing", "tokens of a rank", ours_at(place), *(f"{name} us" for name in peers)]
    shape = report["options"]
    title = (
        f"Experts{how}: hidden {shape['hidden']}, {shape['top_k']} of {shape['experts']} experts a token; "
        "contenders are NCCL's collectives with the routing known"
    )
    return title, place, report, head, rows


def norms(places):
    place, report = recorded("norms", places)
    if report is None:
        return None
    peers = peers_of(report, most=4)
    rows = []
    for entry in report["results"]:
        us = {name: each.get("us") for name, each in entry["figures"].items()}
        bar = NORM_BARS.get(entry["hidden"], {}).get(entry["tokens"]) if place in TWO else None
        peer_cells = [exact(us.get(name)) for name in peers]
        rows.append([entry["hidden"], entry["tokens"], with_bar(us.get("ours"), bar), *peer_cells])
    head = ["hidden", "tokens", ours_at(place), *(f"{name} us" for name in peers)]
    return "All-reduce + residual + RMSNorm in one kernel, bf16", place, report, head, rows


def matmuls(places):
    place, report = recorded("matmuls", places)
    if report is None:
        return None
    kinds = {
        "all_gather": "all-gather + product",
        "reduce_scatter": "product + reduce-scatter",
        "all_gather_fp8": "all-gather + product, fp8",
        "reduce_scatter_fp8": "product + reduce-scatter, fp8",
        "all_reduce": "product + all-reduce",
    }

    def shown(entry, name):
        alone, own = (entry["figures"].get(each, {}).get("us") for each in ("matmul", name))
        return f"{exact(own)} ({alone / own:.2f})" if alone and own else "-"

    names = ["ours fused", "ours unfused", "NCCL unfused", "torch fused"]
    with_one = any("ours one kernel" in entry["figures"] for entry in report["results"])
    names += ["ours one kernel"] * with_one
    rows = [
        [
            kinds.get(entry["kind"], entry["kind"]),
            f"{entry['rows']} x {entry['inner']} x {entry['columns']}",
            exact(entry["figures"]["matmul"]["us"]),
            *(shown(entry, name) for name in names),
        ]
        for entry in report["results"]
    ]
    head = [
        "operation, bf16 or fp8",
        "M x K x N",
        "product alone us",
        "symmpool fused",
        "symmpool",
        "NCCL",
        "torch's fused",
        *["one kernel"] * with_one,
    ]
    title = "Matrix products with communication; in brackets the time of the product alone, divided by it"
    return title, place, report, head, rows


#: What `bench training` calls its kinds.
TRAINED = {
    "fsdp": "FSDP2",
    "ddp": "DDP",
    "tp": "tensor and sequence parallelism",
    "decode": "decoding, tensor parallel",
    "decode_graph": "the same in a CUDA graph",
}
#: Programs of compiled models, in which calls may be fused: the kind with the same goal, and the title.
COMPILED = {
    "training_compiled": ("tp", "Tensor and sequence parallelism, layers compiled"),
    "decoding_compiled": ("decode_graph", "Decoding, tensor parallel, compiled and in a CUDA graph"),
}
#: Goals: at least so many times NCCL's tokens a second, on 2 GPUs.
TRAINING_BARS = {"fsdp": 1.03, "ddp": 1.03, "tp": 1.08, "decode": 1.05, "decode_graph": 1.15}


def training(places):
    place, report = recorded("training", places)
    if report is None:
        return None
    rows = []
    for entry in report["results"]:
        ours, theirs = (entry["figures"].get(name) for name in ("ours", entry["peer"]))
        times = ours["ratio"] if ours else None
        bar, kind = figure(TRAINING_BARS.get(entry["kind"])), TRAINED[entry["kind"]]
        both = [each_round(ours), each_round(theirs), exact(times), bar if place in TWO else "-"]
        rows.append([kind, *both, *(difference(each) for each in (ours, theirs))])
    head = ["program", "symmpool tokens/s", "NCCL tokens/s", "symmpool / NCCL", "bar"]
    head += ["loss difference", "NCCL's own"]
    return trained(report), place, report, head, rows


def training_client(places):
    return losses_read("training_client", places)


def training_client_one(places):
    return losses_read("training_client_one", places)


def losses_read(name, places):
    place, report = recorded(name, places)
    if report is None:
        return None
    rows = []
    for entry in report["results"]:
        ours, theirs = (entry["figures"].get(name) for name in ("ours", entry["peer"]))
        pairs = sorted(ours["pairs"]) if ours else []
        spread = f"{exact(pairs[0])} to {exact(pairs[-1])}" if pairs else "-"
        both = [each_round(ours), each_round(theirs), exact(median(pairs) if pairs else None), spread]
        rows.append([str(entry["threads"]), *both])
    head = ["OMP_NUM_THREADS", "symmpool tokens/s", "NCCL tokens/s", "symmpool / NCCL", "of single pairs"]
    given = report["options"]
    model = f"Hugging Face's Llama of {given['layers']} layers, a vocabulary of {given['vocabulary']:,}"
    title = f"FSDP2 of {model}, AdamW in many kernels, median step of each process"
    return title, place, report, head, rows


def training_compiled(places):
    return compiled("training_compiled", places)


def decoding_compiled(places):
    return compiled("decoding_compiled", places)


def compiled(name, places):
    place, report = recorded(name, places)
    if report is None:
        return None
    kind, title = COMPILED[name]
    rows = []
    for entry in report["results"]:
        for with_, found in entry["figures"].items():
            bar = figure(TRAINING_BARS[kind]) if with_ == "ours fused" and place in TWO else "-"
            rows.append([with_, each_round(found), exact(found["ratio"]), bar, difference(found)])
    head = ["with", "tokens/s", "of NCCL", "bar", "loss difference"]
    return f"{title}. {trained(report)}", place, report, head, rows


def trained(report):
    """Returns the title of the tables of `bench training`: which programs run, and which figures
    the tables show."""
    given = report["options"]
    whose = "Hugging Face's Llama" if given["model"] == "hf" else "A Llama in plain torch"
    title = f"{whose} of {given['layers']} layers, every round, and the largest relative difference"
    return f"{title} of losses, or of what was decoded, from NCCL's first round"


def each_round(found):
    return " ".join(f"{each:,.0f}" for each in found["rounds"]) if found else "-"


def difference(found):
    apart = found and found["apart"]
    return "-" if apart is None else f"{apart:.1e}" if apart else "0"
