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


# --- every signature of the package, those of its inner modules too

#: How many public signatures of a folder may say `Any`, and why. Numbers only go down.
LEFT = {
    "__init__.py": (1, "names that are imported when they are first used"),
    "bench": (19, "communicators and models of the library that is measured, each of another kind"),
    "collectives": (3, "a factor of torch's PREMUL_SUM, lists of any objects, arguments of another backend"),
    "communicators": (
        4,
        "tensors of any library, before they are known to be one; functions that get attributes",
    ),
    "deep_ep": (6, "DeepEP's tuples, whose entries are made when they are looked at"),
    "engines": (4, "groups of serving engines, of which versions differ"),
    "experts": (1, "a check that returns what it was given"),
    "fused": (7, "nodes of Inductor's graphs, and decorators of functions of any signature"),
    "groups": (5, "stores and groups of torch, which may not be imported"),
    "memory": (5, "results of compiled functions, and torch itself"),
    "plugins": (3, "objects of serving engines"),
    "symmetric_memory": (1, "an allocator that torch's stubs lack"),
    "torch_backend": (
        15,
        "Work or None, where torch's stubs want Work; options that they lack",
    ),
}


def signatures_of(path):
    """The functions and methods of a module that other modules may call, by name, with annotations. What
    stands for any arguments (`*arguments`, `**options`) is left out: it is passed on."""

    def walk(node, prefix):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef) and not child.name.startswith("_"):
                yield from walk(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.FunctionDef):
                is_own = child.name.startswith("_") and not child.name.startswith("__")
                if not is_own:
                    given = child.args
                    arguments = [*given.posonlyargs, *given.args, *given.kwonlyargs]
                    types = [each.annotation for each in arguments] + [child.returns]
                    yield prefix + child.name, [ast.unparse(each) for each in types if each is not None]
            elif isinstance(child, (ast.If, ast.Try)):
                yield from walk(child, prefix)

    return walk(ast.parse(path.read_text()), "")


def test_few_signatures_of_inner_modules_say_any():
    folder, found, count = ROOT / "python/symmpool", {}, 0
    for path in sorted(folder.rglob("*.py")):
        place = path.relative_to(folder)
        for name, types in signatures_of(path):
            count += 1
            if any(map(says_any, types)):
                found.setdefault(place.parts[0], []).append(f"{place}: {name}")
    assert count > 1000, f"too few functions found: {count}"
    for place, names in found.items():
        most, why = LEFT.get(place, (0, "none"))
        assert len(names) <= most, f"{len(names)} signatures say Any, where {most} may ({why}): {names}"
        assert len(names) == most, (
            f"{place}: {len(names)} signatures say Any; lower its number, which is {most}"
        )
    assert set(LEFT) == set(found), "a folder that says Any no more is to leave the list"
