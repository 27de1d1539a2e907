"""The package itself: what importing it does, its errors, and whether its stubs tell the truth."""

import ast
import builtins
import importlib.util
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import symmpool
from symmpool import _symmpool, errors

STUBS = Path(symmpool.__file__).with_name("_symmpool.pyi")


def python(program, *options):
    return subprocess.run(
        [sys.executable, *options, "-c", program], capture_output=True, text=True, timeout=60
    )


def test_importing_it_imports_neither_torch_nor_numpy():
    program = "import symmpool, sys; print([n for n in ('torch', 'numpy') if n in sys.modules])"
    assert python(program).stdout.strip() == "[]"


def test_every_error_is_also_a_builtin_one():
    kin = {
        "OutOfMemoryError": MemoryError,
        "OverflowError": builtins.OverflowError,
        "DivergedError": RuntimeError,
        "TimeoutError": builtins.TimeoutError,
        "PeerLostError": ConnectionError,
        "PlanError": ValueError,
        "UnsupportedError": NotImplementedError,
        "InvalidArgumentError": ValueError,
        "RefusedError": PermissionError,
        "InvalidStateError": RuntimeError,
    }
    assert {"Error", *kin} == set(errors.__all__)
    for name, builtin in kin.items():
        error = getattr(symmpool, name)("what happened")
        assert isinstance(error, symmpool.Error) and isinstance(error, builtin)
        assert str(error) == "what happened"
        assert error.ranks == ()


def test_all_names_are_there_and_documented():
    for name in symmpool.__all__:
        assert inspect.getdoc(getattr(symmpool, name)), f"{name} has no docstring"
    assert symmpool.__version__ == _symmpool.version()
    assert symmpool.algorithms()[0] == "auto"


def members(node):
    """The functions of a class or module. The first one of several overloads has all parameters."""
    found = {}
    for item in node.body:
        if isinstance(item, ast.FunctionDef):
            found.setdefault(item.name, item)
    return found


def parameters_of(stub, without_self):
    """Returns the parameters of a function of the stubs: names, kinds and defaults."""
    arguments, kind = stub.args, inspect.Parameter
    named = [(each, kind.POSITIONAL_OR_KEYWORD) for each in arguments.args]
    named = [(each, kind.POSITIONAL_ONLY) for each in arguments.posonlyargs] + named
    defaults = [None] * (len(named) - len(arguments.defaults)) + arguments.defaults
    if arguments.vararg is not None:
        named.append((arguments.vararg, kind.VAR_POSITIONAL))
        defaults.append(None)
    named += [(each, kind.KEYWORD_ONLY) for each in arguments.kwonlyargs]
    defaults += arguments.kw_defaults
    found = [
        (each.arg, kind, inspect.Parameter.empty if default is None else ast.literal_eval(default))
        for (each, kind), default in zip(named, defaults, strict=True)
    ]
    return found[1:] if without_self else found


def shown_by(target, without_self):
    found = [(p.name, p.kind, p.default) for p in inspect.signature(target).parameters.values()]
    return found[1:] if without_self and found and found[0][0] == "self" else found


def test_the_stubs_are_what_the_binding_has():
    stubs = ast.parse(STUBS.read_text())
    classes = {node.name: node for node in stubs.body if isinstance(node, ast.ClassDef)}
    bound = {name for name, each in vars(_symmpool).items() if isinstance(each, type)}
    kinds = ("Protocol", "TypedDict")
    ours = {n for n, c in classes.items() if not any(getattr(b, "id", "") in kinds for b in c.bases)}
    assert ours == bound
    for name in sorted(bound):
        found = getattr(_symmpool, name)
        shown = members(classes[name])
        public = {n for n in vars(found) if not n.startswith("_")}
        assert public == {n for n in shown if not n.startswith("_")}, name
        for method, stub in shown.items():
            decorators = {getattr(d, "id", getattr(d, "attr", None)) for d in stub.decorator_list}
            if decorators & {"property", "setter"}:
                assert inspect.isgetsetdescriptor(vars(found)[method]), (name, method)
                assert vars(found)[method].__doc__, (name, method)
                continue
            target = found if method == "__init__" else getattr(found, method)
            is_static = "staticmethod" not in decorators
            expected = parameters_of(stub, is_static)
            shows = shown_by(target, is_static)
            assert shows == expected, (name, method)
            if not method.startswith("__"):
                assert inspect.getdoc(target), (name, method)


