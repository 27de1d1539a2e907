"""The backend's name is known wherever torch is imported, by the package's entry point."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import symmpool_torch
import torch
import torch.distributed as dist

import symmpool

SOURCE = Path(symmpool.__file__).parents[1]
PROJECT = Path(__file__).parents[1] / "pyproject.toml"


@pytest.fixture
def installed(tmp_path):
    """A folder as an installer leaves one, with the package's entry points, next to the package."""
    text = PROJECT.read_text()
    (points,) = re.findall(r'^\[project\.entry-points\."(torch\.backends)"\]\n((?:.+\n)+)', text, re.M)
    folder = tmp_path / "symmpool_of_test-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: symmpool-of-test\nVersion: 0\n")
    (folder / "entry_points.txt").write_text(f"[{points[0]}]\n" + points[1].replace('"', ""))
    return tmp_path


def python(installed, program, **environment):
    path = os.pathsep.join(map(str, (installed, SOURCE)))
    variables = {**os.environ, "PYTHONPATH": path, **environment}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=100)


BEGIN = """
import torch.distributed as dist
dist.init_process_group("symmpool", init_method="file://{0}/store", rank=0, world_size=1)
x = torch.ones(3)
dist.all_reduce(x)
from symmpool import backend
print(x.tolist(), backend.last_backend(), dist.is_backend_available("symmpool"))
dist.destroy_process_group()
"""


@pytest.mark.parametrize("imports", ["import symmpool, torch", "import torch, symmpool", "import torch"])
def test_the_backend_is_known_in_whichever_order_things_are_imported(imports, installed):
    found = python(installed, imports + BEGIN.format(installed))
    assert found.stdout.strip() == "[1.0, 1.0, 1.0] symmpool True", found.stderr


def test_importing_torch_imports_no_more_of_the_package_than_its_name_needs(installed):
    program = "import torch, sys; print(sorted(n for n in sys.modules if 'symmpool' in n))"
    assert python(installed, program).stdout.strip() == "['symmpool_torch']"


def test_a_program_can_say_that_torch_is_to_ask_nobody(installed):
    program = "import symmpool, torch, torch.distributed as dist; print('SYMMPOOL' in dist.Backend._plugins)"
    found = python(installed, program, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert found.stdout.strip() == "False", found.stderr
    found = python(installed, program.replace("; print", "; import symmpool.backend; print"))
    assert found.stdout.strip() == "True", found.stderr


def test_a_package_that_is_broken_does_not_keep_torch_from_being_imported(installed):
    (installed / "symmpool").mkdir()
    (installed / "symmpool" / "__init__.py").write_text("raise ImportError('broken')\n")
    found = python(installed, "import torch" + BEGIN.format(installed))
    assert "ImportError: broken" in found.stderr and "Failed to load" not in found.stderr


def test_registering_imports_nothing(installed):
    """Registering takes one entry of a table: an import would cost each program that has torch."""
    program = (
        "import sys, torch, torch.distributed as dist, symmpool_torch; before = set(sys.modules);"
        "symmpool_torch.register(); assert dist.is_backend_available('symmpool');"
        "print(set(sys.modules) - before)"
    )
    found = python(installed, program, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert found.stdout.strip() == "set()", found.stderr


def test_registering_raises_nothing(monkeypatch):
    monkeypatch.delitem(dist.Backend._plugins, "SYMMPOOL", raising=False)
    symmpool_torch.register()
    assert dist.Backend._plugins["SYMMPOOL"].creator_fn is symmpool_torch._create
    # Each installed package that asks for the name registers it; the list has it once.
    symmpool_torch.register()
    assert dist.Backend.backend_list.count("symmpool") == 1
    # The defaults of torch are unchanged.
    assert "symmpool" not in dist.Backend.default_device_backend_map.values()
    monkeypatch.setattr(dist.Backend, "_plugins", None)
    symmpool_torch.register()
    monkeypatch.delitem(sys.modules, "torch.distributed")
    symmpool_torch.register()
    assert torch.distributed is dist
