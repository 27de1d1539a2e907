"""Tables that say in short what the others show: ahead of the best contender, and behind."""

from cells import EQUAL, FOUR, TWO, exact, exists, load, recorded, size, table
from tables_models import EXPERT_CASES, TRAINED

KIB, MIB = 1 << 10, 1 << 20
PLACES = (*TWO, *FOUR)
#: The sizes of README.md's table.
SIZES = (64 * KIB, 16 * MIB, 256 * MIB)
OPERATIONS = {
    "all_reduce": "all-reduce",
    "reduce_scatter": "reduce-scatter",
    "all_gather": "all-gather",
    "broadcast": "broadcast",
    "all_to_all": "all-to-all",
}
#: README.md's programs: the report, the kind, the contender, and what it is.
PROGRAMS = (
    ("training", "fsdp", "ours", "training, FSDP2"),
    ("training", "ddp", "ours", "training, DDP"),
    ("training", "tp", "ours", "training, tensor and sequence parallel"),
    ("training_compiled", "tp_compiled", "ours fused", "training, tensor parallel, compiled and fused"),
    ("training", "decode_graph", "ours", "decoding, tensor parallel, in a CUDA graph"),
    ("decoding_compiled", "decode_compiled", "ours fused", "the same, compiled and fused"),
)


def ratio_of(figures, ours, peers):
    """How many times as long as ours the best contender takes; nothing where one of them has no time."""
    times = [figures[name]["us"] for name in peers if name in figures]
    return min(times) / figures[ours]["us"] if times and ours in figures else None


def peers_of(report):
    return [name for name in report["contenders"] if not name.startswith("ours")]


def place_name(place):
    return f"{place[1]} x {place[0].upper()}"


def ratios_of(name, place, cell_of, ours="ours", peers=None):
    """Ratios of a report's entries, by what `cell_of` calls each of them; none where it was not recorded."""
    _, report = recorded(name, (place,))
    entries = report["results"] if report else []
    return {cell_of(each): ratio_of(each["figures"], ours, peers or peers_of(report)) for each in entries}


def all_reduce_ratios(place):
    """All-reduces compared with NCCL and torch, by size; none where torch was not measured."""
    return ratios_of("allreduce", place, lambda entry: entry["bytes"])


def collective_ratios(place, operation, ours="ours"):
    """A collective compared with NCCL's best in windows, or with NCCL's on torch's memory, by size."""
    _, report = recorded("collectives", (place,))
    if report is None:
        return {}
    entries = [entry for entry in report["results"] if entry["operation"] == operation]
    peers = peers_of(report) if ours == "ours" else ["NCCL"]
    return {entry["bytes"]: ratio_of(entry["figures"], ours, peers) for entry in entries}


def readme():
    """README.md's table."""
    rows = []
    sizes = ", ".join(map(size, SIZES))
    for operation, name in OPERATIONS.items():
        cells = []
        for place in PLACES:
            found, note = collective_ratios(place, operation), ""
            if operation == "all_reduce":
                with_torch = all_reduce_ratios(place)
                found, note = with_torch or found, "" if with_torch else " (NCCL alone)"
            each = [exact(found.get(count)) for count in SIZES]
            cells.append(", ".join(each) + note if any(one != "-" for one in each) else "-")
        rows.append([f"{name} of {sizes}", *cells])
    for report_name, kind, contender, name in PROGRAMS:
        cells = []
        for place in PLACES:
            _, report = recorded(report_name, (place,))
            entries = [entry for entry in report["results"] if entry["kind"] == kind] if report else []
            figures = entries[0]["figures"] if entries else {}
            cells.append(exact(figures.get(contender, {}).get("ratio")))
        rows.append([name, *cells])
    return table(["", *map(place_name, PLACES)], rows)


def gpu_benchmarks():
    """(what, compared with whom, where, page, {cell: ratio}) of all that has peers on GPUs."""
    for place in PLACES:
        where = place_name(place)
        named = {f"all-reduce, {size(count)}": each for count, each in all_reduce_ratios(place).items()}
        yield "all-reduces in windows", "NCCL, torch", where, "all-reduce", named
        named = ratios_of(
            "alltoallv", place, lambda entry: f"{entry['matrix']} all-to-all, {size(entry['bytes'])}"
        )
        yield "all-to-alls, any counts", "NCCL, torch", where, "all-to-all", named
        for ours, memory, theirs in (
            ("ours", "in windows", "NCCL, its windows"),
            ("ours ordinary", "on torch's memory", "NCCL"),
        ):
            named = {
                f"{name}, {size(count)}": each
                for operation, name in OPERATIONS.items()
                for count, each in collective_ratios(place, operation, ours).items()
            }
            yield f"collectives {memory}", theirs, where, "collectives", named
        named = ratios_of(
            "overlap_backend",
            place,
            lambda entry: f"{OPERATIONS.get(entry['operation'], entry['operation'])}, {size(entry['bytes'])}",
            peers=["NCCL"],
        )
        yield "steps of products beside a collective", "NCCL", where, "beside-compute", named
        _, report = recorded("training", (place,))
        if report:
            named = {
                TRAINED[entry["kind"]]: entry["figures"].get("ours", {}).get("ratio")
                for entry in report["results"]
            }
            yield "training and decoding, tokens a second", "NCCL", where, "training", named
        yield from model_benchmarks(place)


