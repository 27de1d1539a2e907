"""The documents' code blocks: programs run as they stand, in their order; the rest compiles or exists."""

import importlib.util
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys

import pytest
from documents import KINDS, PAGES, ROOT, blocks, programs

import symmpool
from symmpool import language as sl

TORCH = importlib.util.find_spec("torch") is not None

PROGRAMS = [(page, name) for page in PAGES for name in programs(page)]
if not TORCH:
    PROGRAMS = [each for each in PROGRAMS if "torch" not in programs(each[0])[each[1]][1]]


def of_kind(kind):
    return [block for page in PAGES for block in blocks(page) if block.kind == kind]


def places(found):
    return [block.place for block in found]


def run(program, file, folder):
    """Returns the output of two ranks that run the program."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    (folder / file).write_text(program)
    ranks = [
        subprocess.Popen(
            [sys.executable, file],
            cwd=folder,
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        said = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], said[0][1] + said[1][1]
    return [out for out, _ in said]


@pytest.mark.parametrize(("page", "name"), PROGRAMS)
def test_programs_run_as_they_stand_and_print_what_the_page_says(page, name, tmp_path):
    for block in blocks(page):
        if block.kind != "python" and block.file:
            (tmp_path / block.file).write_text(block.text)
    file, program = programs(page)[name]
    said = run(program, file, tmp_path)
    text = " ".join((ROOT / page).read_text().split())
    said = [line for out in said for line in out.splitlines() if line.startswith("rank ")]
    for line in said:
        assert f"`{line}`" in text, f"{page} does not say that {name} prints {line!r}"
    assert len(said) == 2 * program.count('print(f"rank ')


def test_every_block_is_of_a_kind_that_has_tests():
    for page in PAGES:
        for block in blocks(page):
            assert block.kind in KINDS, f"{block.place}: ```{block.kind}: one of {', '.join(KINDS)}"
            assert block.kind == "python" or not block.mark.startswith("python: "), block.place
            assert block.mark in ("", "needs GPUs") or block.mark.startswith(("python: ", "table: ")), (
                block.place
            )
            if block.needs_gpus:
                assert block.kind == "python", block.place
                assert "GPU" in block.before.rstrip().rsplit("\n\n", 1)[-1], f"{block.place} must say so"


@pytest.mark.parametrize("text", ["```python\nx = 1\n```\n", "```\nls\n```\n", "```python\n"])
def test_a_block_that_no_test_takes_is_an_error(text):
    """The rules above find what is wrong."""
    with pytest.raises(AssertionError):
        assert all(block.kind in KINDS for block in blocks("page", text))
        programs("page", text)


@pytest.mark.parametrize(
    "block", [block for block in of_kind("python") if block.needs_gpus], ids=lambda block: block.place
)
def test_programs_for_gpus_compile(block):
    compile(block.text, block.place, "exec")
    for module, name in re.findall(r"\b(symmpool|pool|comm)\.(\w+)", block.text):
        owner = {"symmpool": symmpool, "pool": symmpool.Pool, "comm": symmpool.Communicator}[module]
        assert hasattr(owner, name), f"{block.place}: {module}.{name}"


def test_kernels_are_where_the_compiler_looks():
    """collectives/src/jit/tests/device_api.rs compiles those of this page."""
    assert {block.page for block in of_kind("cuda")} == {"docs/kernels.md"}


def test_rust_programs_are_examples_that_are_built():
    """But for what makes an example describe itself."""
    texts = [path.read_text() for path in ROOT.glob("*/examples/*.rs")]
    examples = ["\n".join(line for line in text.splitlines() if "clap::" not in line) for text in texts]
    found = of_kind("rust")
    assert found
    for block in found:
        assert any(block.text.strip() in text for text in examples), f"{block.place} is no example"


#: What C blocks are given.
C_ARGUMENTS = {
    "docs/experts.md": (
        "symmpool_comm comm, const void *x, const void *topk_ids, const float *topk_weights, "
        "uint64_t tokens, void *rows, void *y, void *stream, void *(*device_memory)(uint64_t)"
    )
}


@pytest.mark.parametrize("block", of_kind("c"), ids=lambda block: block.place)
def test_c_compiles(block, tmp_path):
    compiler = shutil.which("cc")
    assert compiler, "a C toolchain is a prerequisite"
    source = tmp_path / "block.c"
    arguments = C_ARGUMENTS[block.page]
    source.write_text(
        f'#include "symmpool.h"\nvoid block({arguments});\nvoid block({arguments}) {{\n{block.text}}}\n'
    )
    flags = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", f"-I{ROOT / 'ffi/include'}"]
    done = subprocess.run([compiler, *flags, source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


COMMANDS = [(block.place, line) for block in of_kind("sh") for line in block.text.splitlines()]


def words_of(line):
    """The simple commands of a line, each as a list of words without assignments."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|")
    lexer.whitespace_split = True
    found = [[]]
    for word in lexer:
        if set(word) <= set(";&|"):
            found.append([])
        elif found[-1] or not re.match(r"[A-Z_]+=", word):
            found[-1].append(word)
    return [words for words in found if words]


