"""What a run found as a picture: microseconds a call over bytes, both logarithmic."""

from symmpool.bench.table import show_size


def require(path):
    """matplotlib, or an error that says how to get it, or which pictures there are. Asked before
    anything is measured."""
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit(
            "--plot needs matplotlib, which cannot be imported: pip install matplotlib, or 'symmpool[plot]'"
        ) from error
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in kinds:
        raise SystemExit(f"{path}: no such picture; there are .{', .'.join(sorted(kinds))}")
    return matplotlib


def save(path, rows, ours, peers, title):
    """Writes the picture; the ending of `path` says of which kind: .png, .svg, .pdf."""
    matplotlib = require(path)
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5.5))
    for name in [*peers, *ours]:
        points = [(row.size, row.microseconds(name)) for row in rows if row.rounds.get(name)]
        if points:
            style = {"linewidth": 2.5, "marker": "o"} if name in ours else {"marker": "."}
            axes.plot(*zip(*points), label=name, **style)
    sizes = [row.size for row in rows]
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [show_size(size) for size in sizes], rotation=45, ha="right")
    axes.set_xlabel("bytes a rank")
    axes.set_ylabel("microseconds a call (slowest rank)")
    axes.set_title(title)
    axes.grid(True, which="both", alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
