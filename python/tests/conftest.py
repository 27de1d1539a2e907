"""Fixtures of all tests, and the choice of files that can run on this machine."""

import contextlib
import gc
import getpass
import importlib.metadata
import importlib.util
import os
import sys
import tempfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

# The package works without torch. Files named test_torch* need it.
TORCH = importlib.util.find_spec("torch") is not None
collect_ignore_glob = [] if TORCH else ["test_torch*.py"]
# Before torch 2.14 groups are of a class of ours, and those of torch's own class cannot be tested.
if TORCH and tuple(map(int, importlib.metadata.version("torch").split(".")[:2])) < (2, 14):
    collect_ignore_glob.append("test_torch_python_backend*.py")
# Tests that need packages which `make test` does not fetch are run by their own name: `make test-packages`.
collect_ignore = ["packages"]

#: The folder for temporary files of processes that tests start.
TEMPORARY = tempfile.TemporaryDirectory(prefix="symmpool-tests-")
tempfile.gettempdir()  # fixes this process's own folder, before the variable changes
os.environ["TMPDIR"] = TEMPORARY.name

# torch's compiler would try in every process whether the processor's instructions work, which takes seconds.
# It keeps precompiled headers in the temporary folder, whatever folder its cache is in: here one for all.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
if "TORCHINDUCTOR_CACHE_DIR" in os.environ:
    os.makedirs(os.environ["TORCHINDUCTOR_CACHE_DIR"], exist_ok=True)
    link = Path(TEMPORARY.name) / f"torchinductor_{getpass.getuser()}"
    link.symlink_to(os.environ["TORCHINDUCTOR_CACHE_DIR"])

# Threads of OpenMP spin while they wait for each other, on processors that other ranks need.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# torch resolves the names of both ends of every connection to a store. A name server that does not answer
# would delay all ranks by 5 s each time.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


def pytest_collection_modifyitems(items):
    """Starts the longest test first, so that it does not run alone at the end."""
    items.sort(key=lambda item: item.path.name != "test_torch_suite.py")


def pytest_collection_finish():
    """Leaves what has been imported out of the collections after each test, which would take a quarter of a
    second each."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter):
    """Reports what was left out. `.ci/run` counts that as a failure."""
    if not TORCH:
        terminalreporter.write_line("skipped: torch is not installed, so test_torch*.py are left out")


def remains():
    """Returns what the package could leave behind: mappings and descriptors of shared memory in this process,
    files in shared memory, and temporary folders."""
    descriptors = []
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            descriptors.append(os.readlink(f"/proc/self/fd/{entry}"))
    return {
        "mappings": sum("/memfd:symmpool" in line for line in open("/proc/self/maps")),
        "descriptors": sum("/memfd:symmpool" in name for name in descriptors),
        "files": sum("symmpool" in name for name in os.listdir("/dev/shm")),
        # torch's compiler keeps a cache there.
        "folders": [name for name in os.listdir(TEMPORARY.name) if "inductor" not in name],
    }


@pytest.fixture(autouse=True)
def nothing_remains(request):
    """Checks that a test leaves no shared memory behind."""
    before = remains()
    yield
    # pytest still references the values of fixtures.
    request.node.funcargs.clear()
    gc.collect()
    if remains() != before:
        # A cycle through something that was imported before all tests is not found among the rest.
        gc.unfreeze()
        gc.collect()
        gc.freeze()
    assert remains() == before


@pytest.fixture(autouse=True)
def no_launcher_is_left():
    """Takes back what a test has set of a launcher's variables, which later tests would believe."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    before = {name: os.environ.get(name) for name in names}
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