MADE_PROGRAMS = ("first",)
MADE = ("first.py", "hosts.py", "my_two_shot.json", "my_algorithms.py", "program.py")
TARGETS = set(re.findall(r"^([a-z-]+(?: [a-z-]+)*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
TARGETS = {name for names in TARGETS for name in names.split()}
PACKAGES = {path.parent.name: path.parent for path in ROOT.glob("*/Cargo.toml")}


def binaries(folder):
    """The names of a package's programs."""
    return re.findall(r'^\[\[bin\]\]\nname = "(\w+)"$', (folder / "Cargo.toml").read_text(), re.MULTILINE)


def option(words, name):
    return words[words.index(name) + 1] if name in words else None


def check_cargo(words):
    assert words[1] in ("run", "build", "test", "clippy", "new", "add"), words
    package = option(words, "-p")
    folder = PACKAGES[package.removeprefix("symmpool-")] if package else None
    if name := option(words, "--example"):
        assert any((folder / "examples" / at).exists() for at in (f"{name}.rs", f"{name}/main.rs")), words
    if name := option(words, "--bin"):
        assert name in binaries(folder), words
    if name := option(words, "--test"):
        assert any((folder / "tests" / at).exists() for at in (f"{name}.rs", f"{name}/main.rs")), words


HELP = {}


def check_module(words):
    """`python -m symmpool ...`, whose options --help must list."""
    assert words[0] == "symmpool", words
    command = [words[1]]
    if words[1] == "bench":
        command.append(words[2])
    shown = HELP.get(tuple(command))
    if shown is None:
        done = subprocess.run(
            [sys.executable, "-m", "symmpool", *command, "--help"], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        shown = HELP[tuple(command)] = done.stdout
    for word in words:
        if word.startswith("--"):
            assert re.search(rf"{word}\b", shown), f"{word} is no option of {' '.join(command)}"


def check_command(words):
    program, rest = words[0], words[1:]
    if program in ("export", "wait", "cd"):
        return
    if program == "make":
        named = [word for word in rest if "=" not in word]
        assert set(named) <= TARGETS, words
    elif program == "cargo":
        check_cargo(words)
    elif program == "pip":
        places = [ROOT / word for word in rest if word == "." or "/" in word]
        assert rest[0] == "install" and all((place / "pyproject.toml").exists() for place in places), words
    elif program in ("srun", "mpirun", "mpiexec"):
        # `python/tests/packages` runs those of MPI.
        assert rest[-2] == "python" and rest[-1] in MADE, words
    elif program == "python" and rest[0] in MADE:
        return
    elif program in ("python", ".venv/bin/python"):
        assert rest[0] == "-m"
        if rest[1] == "pytest":
            files = [word for word in rest[2:] if not word.startswith("-")]
            assert files and all((ROOT / word).exists() for word in files), words
        elif rest[1] == "sglang.launch_server":
            assert "--model-path" in rest, words
        elif rest[1] == "vllm.entrypoints.openai.api_server":
            # `python/tests/engines` runs it.
            assert rest[2:4] == ["--model", "MODEL"], words
        elif TORCH:
            check_module(rest[1:])
    elif program == "torchrun":
        assert option(rest, "--nproc-per-node").isdigit(), words
        while rest[0].startswith("--"):
            rest = rest[2:]
        if rest[0] != "-m":
            assert rest[0] in MADE or (ROOT / rest[0]).exists(), words
        elif TORCH:
            check_module(rest[1:])
    elif program.startswith(("target/", "./target/")):
        *_, place, name = program.split("/")
        built = [path.stem if path.suffix else path.name for path in ROOT.glob("*/examples/*")]
        if place != "examples":
            built = [name for folder in PACKAGES.values() for name in binaries(folder)]
        assert name in built or name in MADE_PROGRAMS, words
    elif program == "vllm":
        # `python/tests/engines` runs it.
        assert rest[:2] == ["serve", "MODEL"], words
    elif program == "nvidia-cuda-mps-control":
        assert rest == ["-d"]
    else:
        assert os.access(ROOT / program, os.X_OK), f"{program} is no program of the repository"
    for word in rest:
        if "/" in word and not word.startswith(("-", "../", "target/")) and program != "torchrun":
            assert (ROOT / word).exists(), f"{word} is not there"


@pytest.mark.parametrize(("place", "line"), COMMANDS)
def test_commands_name_what_is_there(place, line):
    for words in words_of(line):
        check_command(words)


@pytest.mark.parametrize(
    "line",
    [
        "make tset",
        "cargo run -p symmpool-collectives --example no_such",
        "cargo run -p symmpool-tests --bin no_such",
        "target/release/no_such",
        "target/release/examples/cuda_check",
        "python -m pytest python/tests/test_no_such.py",
        "pip install ./no_such",
        "pip install .",
        "bench/no_such",
        "torchrun --nproc-per-node 2 examples/no_such.py",
    ],
)
def test_commands_that_are_wrong_are_found(line):
    with pytest.raises((AssertionError, KeyError)):
        for words in words_of(line):
            check_command(words)


def text_blocks(page, first_word):
    return next(
        block.text for block in blocks(page) if block.kind == "text" and block.text.startswith(first_word)
    )


def of_program(page, name, until, tmp_path, without=()):
    """Returns the names that the beginning of a program defines, from a file of its name."""
    file, program = programs(page)[name]
    program = program.split(until, 1)[0]
    for line in without:
        assert line in program
        program = program.replace(line, "")
    (tmp_path / file).write_text(program)
    names = {}
    exec(compile(program, str(tmp_path / file), "exec"), names)
    return names


def test_the_table_of_a_program_is_as_printed(tmp_path):
    names = of_program("docs/language.md", "first", "my_two_shot.check", tmp_path)
    assert names["my_two_shot"].compile(2).explain() == text_blocks("docs/language.md", "my_two_shot:")


def test_the_error_of_a_program_is_as_printed(tmp_path):
    waits = ["    for peer in me.peers():\n        me.wait(peer)\n"]
    gather = of_program("docs/language.md", "own", "pool = ", tmp_path, waits)["gather"]
    with pytest.raises(sl.PlanError) as caught:
        gather.compile(2)
    printed = " ".join(text_blocks("docs/language.md", "PlanError").split())
    assert printed == f"PlanError: {caught.value}"
