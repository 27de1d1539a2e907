"""Tests of `bench/sanitize` without a GPU: its program and its sanitizer print what real ones print."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "sanitize"
TOOLS = ["memcheck", "racecheck", "initcheck", "synccheck"]
#: Families, of which every third has nothing for racecheck.
FAMILIES = {f"family_{n}": n % 3 > 0 for n in range(26)}

PROGRAM = """#!/usr/bin/env bash
if [ "$1" = families ]; then
    cat "$(dirname "$0")/families"
    exit
fi
while [ $# -gt 0 ]; do
    [ "$1" != --algorithms ] || names=$2
    shift
done
for name in ${names//,/ }; do
    [ "$name" != "${LEFT_OUT:-}" ] || continue
    printf 'family %s\\n%s: 3 cases, 0 wrong\\n' "$name" "$name"
done
echo everything was right
"""

SANITIZER = """#!/usr/bin/env bash
tool=$2
echo "$tool" >>"$(dirname "$0")/tools"
while [[ "$1" != */cuda_collectives ]]; do shift; done
"$@"
if [ "$tool" = "${FINDS:-}" ]; then
    echo '========= Invalid __global__ read of size 4 bytes'
    echo '========= ERROR SUMMARY: 1 error'
    exit 9
fi
[ "$tool" = racecheck ] && echo '========= RACECHECK SUMMARY: 0 hazards displayed' \\
    || echo '========= ERROR SUMMARY: 0 errors'
"""


@pytest.fixture
def folder(tmp_path):
    for name, text in {"cuda_collectives": PROGRAM, "compute-sanitizer": SANITIZER}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    lines = [f"{name} memcheck{' racecheck' if races else ''}\n" for name, races in FAMILIES.items()]
    (tmp_path / "families").write_text("".join(lines))
    return tmp_path


def sanitize(folder, *arguments, **environment):
    environment = {
        **os.environ,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PROGRAM": str(folder / "cuda_collectives"),
        "LOGS": str(folder / "logs"),
        **environment,
    }
    command = [str(SCRIPT), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def parts(folder, **environment):
    listed = sanitize(folder, "--list", **environment)
    assert listed.returncode == 0, listed
    lines = [line.split() for line in listed.stdout.splitlines()]
    return [(tool, names.split(","), int(seconds)) for _, tool, names, seconds in lines]


def test_parts_have_every_family_under_every_tool_once_and_fit_a_device(folder):
    found = parts(folder)
    for tool in TOOLS:
        names = [name for other, families, _ in found if other == tool for name in families]
        races = tool == "racecheck"
        assert names == [name for name, shares in FAMILIES.items() if shares or not races]
    assert len(found) > len(TOOLS)
    # Eight minutes, of which some go by while a device is handed over.
    assert max(seconds for _, _, seconds in found) <= 400


def test_parts_of_what_this_tree_has_fit_too(folder):
    text = (SCRIPT.parent.parent / "tests/gpu/cuda_collectives/families.rs").read_text()
    names = [line.split('"')[1] for line in text.splitlines() if line.strip().startswith('("')]
    assert "experts" in names
    (folder / "families").write_text("".join(f"{name} memcheck racecheck\n" for name in names))
    assert max(seconds for _, _, seconds in parts(folder)) <= 400


def test_a_part_runs_its_tool_on_its_families(folder):
    found = parts(folder)
    for number, (tool, names, _) in enumerate(found, 1):
        done = sanitize(folder, "--part", str(number))
        assert done.returncode == 0, done
        assert (folder / "tools").read_text().split()[-1] == tool
        said = [line for line in done.stdout.splitlines() if line.endswith("clean, 3 cases, 0 wrong")]
        assert [line.split()[1] for line in said] == names
    missing = sanitize(folder, "--part", str(len(found) + 1))
    assert missing.returncode == 64 and "no part" in missing.stderr


def test_what_a_tool_finds_and_what_did_not_run_fails(folder):
    found = sanitize(folder, "--part", "1", FINDS="memcheck")
    assert found.returncode == 1 and "not clean: memcheck" in found.stdout, found
    late = sanitize(folder, "--part", "1", LEFT_OUT="family_2")
    said = [" ".join(line.split()) for line in late.stdout.splitlines()]
    assert late.returncode == 1 and "memcheck: family_2 did not run, 0 cases, 0 wrong" in said, late


def test_a_tool_that_there_is_not_is_refused(folder):
    done = sanitize(folder, "racechek")
    assert done.returncode == 64 and "racechek" in done.stderr, done
