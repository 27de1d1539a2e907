"""Tables of what was measured on GPUs: of 4 of them where that is recorded, else of 2.

Made of bench/results/gpu, which `bench/record_gpu` writes. A bar is what was set as a goal beforehand.
"""

import json
from statistics import median

import cells
from cells import exact, figure, size, table

#: Whose figures are shown.
DEVICE = "h200"
#: Numbers of GPUs, the first that was measured counts.
WORLDS = (4, 2)

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
#: Microseconds of a call at most, by number of GPUs and bytes.
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
#: Microseconds that splits of the device may cost more, up to so many bytes.
SPLITS_BAR, SPLITS_BAR_UP_TO = 1.5, 16 * MIB
#: Microseconds of the host's time.
HOST_BARS = {"Communicator.all_reduce": 5, "symmpool.all_reduce": 5}
RUST_BAR = 3
#: Milliseconds until new memory is a window.
WINDOW_BARS = {
    "ours: commit of 64 MiB": 2,
    "ours: commit of 64 blocks of 8 MiB": 20,
}


def recorded(name, worlds=WORLDS):
    """(number of GPUs, report) of the first of `worlds` that has it; (None, None) if none has."""
    for world in worlds:
        path = cells.RESULTS / f"gpu/{DEVICE}x{world}_{name}.json"
        if path.exists():
            return world, json.loads(path.read_text())
    return None, None


def measured_on(world, report):
    """What stands above a table."""
    words = [f"{world} x {DEVICE.upper()}"]
    words += [f"{what} {report[key]}" for key, what in
              (("torch", "torch"), ("nccl", "NCCL"), ("driver", "driver")) if report.get(key)]  # fmt: skip
    if day := report.get("measured_at", "")[:10]:
        words.append(day)
    return ", ".join(words)


def not_measured(name, worlds):
    return f"Not measured yet: `bench/record_gpu --ranks {worlds[0]} --only {name}`."


def all_reduce(worlds):
    """Ours and the peers of `python -m symmpool bench allreduce`, a row for each size."""
    world, report = recorded("allreduce", worlds)
    if report is None:
        return not_measured("allreduce", worlds)
    peers = [name for name in report["contenders"] if name != "ours"]
    bars = ALL_REDUCE_BARS.get(world)
    rows = []
    for entry in report["results"]:
        times = {name: each["us"] for name, each in entry["figures"].items()}
        ours, rival = times.get("ours"), min((times[name] for name in peers if name in times), default=None)
        bus = entry["figures"]["ours"]["busbw_gb_s"] if ours else None
        rows.append(
            [
                size(entry["bytes"]),
                exact(ours),
                *([figure(bars.get(entry["bytes"]))] if bars else []),
                figure(bus),
                *[exact(times.get(name)) for name in peers],
                exact(rival / ours if rival and ours else None),
            ]
        )
    bar = ["bar us"] if bars else []
    head = ["bytes", "symmpool us", *bar, "busbw GB/s", *peers, "best peer / ours"]
    return f"{measured_on(world, report)}:\n\n{table(head, rows)}"


def all_to_all(worlds):
    """Ours and the peers of `python -m symmpool bench alltoallv`, a row for each matrix and size."""
    world, report = recorded("alltoallv", worlds)
    if report is None:
        return not_measured("alltoallv", worlds)
    names = report["contenders"]
    peers = [name for name in names if not name.startswith("ours")]
    bars = ALL_TO_ALL_BARS.get(world)
    rows = []
    for entry in report["results"]:
        times = {name: each["us"] for name, each in entry["figures"].items()}
        ours, rival = times.get("ours"), min((times[name] for name in peers if name in times), default=None)
        bar = bars.get(entry["bytes"]) if bars and entry["matrix"] == "even" else None
        rows.append(
            [
                entry["matrix"],
                size(entry["bytes"]),
                *[exact(times.get(name)) for name in names],
                *([figure(bar)] if bars else []),
                exact(entry["bound_us"] / ours if ours else None),
                exact(rival / ours if rival and ours else None),
            ]
        )
    columns = [name.replace("ours", "symmpool") + " us" for name in names]
    columns += ["bar us"] if bars else []
    head = ["matrix", "bytes", *columns, "bound / ours", "best peer / ours"]
    return f"{measured_on(world, report)}:\n\n{table(head, rows)}"


