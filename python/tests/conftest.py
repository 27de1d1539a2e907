"""What all tests share, and which files this machine has a use for."""

import contextlib
import gc
import importlib.util
import os
import sys
import tempfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

# The package does without torch, and so do its tests: these come on top where torch is there.
TORCH = importlib.util.find_spec("torch") is not None
collect_ignore_glob = [] if TORCH else ["test_torch*.py"]

#: Where processes that tests start put what they do not keep.
TEMPORARY = tempfile.TemporaryDirectory(prefix="symmpool-tests-")
tempfile.gettempdir()  # this process's own place stays as it is
os.environ["TMPDIR"] = TEMPORARY.name

# torch asks the name server who is at the ends of every connection to a store. Where one answers late, or
# not always, each question that gets lost holds up all ranks for 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


def pytest_collection_modifyitems(items):
    """The longest test begins first, so that nobody waits for it alone in the end."""
    items.sort(key=lambda item: item.path.name != "test_torch_suite.py")


def pytest_terminal_summary(terminalreporter):
    """Says what was left out, which `.ci/run` takes for a failure."""
    if not TORCH:
        terminalreporter.write_line("skipped: torch is not installed, so test_torch*.py are left out")


def remains():
    """What the package could leave behind in this process: mappings of shared memory, descriptors
    of it, files, and what processes that it started left."""
    descriptors = []
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            descriptors.append(os.readlink(f"/proc/self/fd/{entry}"))
    return {
        "mappings": sum("/memfd:symmpool" in line for line in open("/proc/self/maps")),
        "descriptors": sum("/memfd:symmpool" in name for name in descriptors),
        "files": sum("symmpool" in name for name in os.listdir("/dev/shm")),
        # torch's compiler has a cache there, which it keeps.
        "folders": [name for name in os.listdir(TEMPORARY.name) if "inductor" not in name],
    }


@pytest.fixture(autouse=True)
def nothing_remains(request):
    """No test leaves memory behind that other processes could still see."""
    before = remains()
    yield
    # pytest itself still holds what fixtures gave.
    request.node.funcargs.clear()
    gc.collect()
    assert remains() == before
