"""Which kernels stand in the sources, and whether a report was measured with them."""

import functools
import re
import zlib
from pathlib import Path

from cells import ROOT

#: The folders whose kernels decide what a benchmark finds, by the benchmark's name in its reports. Benchmarks
#: that are not named here run no kernels.
KERNELS_OF = {
    "allreduce": ("all_reduce",),
    "alltoallv": ("all_to_all",),
    "collectives": ("all_reduce", "all_to_all", "broadcast"),
    "overlap": ("all_reduce", "all_to_all", "broadcast"),
    "experts": ("experts",),
    "fused": ("fused",),
    # Its programs are compiled with `symmpool/impl/plan.cuh`.
    "cuda_collectives": ("all_reduce", "symmpool"),
    "training": ("all_reduce", "all_to_all", "broadcast", "fused"),
    "tensor_parallel": ("all_reduce",),
    "tensor_parallel_fused": ("all_reduce", "fused"),
    "host": ("all_reduce",),
}
INCLUDED = re.compile(r'^[ \t]*#[ \t]*include[ \t]*[<"]([^>"]+)[>"]', re.MULTILINE)


def kernel_versions(*roots):
    """Returns the versions of the kernels in the folders of these, as `symmpool._symmpool.built()` does:
    by each folder's name, the CRC-32 of the paths and texts of its files and of the files that they
    include."""
    files = {str(path.relative_to(root)): path for root in roots for path in Path(root).glob("*/**/*.cu*")}
    texts = {name: path.read_text() for name, path in sorted(files.items())}

    def with_headers(path):
        found, left = set(), [path]
        while left:
            name = left.pop()
            if name in texts and name not in found:
                found.add(name)
                left += INCLUDED.findall(texts[name])
        return found

    files = {}
    for path in texts:
        files.setdefault(path.split("/")[0], set()).update(with_headers(path))
    return {folder: _version(texts, names) for folder, names in sorted(files.items())}


def _version(texts, names):
    whole = "".join(f"{name}\0{texts[name]}\0" for name in sorted(names))
    return f"{zlib.crc32(whole.encode()):08x}"


@functools.cache
def of_this_tree():
    return kernel_versions(ROOT / "collectives/kernels", ROOT / "collectives/src/cuda")


def changed_since(report, now=None):
    """Returns a table's remark on the kernels that its report was measured with: nothing if they
    are those of the sources."""
    folders = KERNELS_OF.get(report.get("benchmark"), ())
    if not folders:
        return ""
    recorded, now = report.get("kernels"), now or of_this_tree()
    if recorded is None:
        return "with which kernels is not recorded"
    changed = [folder for folder in folders if recorded.get(folder) != now.get(folder)]
    return f"with older kernels of {', '.join(changed)} than today's" if changed else ""
