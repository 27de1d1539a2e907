"""Tokens a second of vLLM on ranks of the CPU, with symmpool and with vLLM's own communicator:

    python compare.py --ranks 2 --rounds 10 --json out.json

Both engines are warm and take turns, in a new order each round; the median counts. Bind ranks to
cores by VLLM_CPU_OMP_THREADS_BIND, such as "0|1"."""

import argparse
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time

import small_model

PROMPT, TOKENS = 32, 64


def engine(model, ranks, mode):
    """A started engine, and the seconds that its start took."""
    from vllm import LLM

    os.environ["SYMMPOOL_ENGINES"] = mode
    begin = time.monotonic()
    made = LLM(
        model,
        load_format="dummy",
        dtype="bfloat16",
        tensor_parallel_size=ranks,
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=8,
        distributed_executor_backend="mp",
        enable_prefix_caching=False,
    )
    return made, time.monotonic() - begin


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--commit", help="of the installed package, where it does not know its own")
    given = parser.parse_args()
    from vllm import SamplingParams
    from vllm import __version__ as version

    import symmpool

    with tempfile.TemporaryDirectory() as folder:
        model = small_model.write(folder)
        engines, starts = {}, {}
        for mode in ("off", "on"):
            engines[mode], starts[mode] = engine(model, given.ranks, mode)
        prompts = [{"prompt_token_ids": list(range(3 + row, 3 + row + PROMPT))} for row in range(given.batch)]
        wanted = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
        tokens, rates = {}, {"off": [], "on": []}

        def once(mode):
            begin = time.monotonic()
            made = engines[mode].generate(prompts, wanted, use_tqdm=False)
            tokens[mode] = [list(each.outputs[0].token_ids) for each in made]
            return given.batch * TOKENS / (time.monotonic() - begin)

        for mode in ("off", "on", "off", "on"):
            once(mode)
        for number in range(given.rounds):
            for mode in ("off", "on") if number % 2 else ("on", "off"):
                rates[mode].append(round(once(mode), 1))
    medians = {mode: statistics.median(each) for mode, each in rates.items()}
    found = {
        "command": " ".join(["python compare.py", *sys.argv[1:]]),
        "symmpool": symmpool.version(),
        "commit": symmpool._symmpool.built()[0] or given.commit,
        "vllm": version,
        "cpus": len(os.sched_getaffinity(0)),
        "bound": os.environ.get("VLLM_CPU_OMP_THREADS_BIND"),
        "load": os.getloadavg()[0],
        "ranks": given.ranks,
        "batch": given.batch,
        "same_tokens": tokens["on"] == tokens["off"],
        "start_seconds": starts,
        "tokens_a_second": rates,
        "median": medians,
        "ratio": round(medians["on"] / medians["off"], 3),
    }
    print("RESULT", json.dumps(found))
    if given.json:
        given.json.write_text(json.dumps(found, indent=2) + "\n")


# vLLM starts processes that import this file.
if __name__ == "__main__":
    main()
