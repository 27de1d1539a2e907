"""Has vLLM generate tokens on ranks of the CPU, and prints them as JSON: python generate.py MODEL OPTIONS

OPTIONS is JSON: arguments of vLLM's `LLM`, and "prompts", lists of numbers of tokens, "tokens", how many are
generated for each, "rounds"."""

import json
import sys
import time


def main():
    from vllm import LLM, SamplingParams

    options = {"prompts": [[5, 6, 7, 8]], "tokens": 16, "rounds": 1, "distributed_executor_backend": "mp"}
    options |= json.loads(sys.argv[2])
    prompts = [{"prompt_token_ids": prompt} for prompt in options.pop("prompts")]
    tokens, rounds = options.pop("tokens"), options.pop("rounds")
    begin = time.monotonic()
    engine = LLM(
        sys.argv[1],
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=512,
        max_num_seqs=8,
        enable_prefix_caching=False,
        **options,
    )
    start = time.monotonic() - begin
    wanted = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    rates = []
    for _ in range(rounds):
        begin = time.monotonic()
        made = engine.generate(prompts, wanted, use_tqdm=False)
        rates.append(len(prompts) * tokens / (time.monotonic() - begin))
    found = [list(each.outputs[0].token_ids) for each in made]
    print("RESULT " + json.dumps({"tokens": found, "start": start, "rates": rates}), flush=True)


# vLLM starts processes that import this file.
if __name__ == "__main__":
    main()
