"""Pictures of what was measured on GPUs, as SVG text: time over size, everybody in one picture.

`make tables` writes them to docs/pictures, from the same reports as the tables. Colours follow the reader's
light or dark setting, and every contender has a marker of its own, so that no colour has to be seen.
"""

from html import escape
from math import ceil, floor, log2, log10

import tables_gpu
from cells import ROOT, size

FOLDER = ROOT / "docs/pictures"

#: How contenders of reports are drawn: label, class for the colour, marker, dash.
LOOKS = {
    "ours": ("symmpool", "ours", "circle", ""),
    "ours device": ("symmpool, splits on the device", "ours", "ring", "2 3"),
    "NCCL": ("NCCL", "nccl", "square", ""),
    "NCCL window": ("NCCL, symmetric window", "nccl", "diamond", "6 4"),
    "one-shot": ("torch one-shot", "torch", "up", ""),
    "two-shot": ("torch two-shot", "torch", "down", "6 4"),
    "vdev": ("torch all_to_all_vdev", "torch", "up", ""),
}

#: Dark text and lines on light pages, light ones on dark pages.
STYLE = """\
text { font: 13px system-ui, sans-serif; fill: #24292f; }
.title { font-size: 16px; font-weight: 600; }
.small { font-size: 12px; fill: #57606a; }
.grid { stroke: #d0d7de; } .frame { stroke: #57606a; fill: none; }
.line { fill: none; stroke-width: 1.75; }
.ours { --colour: #0757c2; } .nccl { --colour: #b54708; } .torch { --colour: #1a7f37; }
.line { stroke: var(--colour); } .mark { fill: var(--colour); stroke: var(--colour); }
.line.ours { stroke-width: 3; } .ring { fill: none; stroke-width: 1.75; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; } .small { fill: #9da7b3; }
  .grid { stroke: #353c46; } .frame { stroke: #9da7b3; }
  .ours { --colour: #6cb6ff; } .nccl { --colour: #ffa657; } .torch { --colour: #57d977; }
}"""

WIDTH, HEIGHT = 480, 300
#: What a panel leaves free for its axes: left, right, above (title), below (labels and ratios).
LEFT, RIGHT, ABOVE, BELOW = 58, 28, 34, 94
LEGEND_ROW = 22


def marker(shape, x, y, colour):
    """A contender's mark at a place."""
    if shape in ("circle", "ring"):
        ring = " ring" if shape == "ring" else ""
        return f'<circle class="mark {colour}{ring}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>'
    corners = {
        "square": ((-3.5, -3.5), (3.5, -3.5), (3.5, 3.5), (-3.5, 3.5)),
        "diamond": ((0, -5), (5, 0), (0, 5), (-5, 0)),
        "up": ((0, -5), (4.5, 3.5), (-4.5, 3.5)),
        "down": ((0, 5), (4.5, -3.5), (-4.5, -3.5)),
    }[shape]
    points = " ".join(f"{x + right:.1f},{y + down:.1f}" for right, down in corners)
    return f'<polygon class="mark {colour}" points="{points}"/>'


def text(x, y, words, kind="", anchor="start"):
    kind = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{kind} text-anchor="{anchor}">{escape(words)}</text>'


def times_of(entries, name):
    """(bytes, microseconds) of a contender, where it was measured."""
    found = ((entry["bytes"], entry["figures"].get(name, {}).get("us")) for entry in entries)
    return [(count, us) for count, us in found if us]


