"""The code blocks of the documents: what they are, and the programs that they make in their order.

A block of Python begins a program if `<!-- python: NAME -->` stands before it; else it goes on with the one
above it. `<!-- needs GPUs -->` before it says that it runs nowhere else, as the text before it does.
"""

import dataclasses
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]

PAGES = ["README.md", "CONTRIBUTING.md", "examples/README.md", "python/README.md"]
PAGES += ["collectives/kernels/symmpool/README.md"]
PAGES += sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))

#: What blocks may be: each kind has tests.
KINDS = ("python", "cuda", "rust", "c", "sh", "text")

#: The last line of programs of torch, before which further blocks go.
LAST = "dist.destroy_process_group()\n"

BLOCK = re.compile(
    r"(?P<above>[^\n]*\n\n|[^\n]*\n)?(?:<!-- (?P<mark>[^\n]*) -->\n)?"
    r"^```(?P<kind>[^\n]*)\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


@dataclasses.dataclass
class Block:
    """A block of code."""

    page: str
    line: int
    kind: str
    text: str
    mark: str
    #: What the page has before it.
    before: str

    @property
    def place(self):
        return f"{self.page}:{self.line}"

    @property
    def file(self):
        """The file that the page says that this is."""
        named = re.search(r"[Tt]his is `([\w./]+)`[^\n`]*:\s*$", self.before.rstrip())
        return named[1] if named else None

    @property
    def needs_gpus(self):
        return self.mark == "needs GPUs"


def blocks(page, text=None):
    """The blocks of a page in their order."""
    text = (ROOT / page).read_text() if text is None else text
    found = []
    for match in BLOCK.finditer(text):
        at = match.start("kind") - 3
        before = text[: at - len(f"<!-- {match['mark']} -->\n") if match["mark"] else at]
        line = text[:at].count("\n") + 1
        found.append(Block(page, line, match["kind"], match["text"], match["mark"] or "", before))
    assert 2 * len(found) == len(re.findall("^```", text, re.MULTILINE)), f"{page}: a block without an end"
    return found


def programs(page, text=None):
    """The programs of a page by name: the text of each, and what it is called."""
    found, name = {}, None
    for block in blocks(page, text):
        if block.kind != "python" or block.needs_gpus:
            continue
        if block.mark:
            name = block.mark.removeprefix("python: ")
            assert block.mark.startswith("python: ") and name not in found, f"{block.place}: {block.mark}"
            found[name] = [block.file or f"{name}_program.py", ""]
        assert name, f"{block.place} goes on with a program that nothing begins: <!-- python: NAME -->"
        so_far = found[name][1]
        if so_far.endswith(LAST):
            assert "before\n`dist.destroy_process_group()`" in block.before or (
                "before `dist.destroy_process_group()`" in block.before
            ), f"{block.place}: the text must say that it goes before {LAST}"
            so_far, end = so_far.removesuffix(LAST), LAST
        else:
            end = ""
        found[name][1] = f"{so_far}{block.text}{end}"
    return {name: tuple(program) for name, program in found.items()}