def collectives(worlds):
    """Ours and NCCL of `python -m symmpool bench collectives`, a row for each operation and size."""
    world, report = recorded("collectives", worlds)
    if report is None:
        return not_measured("collectives", worlds)
    rows = []
    for entry in report["results"]:
        times = {name: each["us"] for name, each in entry["figures"].items()}
        ours = [times.get(name) for name in ("ours", "ours ordinary")]
        peer = times.get("NCCL")
        ratios = [exact(peer / own if peer and own else None) for own in ours]
        times = [exact(time) for time in (*ours, peer)]
        rows.append([entry["operation"], size(entry["bytes"]), *times, *ratios])
    head = ["operation", "bytes", "symmpool us", "on torch's memory us", "NCCL us"]
    head += ["NCCL / symmpool", "NCCL / on torch's memory"]
    return f"{measured_on(world, report)}:\n\n{table(head, rows)}"


def beside_rust():
    world, rust = recorded("allreduce_rust")
    _, report = recorded("allreduce", (world,))
    if rust is None or report is None:
        return None
    from_rust = {entry["bytes"]: entry["by"].get("auto") for entry in rust["us"]}
    rows = []
    for entry in report["results"]:
        ours = entry["figures"].get("ours", {}).get("us")
        theirs = from_rust.get(entry["bytes"])
        if ours and theirs:
            rows.append([size(entry["bytes"]), exact(ours), exact(theirs), exact(ours / theirs)])
    head = ["bytes", "Python us", "Rust us", "Python / Rust"]
    return "All-reduces in graphs, from Python and from Rust (bar: within 2%)", world, rust, head, rows


def with_scratch():
    world, report = recorded("allreduce_scratch")
    if report is None:
        return None
    bars, rows = ALL_REDUCE_BARS.get(world, {}), []
    peers = [name for name in report["contenders"] if name != "ours"]
    for entry in report["results"]:
        times = {name: each["us"] for name, each in entry["figures"].items()}
        bus = entry["figures"].get("ours", {}).get("busbw_gb_s")
        ours, bar = exact(times.get("ours")), figure(bars.get(entry["bytes"]))
        others = [exact(times.get(name)) for name in peers]
        rows.append([size(entry["bytes"]), ours, bar, figure(bus), *others])
    scratch = size(report["options"]["scratch"])
    head = ["bytes", "symmpool us", "bar us", "busbw GB/s", *peers]
    return f"The largest all-reduces with {scratch} of scratch", world, report, head, rows


def device_splits():
    world, report = recorded("device_splits")
    if report is None:
        return None
    rows = []
    for entry in report["results"]:
        times = {name: each["us"] for name, each in entry["figures"].items()}
        host, device = times.get("ours"), times.get("ours device")
        more = device - host if host and device else None
        bar = SPLITS_BAR if entry["bytes"] <= SPLITS_BAR_UP_TO else None
        rows.append([size(entry["bytes"]), exact(host), exact(device), exact(more), figure(bar)])
    head = ["bytes", "splits of the host us", "of the device us", "more us", "bar us"]
    return "Even all-to-alls with splits in device memory", world, report, head, rows


def overlap():
    world, report = recorded("overlap")
    if report is None:
        return None
    _, windows = recorded("overlap_windows", (world,))
    names, rows = report["contenders"], []
    for memory, each in (("torch's", report), ("windows", windows)):
        for entry in each["results"] if each else []:
            times = {name: found["us"] for name, found in entry["figures"].items()}
            least = times.get("products")
            costs = [times[name] - least if least and name in times else None for name in names]
            rows.append([entry["operation"], size(entry["bytes"]), memory, exact(least), *map(exact, costs)])
    head = ["operation", "bytes", "memory", "products us"]
    head += [f"{name.replace('ours', 'symmpool')} us more" for name in names]
    title = "Collectives beside matrix products, what they add to a step (`symmpool 2`: told of one other)"
    return title, world, report, head, rows


