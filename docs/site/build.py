"""Builds the documentation as one site in target/site, and checks every link of it: `make docs`.

Pages are the repository's documents, the Python API from docstrings and stubs, and the Rust API from
rustdoc. mkdocs checks links between Markdown files; `broken_links` checks the HTML that came of it.
"""

import os
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[2]
PAGES, SITE = ROOT / "target/site-pages", ROOT / "target/site"
DOCUMENTS = (
    "README.md",
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "docs/**/*.md",
    "examples/README.md",
    "collectives/kernels/symmpool/README.md",
    "docs/pictures/*",
)
CRATES = ("symmpool_allocator", "symmpool_collectives")

#: What programs import, a page each.
MODULES = (
    "symmpool",
    "symmpool.ops",
    "symmpool.backend",
    "symmpool.handle",
    "symmpool.symmetric_memory",
    "symmpool.fused",
    "symmpool.experts",
    "symmpool.deep_ep",
    "symmpool.deep_ep.utils",
    "symmpool.language",
    "symmpool.language.library",
    "symmpool.kernels",
    "symmpool.engines",
    "symmpool.engines.vllm",
    "symmpool.engines.sglang",
    "symmpool.engines.custom_allreduce",
    "symmpool.engines.nccl_communicator",
    "symmpool.engines.flashinfer_comm",
    "symmpool.engines.fused_moe",
    "symmpool.errors",
    "symmpool.doctor",
    "symmpool.bench",
    "symmpool.tune",
)
#: Rooms of the package that nobody imports from outside: the modules above show what is theirs.
INNER = ("collectives", "communicators", "groups", "memory", "plugins", "torch_backend")

RUST = """\
# Rust and C

From rustdoc, with every public item:

| crate | begins with |
| --- | --- |
| [`symmpool_allocator`](../rust/symmpool_allocator/index.html) \
| [`Group`](../rust/symmpool_allocator/struct.Group.html), \
[`Pool`](../rust/symmpool_allocator/struct.Pool.html), \
[`Block`](../rust/symmpool_allocator/struct.Block.html), \
[`Driver`](../rust/symmpool_allocator/driver/struct.Driver.html), \
[`Error`](../rust/symmpool_allocator/struct.Error.html) |
| [`symmpool_collectives`](../rust/symmpool_collectives/index.html) \
| [`Communicator`](../rust/symmpool_collectives/struct.Communicator.html), \
[`CommunicatorOptions`](../rust/symmpool_collectives/struct.CommunicatorOptions.html), \
[`ReduceOp`](../rust/symmpool_collectives/enum.ReduceOp.html) |

The C API is documented in its header, `ffi/include/symmpool.h`; `ffi/tests/program.c` and
`ffi/tests/experts.c` use all of it.
"""


def gather():
    """Puts all pages into one folder, as they lie in the repository."""
    shutil.rmtree(PAGES, ignore_errors=True)
    for pattern in DOCUMENTS:
        for path in ROOT.glob(pattern):
            to = PAGES / path.relative_to(ROOT)
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, to)
    shutil.copyfile(ROOT / "docs/site/site.css", PAGES / "site.css")
    (PAGES / "reference").mkdir()
    for module in MODULES:
        (PAGES / f"reference/{module}.md").write_text(f"# {module}\n\n::: {module}\n")
    (PAGES / "reference/rust.md").write_text(RUST)


def rustdoc():
    """Documents the crates that Rust programs use, and puts that among the pages."""
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    # What was documented with private items, by tests, is not to be found here.
    shutil.rmtree(target / "doc", ignore_errors=True)
    crates = [word for crate in CRATES for word in ("-p", crate.replace("_", "-"))]
    subprocess.run(["cargo", "doc", "-q", "--no-deps", "--all-features", *crates], cwd=ROOT, check=True)
    shutil.copytree(target / "doc", PAGES / "rust")


class Links(HTMLParser):
    """The links of a page, and the anchors that others may name."""

    def __init__(self, text):
        super().__init__()
        self.links, self.anchors = set(), set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            if name in ("href", "src") and value and not (tag == "link" and "preconnect" in str(attributes)):
                self.links.add(value)
            elif name in ("id", "name") and value:
                self.anchors.add(value)


def broken_links(site, skip=("rust",)):
    """Every link within a site that leads nowhere, as (page, link). Pages below the folders in `skip` may be
    linked to, but are not looked through: rustdoc has checked its own."""
    pages = {}

    def page(path):
        if path not in pages:
            pages[path] = Links(path.read_text(errors="replace"))
        return pages[path]

    broken = []
    for path in sorted(site.rglob("*.html")):
        if path.relative_to(site).parts[0] in skip:
            continue
        for link in sorted(page(path).links):
            url = urlsplit(link)
            if url.scheme or url.netloc:
                continue
            to = site / url.path.lstrip("/") if url.path.startswith("/") else path.parent / unquote(url.path)
            to = path if not url.path else to / "index.html" if to.is_dir() else to
            anchor = unquote(url.fragment)
            known = not anchor or to.suffix != ".html" or (to.exists() and anchor in page(to).anchors)
            if not to.exists() or not known:
                broken.append((str(path.relative_to(site)), link))
    return broken


def main():
    gather()
    rustdoc()
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python"), "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "-q", "--strict", "-f", "docs/site/mkdocs.yml"]
    status = subprocess.run(command, cwd=ROOT, env=environment).returncode
    if status:
        return status
    broken = broken_links(SITE)
    for name, link in broken:
        print(f"{name}: {link} leads nowhere", file=sys.stderr)
    if not broken:
        print(
            f"{SITE.relative_to(ROOT)}/index.html: {len(list(SITE.rglob('*.html')))} pages, every link holds"
        )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
