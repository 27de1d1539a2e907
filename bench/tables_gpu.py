"""Tables of what was measured on GPUs: on 4 of them where that is recorded, else on 2.

They are made from bench/results/gpu, which `bench/record_gpu` writes. A bar is a goal that was set
beforehand. In brackets behind a time stands the form in which it was measured, the best one of that
contender: calls a graph, or eager.
"""

from functools import partial
from statistics import median

import tables_models
from cells import ANY, FOUR, ONE, TWO, exact, figure, recorded, size, table
from kernel_versions import changed_since

#: The note above tables whose times were measured in one form only.
ONE_FORM = """\
Measured in graphs of 100 calls alone, in which NCCL takes up to twice as long for small calls as in shorter
ones; to be measured anew in every form."""

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
#: Goals: at most so many microseconds a call, by number of GPUs and bytes.
ALL_REDUCE_BARS = {
    4: {
        4 * KIB: 2.5,
        16 * KIB: 2.75,
        64 * KIB: 3.2,
        128 * KIB: 3.8,
        256 * KIB: 5.0,
        512 * KIB: 7.2,
        MIB: 9.3,
        4 * MIB: 22.5,
        16 * MIB: 76,
        64 * MIB: 283,
        256 * MIB: 1100,
        GIB: 4290,
    }
}
#: The same for even all-to-alls.
ALL_TO_ALL_BARS = {4: {4 * KIB: 3.5, 64 * KIB: 4.2, MIB: 7.0, 16 * MIB: 40, 64 * MIB: 143, 256 * MIB: 535}}
#: Microseconds that splits on the device may cost more than on the host, up to so many bytes.
SPLITS_BAR, SPLITS_BAR_UP_TO = 1.5, 16 * MIB
#: Microseconds of the host's time.
HOST_BARS = {"Communicator.all_reduce": 5, "symmpool.all_reduce": 5}
RUST_BAR = 3
#: Milliseconds until new memory is a window.
WINDOW_BARS = {
    "ours: commit of 64 MiB": 2,
    "ours: commit of 64 blocks of 8 MiB": 20,
}


def measured_with(place, report):
    """The paragraph's words above a table: where it was measured, and whether its kernels have changed."""
    words = [measured_on(place, report), changed_since(report)]
    return ", ".join(word for word in words if word)


def measured_on(place, report):
    """The devices, versions and date, and the commit where that is recorded."""
    device, world = place
    words = [f"{world} x {device.upper()}"]
    words += [f"{what} {report[key]}" for key, what in
              (("torch", "torch"), ("nccl", "NCCL"), ("driver", "driver")) if report.get(key)]  # fmt: skip
    if day := report.get("measured_at", "")[:10]:
        words.append(day)
    if commit := report.get("commit"):
        words.append(f"commit {commit}")
    return ", ".join(words)


def not_measured(name, places):
    return f"Not measured yet: `bench/record_gpu --ranks {places[0][1]} --only {name}`."


def peers_of(report):
    return [name for name in report["contenders"] if not name.startswith("ours")]


def note(report):
    """A note if peers in the report were measured in one form only, else an empty text."""
    figures = [each for entry in report["results"] for each in entry["figures"].values()]
    return "" if any("form" in each for each in figures) or not peers_of(report) else ONE_FORM


def heading(place, report):
    """The paragraph above a table."""
    said = note(report)
    return measured_with(place, report) + (f".\n{said}" if said else ":")


def timed(figures, name):
    """A contender's time and the form that it was measured in."""
    found = figures.get(name, {})
    form = found.get("form")
    return exact(found.get("us")) + (f" ({form.removeprefix('graph of ')})" if form else "")


def best_peer(report, entry):
    """(time, name) of the fastest contender; (None, None) where none has a time."""
    figures = entry["figures"]
    times = [(figures[name]["us"], name) for name in peers_of(report) if name in figures]
    return min(times, default=(None, None))


def ratio(theirs, ours):
    return exact(theirs / ours if theirs and ours else None)