def host():
    world, report = recorded("host")
    if report is None:
        return None
    rows = [[f"`{name}`", exact(us), figure(HOST_BARS.get(name))] for name, us in report["host_us"].items()]
    _, rust = recorded("allreduce_rust", (world,))
    if rust is not None:
        rows.append(["all-reduce from Rust", exact(rust["eager_host_us"]), figure(RUST_BAR)])
    scopes = report["scope_us"]
    torchs = scopes.get("torch.cuda.use_mem_pool")
    for name, us in scopes.items():
        bar = torchs + 1 if name == "with pool" and torchs else None
        rows.append([f"`{name}`, entered and left", exact(us), exact(bar)])
    return f"Host time, calls of {size(report['bytes'])}", world, report, ["call", "us", "bar us"], rows


def windows():
    world, report = recorded("windows")
    if report is None:
        return None
    rows = [
        [name, exact(median(times)), exact(min(times)), figure(WINDOW_BARS.get(name))]
        for name, times in report["milliseconds"].items()
    ]
    rows += [[f"{name}: not measured", "-", "-", "-"] for name in report["missing"]]
    head = ["until new memory is a window", "median ms", "least ms", "bar ms"]
    return "New windows, the slowest rank", world, report, head, rows


def commit():
    world, report = recorded("commit")
    if report is None:
        return None
    results = report["results"]
    rows = [
        [entry["name"], exact(entry["commit_ms"]), figure(entry.get("bar_ms")), exact(entry["alloc_ms"])]
        for entry in results["scenarios"]
    ]
    rows.append(["nothing, asked for", exact(results["empty_commit_ms"]), "-", "-"])
    return "Commits from Rust", world, report, ["commit of", "ms", "bar ms", "allocating it, ms"], rows


def tensor_parallel():
    world, report = recorded("tensor_parallel")
    if report is None:
        return None
    rows = [
        [entry["with"], entry["mode"], f"{entry['tokens_a_second']:,.0f}", f"{entry['last_loss']:.6f}",
         f"{entry['apart']:.1e}" if entry["apart"] else "0"]
        for entry in report["results"]
    ]  # fmt: skip
    head = ["with", "mode", "tokens a second", "last loss", "losses apart"]
    return "`examples/tensor_parallel.py`", world, report, head, rows


def install():
    world, report = recorded("install", (1,))
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
    return title, world, report, head, rows


def wrong_sums():
    world, report = recorded("wrong_sums")
    if report is None or not report["random_programs"]:
        return None
    rows = [
        [entry["with"], entry["sizes"], f"{entry['programs']:,}", f"{entry['wrong_programs']:,}",
         f"{entry['wrong_sums']:,}"]
        for entry in report["random_programs"]
    ]  # fmt: skip
    head = ["memory of NCCL's windows", "sizes", "random programs", "of them wrong", "wrong sums"]
    return "`examples/wrong_sums.py`", world, report, head, rows


def more():
    """All that is recorded beside the two large tables, each with a line that says what it is."""
    makers = (
        beside_rust,
        with_scratch,
        device_splits,
        overlap,
        host,
        windows,
        commit,
        tensor_parallel,
        install,
        wrong_sums,
    )
    parts = []
    for maker in makers:
        made = maker()
        if made is not None:
            title, world, report, head, rows = made
            parts.append(f"{title}; {measured_on(world, report)}:\n\n{table(head, rows)}")
    return "\n\n".join(parts)


MAKERS = {
    "all_reduce_gpu": lambda: all_reduce(WORLDS),
    "all_reduce_gpu2": lambda: all_reduce((2,)),
    "all_to_all_gpu": lambda: all_to_all(WORLDS),
    "collectives_gpu": lambda: collectives(WORLDS),
    "gpu_more": more,
}
