"""Sources of engines' versions, read from their packages without an installation, and what adapters need."""

import ast
import inspect
import pathlib
import subprocess
import sys
import zipfile

from symmpool.engines.nccl_communicator import derived


def wheel(package, version, folder):
    """The package's wheel, which pip fetches."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*command, "-d", str(folder), f"{package}=={version}"], check=True)
    (found,) = pathlib.Path(folder).glob("*.whl")
    return zipfile.ZipFile(found)


def signatures(package, path):
    """The arguments of a file's functions and of its classes' methods, by name."""
    found = {}

    def walk(node, prefix):
        for each in getattr(node, "body", []):
            if isinstance(each, ast.FunctionDef):
                found[prefix + each.name] = [name.arg for name in (*each.args.posonlyargs, *each.args.args)]
            elif isinstance(each, ast.ClassDef):
                walk(each, f"{prefix}{each.name}.")
            elif isinstance(each, (ast.If, ast.Try)):
                walk(each, prefix)

    walk(ast.parse(package.read(path).decode()), "")
    return found


def lacking(package, needed):
    """Returns what a version lacks of `needed`: by file, functions and the arguments that they begin with."""
    wrong = []
    for path, functions in needed.items():
        there = signatures(package, path)
        for name, arguments in functions.items():
            words = arguments.split()
            if there.get(name, [])[: len(words)] != words or name not in there:
                wrong.append((path, name, there.get(name)))
    return wrong


class Nothing:
    """Base of our communicator, where its own methods alone are asked for."""


def not_taken(package, path, in_place, theirs):
    """Methods of a version's `PyNcclCommunicator` that ours lacks, or whose arguments ours does not take.
    `theirs` are those that ours leaves to the engine."""
    ours = derived(Nothing, in_place, bool)
    wrong = []
    for name, arguments in signatures(package, path).items():
        kind, _, method = name.partition(".")
        if kind != "PyNcclCommunicator" or method in theirs or not method or method.startswith("__"):
            continue
        if method not in vars(ours):
            wrong.append((method, "is missing"))
            continue
        signature = inspect.signature(vars(ours)[method])
        try:
            signature.bind(*[None] * len(arguments))
        except TypeError as error:
            wrong.append((method, str(error)))
        known = list(signature.parameters)
        # Each is passed by its place or by its name.
        wrong += [(method, each) for each in arguments[2:] if each not in known and "options" not in known]
    return wrong
