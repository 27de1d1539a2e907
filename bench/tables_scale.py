"""Tables and the picture of docs/scale.md: what a model predicts of collectives over hosts, from costs that
`bench hosts` measured, and by how much it was off there."""

import importlib.util
import sys
from html import escape
from math import ceil, floor, log2, log10
from statistics import median

import charts
from cells import RESULTS, ROOT, figure, load, size, table


def model():
    """The module of the package that has the model, which needs no other part of it."""
    spec = importlib.util.spec_from_file_location("scale", ROOT / "python/symmpool/bench/scale.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


scale = model()
#: Reports of pretended hosts that have as many ranks.
PRETENDED = ("hosts_2x4", "hosts_4x2")
#: Others: of different numbers of ranks, of one rank each, and one host.
OTHERS = ("hosts_3and1", "hosts_4x1", "hosts_1x4")
#: Calls of experts over pretended hosts.
EXPERTS = ("experts_2x2", "experts_2x4")
RANKS = 8
HOSTS = [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
SIZES = [4 << 10, 256 << 10, 16 << 20, 256 << 20]
#: A network that is given: seconds of a step and of each further message, and bytes a second of one
#: connection and of a host.
STEP, PEER, ONE, ALL = 20e-6, 2e-6, 3e9, 12.5e9


def costs():
    """Inside a host those of ranks that have cores of their own, as measured; between hosts those of the
    network. A small all-reduce is a handshake; in a large one each of `n` ranks reads and writes
    `3 + 1 / n` times its bytes."""
    entries = [entry for entry in load("host") if entry["op"] == "all_reduce"]
    ranks = max(entry["ranks"] for entry in entries)
    times = {entry["bytes"]: entry["ours_us"] * 1e-6 for entry in entries if entry["ranks"] == ranks}
    small, large = min(times), max(times)
    return scale.Costs(
        handshake=times[small],
        byte=(times[large] - times[small]) / (large * (3 + 1 / ranks)),
        step=STEP,
        peer=PEER,
        alone=1 / ONE,
        leaving=1 / ALL,
    )


def milliseconds(seconds):
    return f"{figure(seconds * 1e3)} ms"


def scale_predicted():
    """Time of an all-reduce, and what takes most of it, for numbers of hosts and sizes."""
    given = costs()
    short = {"handshakes": "handshakes", "inside": "inside", "between": "between"}
    rows = []
    for hosts in HOSTS[::3]:
        found = [scale.predict("all_reduce", each, hosts, RANKS, given) for each in SIZES]
        cells = [f"{milliseconds(phases.total)}, {short[phases.bound]}" for phases in found]
        rows.append([f"{hosts:,}", *cells])
    return table([f"hosts of {RANKS}", *map(size, SIZES)], rows)


def reports():
    return [(name, load(name)) for name in PRETENDED if (RESULTS / f"{name}.json").exists()]


def scale_errors():
    """Predicted and measured times of pretended hosts."""
    rows, errors, where = [], [], []
    for _, report in reports():
        shown = f"{len(report['hosts'])} x {len(report['hosts'][0])}"
        for entry, phases in zip(report["results"], report["predicted"], strict=True):
            total = sum(phases[name] for name in ("handshakes", "inside", "between")) * 1e3
            ours = entry["figures"]["ours"]["us"] / 1e3
            errors.append(abs(phases["off"]))
            cells = [entry["operation"].replace("_", "-"), size(entry["bytes"])]
            rows.append([shown, *cells, figure(total), figure(ours), f"{phases['off']:+.0%}"])
        where.append(
            f"{shown}, torch {report['torch']}, {report['cores']} cores, {report['measured_at'][:10]}"
        )
    head = ["hosts x ranks", "call", "bytes", "predicted ms", "measured ms", "off by"]
    return f"{'; '.join(where)}. Median error {median(errors):.0%}:\n\n{table(head, rows)}"


def scale_costs():
    """The costs that were measured on pretended hosts."""
    names = {
        "handshake": "a handshake inside a host",
        "step": "a step between two hosts",
        "peer": "each further host of a step",
    }
    found = reports()
    rows = [
        [what, *(f"{figure(report['costs'][name] * 1e6)} us" for _, report in found)]
        for name, what in names.items()
    ]
    bytes_ = {
        "byte": "a byte inside, of each rank",
        "alone": "a byte that leaves a host by its leader",
        "leaving": "a byte that leaves a host by all ranks",
    }
    for name, what in bytes_.items():
        rows.append([what, *(f"{figure(report['costs'][name] * 1e9)} ns" for _, report in found)])
    heads = [f"{len(report['hosts'])} x {len(report['hosts'][0])}" for _, report in found]
    return table(["cost", *heads], rows)


def hosts_bars():
    """The bars of `bench hosts` on all layouts that were recorded."""
    rows = []
    for name in (*PRETENDED, *OTHERS):
        if not (RESULTS / f"{name}.json").exists():
            continue
        report = load(name)
        shown = "+".join(str(len(each)) for each in report["hosts"])
        for each in report["bars"]:
            sign = "at least" if each["at_least"] else "at most"
            form = ".1%" if each["what"] == "agreement / call" else ".2f"
            call = each["operation"].replace("_", "-")
            bar = f"{sign} {each['bar']:{form}}"
            verdict = "met" if each["met"] else "missed"
            rows.append(
                [shown, call, size(each["bytes"]), each["what"], f"{each['measured']:{form}}", bar, verdict]
            )
    return table(["ranks of hosts", "call", "bytes", "what", "measured", "bar", ""], rows)


def experts_over_hosts():
    """Calls of experts over pretended hosts, beside gloo's all-to-alls."""
    rows = []
    for name in EXPERTS:
        if not (RESULTS / f"{name}.json").exists():
            continue
        report = load(name)
        shown = " + ".join(str(len(each)) for each in report["hosts"])
        for each in report["results"]:
            ours, theirs = (each["figures"][who]["us"] for who in ("ours", "all-to-all"))
            sent = each["crossed_hosts"]["ours"]
            times = [figure(ours / 1e3), figure(theirs / 1e3), f"{theirs / ours:.2f}"]
            tokens = f"{each['tokens']:,}"
            rows.append([shown, each["case"], tokens, *times, f"{sent['bytes'] / sent['least']:.3f}"])
    heads = ["ranks of hosts", "call", "tokens", "ours, ms", "gloo, ms", "gloo / ours", "bytes / least"]
    return table(heads, rows)


MAKERS = {
    each.__name__: each
    for each in (scale_predicted, scale_errors, scale_costs, hosts_bars, experts_over_hosts)
}

#: How sizes are drawn: class for the colour, dash.
LINES = [("ours", ""), ("nccl", "6 4"), ("torch", "2 3"), ("ours", "9 3 2 3")]
#: What bounds a call, by marker.
BOUNDS = {"handshakes": "up", "inside": "square", "between": "circle"}


def picture():
    """An SVG of the predicted time of all-reduces over the number of hosts: a line for each size, a marker
    for what takes most of the time."""
    given = costs()
    curves = {
        each: [(hosts, scale.predict("all_reduce", each, hosts, RANKS, given)) for hosts in HOSTS]
        for each in SIZES
    }
    times = [phases.total * 1e3 for points in curves.values() for _, phases in points]
    least, most = floor(log10(min(times))), ceil(log10(max(times)))
    left, right, top = charts.LEFT + 10, charts.LEFT + 10 + 560, charts.ABOVE
    bottom = top + charts.HEIGHT

    def across(hosts):
        return left + (log2(hosts) - 1) / 9 * (right - left)

    def down(ms):
        return bottom - (log10(ms) - least) / (most - least) * (bottom - top)

    title = f"All-reduce over hosts of {RANKS} ranks, predicted"
    out = [charts.text(left, 20, title, "title")]
    for power in range(least, most + 1):
        y = down(10.0**power)
        out.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        out.append(charts.text(left - 8, y + 4, f"{10.0**power:g}", anchor="end"))
    for hosts in HOSTS:
        x = across(hosts)
        out.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}"/>')
        out.append(charts.text(x, bottom + 18, f"{hosts:,}", anchor="middle"))
    out.append(f'<rect class="frame" x="{left}" y="{top}" width="{right - left}" height="{bottom - top}"/>')
    labels = []
    for (each, points), (colour, dash) in zip(curves.items(), LINES, strict=True):
        places = [(across(hosts), down(phases.total * 1e3), phases) for hosts, phases in points]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in places)
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        out.append(f'<polyline class="line {colour}" points="{line}"{dashed}/>')
        out += [charts.marker(BOUNDS[phases.bound], x, y, colour) for x, y, phases in places]
        # Labels of lines that end at one height stand one below the other.
        label = places[-1][1] + 4
        while any(abs(label - other) < 14 for other in labels):
            label += 1
        labels.append(label)
        out.append(charts.text(right + 8, label, size(each), "small"))
    out.append(charts.text((left + right) / 2, bottom + 38, "hosts", anchor="middle"))
    middle = (top + bottom) / 2
    out.append(
        f'<text transform="translate(14 {middle:.0f}) rotate(-90)" text-anchor="middle">milliseconds</text>'
    )
    x = left
    words = {"handshakes": "handshakes inside", "inside": "bytes inside", "between": "between hosts"}
    for name, shape in BOUNDS.items():
        out.append(charts.marker(shape, x + 6, bottom + 62, "ours"))
        out.append(charts.text(x + 18, bottom + 66, f"most time: {words[name]}", "small"))
        x += 190
    network = f"{STEP * 1e6:g} us a step, {PEER * 1e6:g} us each further host, {ALL / 1e9:g} GB/s a host"
    out.append(
        charts.text(left, bottom + 88, f"inside as measured with a core for each rank; {network}", "small")
    )
    width, height = right + 80, bottom + 104
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
    body = "\n".join(out)
    return f"{head}\n<title>{escape(title)}</title>\n<style>\n{charts.STYLE}\n</style>\n{body}\n</svg>\n"


PICTURES = {"scale.svg": picture}
