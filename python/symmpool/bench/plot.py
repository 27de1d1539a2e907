"""Results as a picture: microseconds per call over bytes, both logarithmic, and below them how much longer
the best contender takes. The caption has versions and the date, as pictures travel without their reports."""

from symmpool.bench.session import where
from symmpool.bench.table import show_size


def require(path):
    """matplotlib; or SystemExit, which says how to install it, or which kinds of pictures it can write.
    Called before anything is measured."""
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit(
            "--plot needs matplotlib, which cannot be imported: pip install matplotlib, or 'symmpool[plot]'"
        ) from error
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in kinds:
        raise SystemExit(f"{path}: unknown kind of picture; there are .{', .'.join(sorted(kinds))}")
    return matplotlib


def label(name):
    """A contender's name in a picture, where "ours" is called symmpool."""
    return name.replace("ours", "symmpool", 1) if name.split()[0] == "ours" else name


def caption(facts):
    """The line below a picture: what was measured on which machine, with which versions, and when."""
    day = facts["measured_at"][:10]
    forms = "; each contender in its best form of CUDA graphs and eager calls" if facts["nccl"] else ""
    return f"symmpool {facts['symmpool']}, {where(facts)}; {day}{forms}"


def points(rows, name, value):
    """(bytes, value) of a contender, for all rows that have a value."""
    found = [(row.size, value(row, name)) for row in rows]
    return [(size, each) for size, each in found if each is not None and each > 0]


def ratios(rows, ours, peers, value):
    """(bytes, the fastest contender's time divided by symmpool's fastest)."""
    found = []
    for row in rows:
        own, theirs = (
            min((each for name in names if (each := value(row, name)) is not None and each > 0), default=None)
            for names in (ours, peers)
        )
        if own and theirs:
            found.append((row.size, theirs / own))
    return found


def microseconds(row, name):
    return row.microseconds(name)


def save(path, panels, ours, peers, title, facts, value=microseconds, axis="bytes per rank"):
    """Writes the picture, of the kind that the ending of `path` says: .png, .svg, .pdf. `panels` maps titles
    to rows. Panels stand side by side, each with times above and ratios below."""
    matplotlib = require(path)
    matplotlib.use("Agg")
    from matplotlib import pyplot

    count = len(panels)
    # Text in SVG stays text, so that it can be searched.
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure, grid = pyplot.subplots(
            2, count, figsize=(max(9, 5.5 * count), 7.5), sharex="col", squeeze=False,
            gridspec_kw={"height_ratios": [3, 1]},
        )  # fmt: skip
        for (kind, rows), (time_axes, ratio_axes) in zip(panels.items(), grid.T):
            _draw(kind, rows, ours, peers, value, time_axes, ratio_axes)
            ratio_axes.set_xlabel(axis)
        grid[0][0].set_ylabel("microseconds per call (slowest rank)")
        grid[1][0].set_ylabel("best contender / symmpool")
        grid[0][0].legend()
        figure.suptitle(title)
        figure.text(0.5, 0.01, caption(facts), ha="center", fontsize=8)
        figure.tight_layout(rect=(0, 0.03, 1, 1))
        figure.savefig(path)
        pyplot.close(figure)


def _draw(kind, rows, ours, peers, value, time_axes, ratio_axes):
    """Draws one panel: the times of all contenders, and how much longer the best contender takes."""
    for name in [*peers, *ours]:
        if found := points(rows, name, value):
            style = {"linewidth": 2.5, "marker": "o"} if name in ours else {"marker": "."}
            time_axes.plot(*zip(*found), label=label(name), **style)
    if found := ratios(rows, ours, peers, value):
        ratio_axes.plot(*zip(*found), color="black", marker="o")
        for size, ratio in found:
            offset = {"textcoords": "offset points", "xytext": (0, 5), "ha": "center", "fontsize": 7}
            ratio_axes.annotate(f"{ratio:.2f}", (size, ratio), **offset)
    ratio_axes.axhline(1, color="gray", linestyle="--", linewidth=1)
    ratio_axes.margins(y=0.3)
    sizes = sorted({row.size for row in rows})
    time_axes.set_xscale("log", base=2)
    time_axes.set_yscale("log")
    ratio_axes.set_xticks(sizes, [show_size(size) for size in sizes], rotation=45, ha="right")
    if kind:
        time_axes.set_title(kind)
    for axes in (time_axes, ratio_axes):
        axes.grid(True, which="both", alpha=0.3)


def panels_by(rows, kind):
    """Rows by the value of `kind` for each, in their order."""
    found = {}
    for row in rows:
        found.setdefault(kind(row), []).append(row)
    return found