def panel(at, title, report, entries, sizes, times):
    """One machine's curves. `sizes` and `times` are the least and largest of all panels."""
    left, right, top, bottom = at + LEFT, at + WIDTH - RIGHT, ABOVE, HEIGHT + ABOVE
    least, most = floor(log10(times[0])), ceil(log10(times[1]))
    first, last = log2(sizes[0]), log2(sizes[1])

    def across(count):
        return left + (log2(count) - first) / (last - first) * (right - left)

    def down(us):
        return bottom - (log10(us) - least) / (most - least) * (bottom - top)

    out = [text(left, 20, title, "title")]
    for power in range(least, most + 1):
        y = down(10**power)
        out.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        out.append(text(left - 8, y + 4, f"{10**power:,}", anchor="end"))
    for number, power in enumerate(range(ceil(first), floor(last) + 1, 2)):
        x = across(2**power)
        out.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}"/>')
        if number % 2 == 0:
            out.append(text(x, bottom + 18, size(2**power), anchor="middle"))
    out.append(f'<rect class="frame" x="{left}" y="{top}" width="{right - left}" height="{bottom - top}"/>')
    # Ours is drawn last, over the others.
    for name in sorted(report["contenders"], key=lambda name: name == "ours"):
        points = [(across(count), down(us)) for count, us in times_of(entries, name)]
        _, colour, shape, dash = LOOKS[name]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        out.append(f'<polyline class="line {colour}" points="{line}"{dashed}/>')
        out += [marker(shape, x, y, colour) for x, y in points]
    out.append(text((left + right) / 2, bottom + 38, "bytes of a rank's input, bf16", anchor="middle"))
    out.append(text(left, bottom + 62, "time of the fastest contender / time of symmpool:", "small"))
    end = 0
    for entry in entries:
        best, ours = tables_gpu.best_peer(report, entry)[0], entry["figures"].get("ours", {}).get("us")
        # Where sizes lie close together some have no room.
        if best and ours and across(entry["bytes"]) > end:
            out.append(text(across(entry["bytes"]), bottom + 80, f"{best / ours:.2f}", "small", "middle"))
            end = across(entry["bytes"]) + 30
    return out


def picture(name, title, matrix=None):
    """An SVG with a panel for two GPUs and, where it is recorded, one for four."""
    panels = []
    for places in (tables_gpu.TWO, (("h200", 4),)):
        place, report = tables_gpu.recorded(name, places)
        if report is not None:
            entries = [entry for entry in report["results"] if entry.get("matrix") == matrix]
            panels.append((place, report, entries))
    every = [(entries, name) for _, report, entries in panels for name in report["contenders"]]
    points = [point for entries, name in every for point in times_of(entries, name)]
    sizes, times = zip(*points, strict=True)
    ranges = (min(sizes), max(sizes)), (min(times), max(times))
    names = [name for name in LOOKS if any(name in report["contenders"] for _, report, _ in panels)]

    out, legend = [], HEIGHT + ABOVE + BELOW + 16
    for number, (place, report, entries) in enumerate(panels):
        heading = f"{title}, {place[1]} x {place[0].upper()}"
        out += panel(number * WIDTH, heading, report, entries, *ranges)
    middle = ABOVE + HEIGHT / 2
    out.append(
        f'<text transform="translate(14 {middle:.0f}) rotate(-90)" text-anchor="middle">'
        "microseconds a call, slowest rank</text>"
    )
    x, y = LEFT, legend
    for name in names:
        label, colour, shape, dash = LOOKS[name]
        wide = 68 + 7 * len(label)
        if x + wide > len(panels) * WIDTH:
            x, y = LEFT, y + LEGEND_ROW
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        out.append(f'<polyline class="line {colour}" points="{x},{y - 4} {x + 34},{y - 4}"{dashed}/>')
        out += [marker(shape, x + 17, y - 4, colour), text(x + 42, y, label)]
        x += wide
    y += 6
    for place, report, _ in panels:
        said = tables_gpu.measured_on(place, report)
        form = "each contender in its best of several forms: CUDA graphs of 1 to 100 calls, or no graph"
        if tables_gpu.note(report):
            form = "in graphs of 100 calls, in which NCCL's small calls take up to twice as long"
        for line in (f"{said}:", form):
            y += 18
            out.append(text(LEFT + (16 if line is form else 0), y, line, "small"))
    height, width = y + 12, max(1, len(panels)) * WIDTH
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
    about = f"{title}: microseconds a call over bytes, of {', '.join(LOOKS[name][0] for name in names)}"
    body = "\n".join(out)
    return f"{head}\n<title>{escape(about)}</title>\n<style>\n{STYLE}\n</style>\n{body}\n</svg>\n"


PICTURES = {
    "all_reduce_gpu.svg": lambda: picture("allreduce", "All-reduce"),
    "all_to_all_gpu.svg": lambda: picture("alltoallv", "All-to-all", "even"),
}