def all_reduce(places):
    """Our times and those of the peers in `python -m symmpool bench allreduce`, a row for each size."""
    place, report = recorded("allreduce", places)
    if report is None:
        return not_measured("allreduce", places)
    peers, bars = peers_of(report), ALL_REDUCE_BARS.get(place[1])
    rows = []
    for entry in report["results"]:
        figures = entry["figures"]
        ours = figures.get("ours", {})
        rows.append(
            [
                size(entry["bytes"]),
                timed(figures, "ours"),
                *([figure(bars.get(entry["bytes"]))] if bars else []),
                figure(ours.get("busbw_gb_s")),
                *[timed(figures, name) for name in peers],
                ratio(best_peer(report, entry)[0], ours.get("us")),
            ]
        )
    bar = ["bar us"] if bars else []
    head = ["bytes", "symmpool us", *bar, "busbw GB/s", *peers, "best contender / ours"]
    return f"{heading(place, report)}\n\n{table(head, rows)}"


def all_to_all(places):
    """Our times and the peers' in `python -m symmpool bench alltoallv`, a row for each matrix and size."""
    place, report = recorded("alltoallv", places)
    if report is None:
        return not_measured("alltoallv", places)
    names, bars = report["contenders"], ALL_TO_ALL_BARS.get(place[1])
    rows = []
    for entry in report["results"]:
        ours = entry["figures"].get("ours", {}).get("us")
        bar = bars.get(entry["bytes"]) if bars and entry["matrix"] == "even" else None
        rows.append(
            [
                entry["matrix"],
                size(entry["bytes"]),
                *[timed(entry["figures"], name) for name in names],
                *([figure(bar)] if bars else []),
                exact(entry["bound_us"] / ours if ours else None),
                ratio(best_peer(report, entry)[0], ours),
            ]
        )
    columns = [name.replace("ours", "symmpool") + " us" for name in names]
    columns += ["bar us"] if bars else []
    head = ["matrix", "bytes", *columns, "bound / ours", "best contender / ours"]
    return f"{heading(place, report)}\n\n{table(head, rows)}"


def collectives(places):
    """Our times and NCCL's in `python -m symmpool bench collectives`, a row for each operation and size. Our
    time in windows is compared with the better of NCCL's times, and ours on torch's memory with NCCL's."""
    place, report = recorded("collectives", places)
    if report is None:
        return not_measured("collectives", places)
    peers, rows = peers_of(report), []
    for entry in report["results"]:
        figures = entry["figures"]
        ours, ordinary, nccl = (figures.get(name, {}).get("us") for name in ("ours", "ours ordinary", "NCCL"))
        times = [timed(figures, name) for name in ("ours", "ours ordinary", *peers)]
        ratios = [ratio(best_peer(report, entry)[0], ours), ratio(nccl, ordinary)]
        rows.append([entry["operation"], size(entry["bytes"]), *times, *ratios])
    head = ["operation", "bytes", "symmpool us", "on torch's memory us", *[f"{name} us" for name in peers]]
    head += ["best contender / symmpool" if len(peers) > 1 else "NCCL / symmpool", "NCCL / on torch's memory"]
    return f"{heading(place, report)}\n\n{table(head, rows)}"


def collectives_limited(name, places, title, option, shown):
    """How many times longer collectives take with each of a report's limits than without."""
    place, report = recorded(name, places)
    if report is None:
        return None
    amounts, rows = [shown(each) for each in report["options"][option]], []
    for entry in report["results"]:
        row = [entry["operation"], size(entry["bytes"])]
        for name in ("ours", "ours ordinary"):
            whole = entry["figures"].get(name, {}).get("us")
            less = [entry["figures"].get(f"{name} {amount}", {}).get("us") for amount in amounts]
            row += [exact(whole), *(ratio(each, whole) for each in less)]
        rows.append(row)
    more = [f"times as long with {amount}" for amount in amounts]
    head = ["operation", "bytes", "in windows us", *more, "on torch's memory us", *more]
    return title, place, report, head, rows


