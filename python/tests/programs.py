"""Runs programs that lie in files, as a launcher would."""

import contextlib
import io
import os
import runpy
import sys

import pytest


def helps(group, path):
    """Returns the --help of a program, and how it ends with an argument that it does not know."""
    sys.path.insert(0, str(path.parent))
    shown = []
    for argument in ("--help", "--no-such-option"):
        sys.argv = [path.name, argument]
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                runpy.run_path(str(path), run_name="__main__")
            except SystemExit as end:
                shown.append((end.code, out.getvalue() + err.getvalue()))
    return shown


def refusal(group, path, arguments):
    """How a program ends with arguments that make no sense: its exit status and its words."""
    sys.argv = [path.name, *arguments]
    said = io.StringIO()
    with contextlib.redirect_stderr(said), pytest.raises(SystemExit) as end:
        runpy.run_path(str(path), run_name="__main__")
    return end.value.code, said.getvalue()


def ends(group, path):
    """With what words a program ends where nobody launched it, and where a launcher did without a GPU."""
    sys.path.insert(0, str(path.parent))
    sys.argv = [path.name]
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    found = []
    for launched in ({}, {"RANK": "0", "LOCAL_RANK": "0"}):
        for variable in ("RANK", "LOCAL_RANK"):
            os.environ.pop(variable, None)
        os.environ |= launched
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(path), run_name="__main__")
        found.append(end.value.code)
    return found