def model_benchmarks(place):
    """Yields benchmarks of the parts of models: experts, fused calls, and calls in the orders of programs."""
    where = place_name(place)
    named = ratios_of(
        "experts",
        place,
        lambda entry: (
            f"{EXPERT_CASES.get(entry['case'], entry['case'])}, {entry['routing']}, {entry['tokens']} tokens"
        ),
    )
    yield "experts", "NCCL, routing known", where, "experts", named
    named = ratios_of("norms", place, lambda entry: f"{entry['tokens']} rows of {entry['hidden']}")
    yield "all-reduce, residual and norm", "NCCL and torch", where, "fused", named
    named = ratios_of(
        "matmuls",
        place,
        lambda entry: f"{entry['kind']}, {entry['rows']} x {entry['inner']} x {entry['columns']}",
        "ours fused",
        ["NCCL unfused", "torch fused"],
    )
    yield "matrix products with communication", "NCCL, torch's fused", where, "fused", named
    _, report = recorded("tensor_parallel_fused", (place,))
    if report:
        named = {}
        for entry in report["results"]:
            rates = {name: each["tokens_a_second"] for name, each in entry["figures"].items()}
            key = f"{entry['program']}, {entry['tokens']} tokens, {entry['mode']}"
            named[key] = rates["fused"] / rates["NCCL"] if {"fused", "NCCL"} <= set(rates) else None
        yield "layers with fused calls, tokens a second", "NCCL", where, "fused", named
    _, report = recorded("order", (place,))
    if report:
        named = {
            f"{entry['operation']}, {entry['memory']}, {size(entry['bytes'])}, {order}": ratio_of(
                entry["figures"], order, [f"NCCL, {order}"]
            )
            for entry in report["results"]
            for order in report["contenders"]
        }
        yield "calls in the orders of programs", "NCCL", where, "order", named


def host_benchmarks():
    """Yields benchmarks in host memory."""
    for name, where in (
        ("host", "16 cores"),
        ("host_shared_cores", "2 cores, 4 and 8 ranks"),
        ("host_busy_cores", "2 busy cores"),
    ):
        named = {}
        for entry in load(name):
            best = min(entry["peers"].values(), default=None)
            what = OPERATIONS.get(entry["op"], entry["op"])
            key = f"{what}, {entry['ranks']} ranks, {size(entry['bytes'])}"
            named[key] = best / entry["ours_us"] if best else None
        yield "all-reduces and all-to-alls, CPU", "OpenMPI, gloo", where, "host-memory", named
    if exists("host_matrices"):
        named = {}
        for entry in load("host_matrices"):
            best = min(entry["peers"].values(), default=None)
            key = f"{entry['matrix']} all-to-all, {entry['ranks']} ranks, {size(entry['bytes'])}"
            named[key] = best / entry["ours_us"] if best else None
        yield "all-to-alls, any counts, CPU", "OpenMPI, gloo", "16 cores", "host-memory", named
    messages = load("host_messages")["results"]
    named = {
        f"{entry['what']} {entry.get('bytes', '')}, {entry['ranks']} ranks": entry["us"]["gloo"]
        / entry["us"]["symmpool"]
        for entry in messages
    }
    yield "messages and pipelines, CPU", "gloo", "2 cores", "host-memory", named


def benchmarks():
    """All benchmarks that have peers, without the cells in which somebody has no time."""
    for what, theirs, where, page, named in (*gpu_benchmarks(), *host_benchmarks()):
        # Tables show rounded figures; these count alike.
        measured = {cell: round(each, 2) for cell, each in named.items() if each is not None}
        if measured:
            yield what, theirs, where, page, measured


def summary():
    """How often we are ahead, equal and behind, a row for each benchmark."""
    rows = []
    for what, theirs, where, page, measured in benchmarks():
        ratios = sorted(measured.values())
        ahead = sum(each > 1 + EQUAL for each in ratios)
        behind = sum(each < 1 - EQUAL for each in ratios)
        row = [f"[{what}](performance/{page}.md)", where, theirs, ahead, len(ratios) - ahead - behind, behind]
        middle = ratios[len(ratios) // 2]
        rows.append([*row, f"{exact(ratios[0])}, {exact(middle)}, {exact(ratios[-1])}"])
    head = ["what", "where", "compared with", "ahead", "equal", "behind", "least, middle and largest ratio"]
    return table(head, rows)


def behind():
    """Everything in which the best contender is faster, the farthest first."""
    rows = []
    for what, _, where, page, measured in benchmarks():
        found = {cell: each for cell, each in measured.items() if each < 1 - EQUAL}
        if found:
            cells = [f"{cell}: {exact(found[cell])}" for cell in sorted(found, key=found.get)]
            row = [f"[{what}](performance/{page}.md)", where, "; ".join(cells)]
            rows.append((min(found.values()), row))
    return table(["what", "where", "how many times as fast"], [row for _, row in sorted(rows)])


MAKERS = {"readme": readme, "summary": summary, "behind": behind}