def collectives_memory(places):
    title = "Collectives of communicators with less device memory than the default"
    return collectives_limited("collectives_memory", places, title, "device_memory", size)


def collectives_sm_budgets(places):
    title = "Collectives whose kernels take fewer SMs than the device has"
    return collectives_limited("collectives_sm_budgets", places, title, "sm_budgets", "{} SMs".format)


def calls_in_order(places):
    """How many times longer calls take in the orders of programs than fresh ones, and NCCL's beside them."""
    place, report = recorded("order", places)
    if report is None:
        return None
    orders, rows = [each for each in report["contenders"] if each != "fresh"], []
    for entry in report["results"]:
        took = {name: found["us"] for name, found in entry["figures"].items()}
        fresh = took.get("fresh")
        row = [entry["operation"], entry["memory"], size(entry["bytes"]), exact(fresh)]
        bases = {name: found.get("base", "fresh") for name, found in entry["figures"].items()}
        row += [ratio(took.get(order), took.get(bases.get(order, "fresh"))) for order in orders]
        rows.append(
            [*row, *(ratio(took.get(f"NCCL, {order}"), took.get(order)) for order in ("fresh", *orders))]
        )
    head = [
        "operation",
        "memory",
        "bytes",
        "fresh us",
        *orders,
        "NCCL / fresh",
        *(f"NCCL / {each}" for each in orders),
    ]
    title = (
        "Calls in the orders of programs (`bench order`): times as long as from a fresh communicator "
        "(kernels and 3 that rest: as with kernels alone), and NCCL's time in the same order beside ours"
    )
    return title, place, report, head, rows


def python_and_rust():
    place, rust = recorded("allreduce_rust")
    _, report = recorded("allreduce", (place,) if place else ())
    if rust is None or report is None:
        return None
    from_rust = {entry["bytes"]: entry for entry in rust["us"]}
    rows = []
    for entry in report["results"]:
        ours = entry["figures"].get("ours", {}).get("us")
        found = from_rust.get(entry["bytes"], {"by": {}})
        theirs, calls = found["by"].get("auto"), found.get("calls", {}).get("auto")
        if ours and theirs:
            from_python = timed(entry["figures"], "ours")
            shown = exact(theirs) + (f" ({calls})" if calls else "")
            rows.append([size(entry["bytes"]), from_python, shown, ratio(ours, theirs)])
    head = ["bytes", "Python us", "Rust us", "Python / Rust"]
    return "All-reduces in graphs, from Python and from Rust (bar: within 2%)", place, rust, head, rows


def with_scratch():
    place, report = recorded("allreduce_scratch")
    if report is None:
        return None
    bars, rows = ALL_REDUCE_BARS.get(place[1], {}), []
    peers = peers_of(report)
    for entry in report["results"]:
        figures = entry["figures"]
        bus, bar = figures.get("ours", {}).get("busbw_gb_s"), figure(bars.get(entry["bytes"]))
        others = [timed(figures, name) for name in peers]
        rows.append([size(entry["bytes"]), timed(figures, "ours"), bar, figure(bus), *others])
    scratch = size(report["options"]["scratch"])
    head = ["bytes", "symmpool us", "bar us", "busbw GB/s", *peers]
    return f"The largest all-reduces with {scratch} of scratch", place, report, head, rows


def device_splits():
    place, report = recorded("device_splits")
    if report is None:
        return None
    rows = []
    for entry in report["results"]:
        times = {name: each["us"] for name, each in entry["figures"].items()}
        host, device = times.get("ours"), times.get("ours device")
        more = device - host if host and device else None
        bar = SPLITS_BAR if entry["bytes"] <= SPLITS_BAR_UP_TO else None
        shown = [timed(entry["figures"], name) for name in ("ours", "ours device")]
        rows.append([size(entry["bytes"]), *shown, exact(more), figure(bar)])
    head = ["bytes", "splits of the host us", "of the device us", "more us", "bar us"]
    return "Even all-to-alls with splits in device memory", place, report, head, rows


