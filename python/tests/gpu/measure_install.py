"""What `symmpool.install()` reserves and costs beside torch's allocator, on one GPU.

    python python/tests/gpu/measure_install.py [--rounds 3] [--steps 90] [--seconds 240] [--json FILE]

Trains a small GPT with batches of many lengths, as in tests/traces, in a process for each allocator
and round: torch's, torch's with expandable segments, and ours. Prints reserved bytes over peak live
bytes, and steps per second; losses must be the same.

How long it takes: nine processes, each of which imports torch and makes a model before it trains. No
round is begun that would not end within `--seconds`, as far as the rounds before tell; one is made in any
case. What each process took is told as it ends.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

#: What is measured, in the order of a round.
CONTENDERS = ("torch", "expandable", "symmpool")
#: Bars: reserved over live bytes, at most; steps a second over torch's, at least.
MOST_RESERVED, LEAST_RATE = 1.10, 0.99


def train(which, steps):
    if which == "expandable":
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    import torch

    import symmpool

    if which == "symmpool":
        symmpool.install()
    torch.manual_seed(0)
    width, layers, vocabulary = 768, 12, 8192
    layer = torch.nn.TransformerEncoderLayer(
        width, 12, 4 * width, dropout=0.0, batch_first=True, norm_first=True
    )
    model = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).cuda()
    embed = torch.nn.Embedding(vocabulary, width).cuda()
    head = torch.nn.Linear(width, vocabulary, bias=False).cuda()
    parameters = [*model.parameters(), *embed.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    lengths = torch.randint(64, 1024, (steps,), generator=torch.Generator().manual_seed(1)).tolist()
    losses, begin = [], 0.0
    for step, length in enumerate(lengths):
        if step == steps // 3:
            torch.cuda.synchronize()
            begin = time.perf_counter()
        tokens = torch.randint(vocabulary, (8, length + 1), device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            out = head(model(embed(tokens[:, :-1]), is_causal=True,
                             mask=torch.nn.Transformer.generate_square_subsequent_mask(length, "cuda")))
            loss = torch.nn.functional.cross_entropy(out.flatten(0, 1).float(), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            losses.append(loss.item())
    torch.cuda.synchronize()
    rate = (steps - steps // 3) / (time.perf_counter() - begin)
    if which == "symmpool":
        stats = symmpool.memory_stats()
        live, reserved = stats["peak_allocated"], stats["peak_reserved"]
    else:
        live, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    print(json.dumps({"live": live, "reserved": reserved, "rate": rate, "losses": losses}))


def one(which, steps, deadline):
    """What a process of its own reports; its time in the course of it."""
    command = [sys.executable, __file__, "--only", which, "--steps", str(steps)]
    began = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=deadline)
    except subprocess.TimeoutExpired:
        sys.exit(f"{which}: {steps} steps did not end within {deadline:.0f} s")
    if done.returncode:
        sys.exit(f"{which}:\n{done.stdout}{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1]) | {"seconds": time.perf_counter() - began}


def rounds(options, run=one):
    """The reports of all rounds there is time for, by contender."""
    found, began, longest = {which: [] for which in CONTENDERS}, time.perf_counter(), 0.0
    for number in range(options.rounds):
        begin = time.perf_counter()
        if number and begin - began + longest > options.seconds:
            print(f"no time for round {number + 1}: one takes {longest:.0f} s", flush=True)
            break
        for which in CONTENDERS:
            report = run(which, options.steps, max(120.0, options.seconds))
            found[which].append(report)
            print(
                f"round {number + 1} of {options.rounds}, {which:10} {report['seconds']:6.1f} s, "
                f"{report['rate']:6.2f} steps/s",
                flush=True,
            )
        longest = max(longest, time.perf_counter() - begin)
    return found


def summary(found):
    """Of each contender: reserved over live bytes at worst, live bytes, and the median of steps a second
    beside torch's in the same round. And whether losses are the same."""
    table = {}
    for which, reports in found.items():
        beside = [mine["rate"] / torchs["rate"] for mine, torchs in zip(reports, found["torch"], strict=True)]
        table[which] = {
            "reserved_over_live": max(r["reserved"] / r["live"] for r in reports),
            "live_bytes": max(r["live"] for r in reports),
            "steps_a_second": statistics.median(r["rate"] for r in reports),
            "rate_over_torch": statistics.median(beside),
        }
    first = found["torch"][0]["losses"]
    return table, all(r["losses"] == first for reports in found.values() for r in reports)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="at most (default 3)")
    parser.add_argument("--steps", type=int, default=90, help="of training a process (default 90)")
    parser.add_argument("--seconds", type=float, default=240, help="for all of it, about (default 240)")
    parser.add_argument("--json", metavar="FILE", help="write all that was measured")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rounds < 1 or options.steps < 3:
        parser.error("at least 1 round and 3 steps")
    if options.only:
        return train(options.only, options.steps)
    found = rounds(options)
    table, same = summary(found)
    print(f"{'':12}{'reserved / live':>16}{'live MiB':>10}{'steps/s':>10}{'of torch':>10}")
    for which, row in table.items():
        print(
            f"{which:12}{row['reserved_over_live']:16.3f}{row['live_bytes'] / (1 << 20):10.0f}"
            f"{row['steps_a_second']:10.2f}{row['rate_over_torch']:10.3f}"
        )
    print("losses are the same" if same else "LOSSES DIFFER")
    ours = table["symmpool"]
    met = ours["reserved_over_live"] <= MOST_RESERVED and ours["rate_over_torch"] >= LEAST_RATE
    print(f"at most {MOST_RESERVED} and at least {LEAST_RATE} of torch: {'met' if met else 'NOT met'}")
    if options.json:
        import torch

        from symmpool.bench import session

        arguments = map(session.without_folders, sys.argv[1:])
        command = ["python", "python/tests/gpu/measure_install.py", *arguments]
        report = session.facts(torch, "install", command, 1)
        report |= {"steps": options.steps, "same_losses": same, "results": table, "rounds": found}
        with open(options.json, "w") as file:
            file.write(json.dumps(report, indent=1) + "\n")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