def test_the_stubs_have_the_functions_of_the_binding():
    stubs = members(ast.parse(STUBS.read_text()))
    bound = {n: f for n, f in vars(_symmpool).items() if inspect.isbuiltin(f)}
    assert set(stubs) == set(bound)
    for name, stub in stubs.items():
        assert shown_by(bound[name], False) == parameters_of(stub, False), name


def test_the_module_says_what_it_can_run():
    done = subprocess.run(
        [sys.executable, "-m", "symmpool", "--help"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and "bench" in done.stdout


@pytest.mark.parametrize(
    ("world", "rank", "address"),
    [(2, 2, "127.0.0.1:29500"), (0, 0, "127.0.0.1:29500"), (1, 0, "127.0.0.1"), (1, 0, "x:0")],
)
def test_impossible_groups_are_refused(world, rank, address):
    with pytest.raises(symmpool.InvalidArgumentError):
        symmpool.Group(rank, world, address)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), 1e300])
def test_impossible_times_are_refused(timeout):
    with pytest.raises(ValueError, match="timeout"):
        symmpool.Group.in_process(1, timeout=timeout)


def test_the_environment_is_named_when_it_is_wrong(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(symmpool.InvalidArgumentError, match="WORLD_SIZE"):
        symmpool.Group.from_env()
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "one")
    with pytest.raises(symmpool.InvalidArgumentError, match="one"):
        symmpool.Group.from_env()


def test_a_store_on_the_network_needs_a_secret():
    with pytest.raises(symmpool.InvalidArgumentError, match="secret"):
        symmpool.Group(0, 1, "0.0.0.0:29500", timeout=5)


def imports(path):
    """The package's modules that one imports, anywhere but under TYPE_CHECKING: nothing runs there."""
    tree = ast.parse(path.read_text())
    tests = [node for node in ast.walk(tree) if isinstance(node, ast.If)]
    checkers = [node for node in tests if ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")]
    left_out = {id(each) for node in checkers for part in node.body for each in ast.walk(part)}
    for node in ast.walk(tree):
        if id(node) in left_out:
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("symmpool"):
            for name in node.names:
                yield from (node.module, f"{node.module}.{name.name}")
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


def test_modules_do_not_import_each_other_in_circles():
    folder = Path(symmpool.__file__).parent
    files = {path: path.relative_to(folder.parent).with_suffix("") for path in folder.rglob("*.py")}
    # Packages stand for their names, which whoever imports a module of theirs imports first.
    names = {".".join(name.parts): path for path, name in files.items() if name.stem != "__init__"}
    needs = {name: {each for each in imports(path) if each in names} for name, path in names.items()}
    assert "symmpool.communicators.gradients" in needs["symmpool.ops"]
    while needs:
        free = {name for name, needed in needs.items() if not needed & needs.keys()}
        assert free, f"in circles: {sorted(needs)}"
        needs = {name: needed for name, needed in needs.items() if name not in free}


def test_operators_are_there_without_an_import_of_their_own_where_torch_is():
    program = """
import sys
import symmpool
assert "torch" not in sys.modules and not hasattr(symmpool, "opts")
{first}
print(symmpool.ops.__name__, "ops" in vars(symmpool))
"""
    torch = importlib.util.find_spec("torch") is not None
    if torch:
        assert python(program.format(first="")).stdout.split() == ["symmpool.ops", "True"]
    # The import fails like that of a package that is not installed.
    done = python(program.format(first="sys.modules['torch'] = None"))
    assert "AttributeError: symmpool.ops needs torch" in done.stderr, done.stderr