#: Collectives of programs and of kernels in documents, and our kernel of the same shape. Large all-gathers
#: into windows go by copy engines; the kernel of all-to-alls moves as much by stores.
OWN_SHAPES = {
    "plan_two_shot": "two_shot_pipeline",
    "plan_two_shot_pull": "two_shot_pull",
    "plan_one_shot": "one_shot_pull",
    "plan_one_shot_ll": "one_shot_ll",
    "plan_two_shot_in_scratch_ll": "two_shot_ll",
    "plan_all_gather": "all_to_all_direct",
    "plan_reduce_scatter": "reduce_scatter",
    "plan_reduce_scatter_pull": "reduce_scatter",
    "plan_reduce_scatter_ll": "reduce_scatter",
    "plan_all_to_all": "all_to_all_direct",
    "native_my_all_gather": "all_gather",
    "native_my_all_gather_of_vectors": "all_gather",
    "native_my_all_gather_of_vectors_ahead": "all_gather",
}


def plans(places):
    place, report = recorded("plans", places)
    if report is None:
        return None
    by_size = {entry["bytes"]: entry["by"] for entry in report["us"]}

    def shown(by, name, ours):
        return f"{exact(by[name])} / {exact(by[ours])}" if name in by and ours in by else "-"

    rows = [
        [f"`{name}`", f"`{ours}`", *(shown(by, name, ours) for by in by_size.values())]
        for name, ours in OWN_SHAPES.items()
        if any(name in by and ours in by for by in by_size.values())
    ]
    head = ["program or kernel", "our kernel", *(f"{size(each)} us" for each in by_size)]
    return "Collectives of one's own, compared with our kernels of the same shape", place, report, head, rows


def overlap_backend(places):
    place, report = recorded("overlap_backend", places)
    if report is None:
        return None
    rows = []
    for entry in report["results"]:
        times = {name: found["us"] for name, found in entry["figures"].items()}
        ours, theirs, least = (times.get(name) for name in ("ours", "NCCL", "products"))
        shown = [exact(least), exact(ours), exact(theirs), ratio(theirs, ours)]
        rows.append([entry["operation"], size(entry["bytes"]), *shown])
    head = ["operation", "bytes", "products us", "with symmpool us", "with NCCL us", "NCCL / symmpool"]
    return "Steps of matrix products beside a collective of the backend", place, report, head, rows


def overlap():
    place, report = recorded("overlap")
    if report is None:
        return None
    _, windows = recorded("overlap_windows", (place,))
    names, rows = report["contenders"], []
    for memory, each in (("torch's", report), ("windows", windows)):
        for entry in each["results"] if each else []:
            times = {name: found["us"] for name, found in entry["figures"].items()}
            least = times.get("products")
            costs = [times[name] - least if least and name in times else None for name in names]
            rows.append([entry["operation"], size(entry["bytes"]), memory, exact(least), *map(exact, costs)])
    head = ["operation", "bytes", "memory", "products us"]
    head += [f"{name.replace('ours', 'symmpool')} us more" for name in names]
    title = "What collectives add to a step of matrix products (`symmpool 2`: with room for another one)"
    return title, place, report, head, rows


def host():
    place, report = recorded("host")
    if report is None:
        return None
    rows = [[f"`{name}`", exact(us), figure(HOST_BARS.get(name))] for name, us in report["host_us"].items()]
    _, rust = recorded("allreduce_rust", (place,))
    if rust is not None:
        rows.append(["all-reduce from Rust", exact(rust["eager_host_us"]), figure(RUST_BAR)])
    scopes = report["scope_us"]
    torchs = scopes.get("torch.cuda.use_mem_pool")
    for name, us in scopes.items():
        bar = torchs + 1 if name == "with pool" and torchs else None
        rows.append([f"`{name}`, entered and left", exact(us), exact(bar)])
    return f"Host time, calls of {size(report['bytes'])}", place, report, ["call", "us", "bar us"], rows


