"""Types of public signatures: they say more than `Any`, so that type checkers find mistakes in programs."""

import ast
import importlib
import inspect
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
#: Names that may say `Any`, and why.
ALLOWED = {
    "Work.__init__": "only the package makes one",
    "all_gather_object": "a list of any objects, which other types would not let in",
    "create": "torch's own options, whose stubs lack fields",
    "graph": "torch.cuda.graph's arguments are passed on",
    "SymmpoolProcessGroup.split_group": "torch's arguments are passed on",
    "SymmpoolProcessGroup.merge_remote_group": "torch's arguments are passed on",
    "SymmpoolProcessGroup.allgather_coalesced": "torch's arguments are passed on",
}
#: Types in which `Any` stands for what JSON may hold, or for shapes and elements of arrays.
GENERIC = re.compile(r"dict\[str, Any\]|ndarray\[Any, Any\]|dtype\[Any\]")


def says_any(annotation):
    return bool(re.search(r"\bAny\b", GENERIC.sub("", str(annotation))))


def public_modules():
    """The modules that the site of the documents has a page for."""
    tree = ast.parse((ROOT / "docs/site/build.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "MODULES":
            return ast.literal_eval(node.value)
    raise AssertionError("docs/site/build.py names no MODULES")


def functions_of(module):
    """The public functions and methods of a module, with their names."""
    own = [name for name in vars(module) if not name.startswith("_")]
    for name in getattr(module, "__all__", own):
        found = getattr(module, name)
        if inspect.isclass(found):
            for each, method in vars(found).items():
                if each == "__init__" or not each.startswith("_"):
                    method = getattr(method, "fget", None) or getattr(method, "__func__", method)
                    yield f"{found.__name__}.{each}", method
        else:
            yield name, found


def test_signatures_of_public_functions_say_more_than_any():
    pytest.importorskip("torch")
    found, count = set(), 0
    for name in public_modules():
        for what, function in functions_of(importlib.import_module(name)):
            if not inspect.isfunction(function) or not function.__module__.startswith("symmpool"):
                continue
            count += 1
            if any(says_any(each) for each in inspect.unwrap(function).__annotations__.values()):
                found.add(what)
    assert count > 200, f"too few functions found: {count}"
    assert found <= set(ALLOWED), f"give these functions types: {sorted(found - set(ALLOWED))}"


def test_signatures_of_the_binding_say_more_than_any():
    tree = ast.parse((ROOT / "python/symmpool/_symmpool.pyi").read_text())
    found, count = [], 0
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            count += 1
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            arguments += [each for each in (node.args.vararg, node.args.kwarg) if each]
            types = [each.annotation for each in arguments] + [node.returns]
            if any(says_any(ast.unparse(each)) for each in types if each is not None):
                found.append(f"{node.name}, line {node.lineno}")
    assert count > 100, f"too few functions found: {count}"
    assert not found, f"give these functions types: {found}"


def test_any_is_found_where_it_says_nothing():
    assert says_any("Any") and says_any("tuple[Any, ...]") and says_any("Callable[..., Any] | None")
    assert not says_any("dict[str, Any]") and not says_any("numpy.ndarray[Any, Any]")
    assert not says_any("Anything")