def windows():
    place, report = recorded("windows")
    if report is None:
        return None
    rows = [
        [name, exact(median(times)), exact(min(times)), figure(WINDOW_BARS.get(name))]
        for name, times in report["milliseconds"].items()
    ]
    rows += [[f"{name}: not measured", "-", "-", "-"] for name in report["missing"]]
    head = ["until new memory is a window", "median ms", "least ms", "bar ms"]
    return "New windows, the slowest rank", place, report, head, rows


def commit():
    place, report = recorded("commit")
    if report is None:
        return None
    results = report["results"]
    rows = [
        [entry["name"], exact(entry["commit_ms"]), figure(entry.get("bar_ms")), exact(entry["alloc_ms"])]
        for entry in results["scenarios"]
    ]
    rows.append(["nothing, requested", exact(results["empty_commit_ms"]), "-", "-"])
    return "Commits from Rust", place, report, ["commit of", "ms", "bar ms", "allocating it, ms"], rows


def tensor_parallel():
    place, report = recorded("tensor_parallel")
    if report is None:
        return None
    rows = [
        [entry["with"], entry["mode"], f"{entry['tokens_a_second']:,.0f}", f"{entry['last_loss']:.6f}",
         f"{entry['apart']:.1e}" if entry["apart"] else "0"]
        for entry in report["results"]
    ]  # fmt: skip
    head = ["with", "mode", "tokens a second", "last loss", "loss difference"]
    return "`bench/programs/tensor_parallel.py`", place, report, head, rows


#: Goals: at least so many times the tokens a second of symmpool without fused calls.
FUSED_BARS = {"decode": 1.10, "prefill": 1.08, "training": 1.08}


def tensor_parallel_fused(places):
    place, report = recorded("tensor_parallel_fused", places)
    if report is None:
        return None
    names, rows = report["contenders"], []
    for entry in report["results"]:
        figures = entry["figures"]
        rates = [figures.get(name, {}).get("tokens_a_second") for name in names]
        ours, made = (figures.get(name, {}).get("tokens_a_second") for name in ("symmpool", "fused"))
        apart = max((found["apart"] for found in figures.values()), default=0)
        rows.append(
            [
                entry["program"],
                f"{entry['tokens']:,}",
                entry["mode"],
                *(f"{rate:,.0f}" if rate else "-" for rate in rates),
                ratio(made, ours),
                figure(FUSED_BARS.get(entry["program"])),
                f"{apart:.1e}" if apart else "0",
            ]
        )
    columns = [{"fused": "symmpool fused"}.get(name, name) for name in names]
    head = ["program", "tokens a step", "mode", *columns, "fused / symmpool", "bar", "loss difference"]
    given = report["options"]
    layers = f"{given['layers']} layers of Llama 3 8B's shape" if given["hidden"] == 4096 else "small layers"
    title = f"`bench/programs/tensor_parallel_fused.py`, {layers}, tokens a second"
    return title, place, report, head, rows


def install():
    place, report = recorded("install", ONE)
    if report is None:
        return None
    names = {"torch": "torch", "expandable": "torch, expandable segments", "symmpool": "`symmpool.install()`"}
    rows = [
        [names[which], f"{row['reserved_over_live']:.3f}", exact(row["steps_a_second"]),
         f"{row['rate_over_torch']:.3f}"]
        for which, row in report["results"].items()
    ]  # fmt: skip
    same = "the same losses" if report["same_losses"] else "other losses"
    title = f"Training a small GPT, {same} (bars: at most 1.10, at least 0.99)"
    head = ["allocator", "reserved / peak live", "steps a second", "of torch's"]
    return title, place, report, head, rows


def wrong_sums():
    place, report = recorded("wrong_sums")
    if report is None or not report["random_programs"]:
        return None
    rows = [
        [entry["with"], entry["sizes"], f"{entry['programs']:,}", f"{entry['wrong_programs']:,}",
         f"{entry['wrong_sums']:,}"]
        for entry in report["random_programs"]
    ]  # fmt: skip
    head = ["memory of NCCL's windows", "sizes", "random programs", "of them wrong", "wrong sums"]
    return "`bench/programs/wrong_sums.py`", place, report, head, rows


def in_short(places):
    """All-reduces and even all-to-alls, compared with the best contender of each, at a few sizes."""
    place, sums = recorded("allreduce", places)
    if sums is None:
        return not_measured("allreduce,alltoallv", places)
    rows, sizes = [], (4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB, 256 * MIB)
    for name, report in (("all-reduce", sums), ("all-to-all", recorded("alltoallv", (place,))[1])):
        for entry in report["results"] if report else []:
            ours, (theirs, rival) = entry["figures"].get("ours", {}).get("us"), best_peer(report, entry)
            if entry["bytes"] in sizes and entry.get("matrix", "even") == "even":
                shown = f"{timed(entry['figures'], rival)}, {rival}" if rival else "-"
                own = timed(entry["figures"], "ours")
                rows.append([name, size(entry["bytes"]), own, shown, ratio(theirs, ours)])
    head = ["operation", "bytes", "symmpool us", "best contender us", "best contender / ours"]
    return f"{heading(place, sums)}\n\n{table(head, rows)}"


def everywhere(maker):
    """A table for each kind and number of GPUs."""
    return [partial(maker, (place,)) for place in (*TWO, *FOUR)]


#: What else is recorded, by the table of a document that has it.
MORE = {
    "gpu_all_reduce_more": (python_and_rust, with_scratch),
    "gpu_device_splits": (device_splits,),
    "gpu_memory": everywhere(collectives_memory),
    "gpu_sm_budgets": everywhere(collectives_sm_budgets),
    "gpu_order": everywhere(calls_in_order),
    "gpu_plans": everywhere(plans),
    "gpu_experts": (*everywhere(tables_models.experts), *everywhere(tables_models.experts_24)),
    "gpu_norms": everywhere(tables_models.norms),
    "gpu_matmuls": everywhere(tables_models.matmuls),
    "gpu_training": everywhere(tables_models.training),
    "gpu_training_client": everywhere(tables_models.training_client),
    "gpu_training_client_one": everywhere(tables_models.training_client_one),
    "gpu_compiled": (
        *everywhere(tables_models.training_compiled),
        *everywhere(tables_models.decoding_compiled),
    ),
    "gpu_overlap": (*everywhere(overlap_backend), overlap),
    "gpu_host": (host, windows, commit),
    "gpu_tensor_parallel": (tensor_parallel, *everywhere(tensor_parallel_fused)),
    "gpu_allocation": (install, wrong_sums),
}


def more(name):
    """Tables of what else is recorded, each with a line that says what it is."""
    parts = []
    for maker in MORE[name]:
        made = maker()
        if made is not None:
            title, place, report, head, rows = made
            parts.append(f"{title}; {measured_with(place, report)}:\n\n{table(head, rows)}")
    return "\n\n".join(parts)


MAKERS = {
    "all_reduce_gpu": lambda: all_reduce(ANY),
    "all_reduce_gpu2": lambda: all_reduce(TWO),
    "all_to_all_gpu": lambda: all_to_all(ANY),
    "all_to_all_gpu2": lambda: all_to_all(TWO),
    "collectives_gpu": lambda: collectives(ANY),
    "collectives_gpu2": lambda: collectives(TWO),
    "all_reduce_h100x4": lambda: all_reduce(FOUR[:1]),
    "all_to_all_h100x4": lambda: all_to_all(FOUR[:1]),
    "collectives_h100x4": lambda: collectives(FOUR[:1]),
    "in_short_gpu2": lambda: in_short(TWO),
}
MAKERS |= {name: partial(more, name) for name in MORE}
