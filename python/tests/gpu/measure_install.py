"""Measures what `symmpool.install()` reserves and costs, compared with torch's allocator, on one GPU.

    python python/tests/gpu/measure_install.py [--turns 12] [--lengths 60] [--seconds 200] [--json FILE]

Trains a small GPT with batches of many lengths, as in tests/traces: with torch's allocator, torch's with
expandable segments, and ours, in a process each. The processes take turns: one trains on a batch of each
length while the others wait, and rates are compared within a turn, as what else a machine does changes
them by more than is looked for. Before the first turn that counts each has trained on all lengths once, as
the first batch of a length takes several times as long (kernels are loaded, memory grows). Prints reserved
bytes over peak live bytes of all that time, and steps per second. Torch's deterministic kernels are used, so
losses must be the same.

No turn is begun that would not end within `--seconds`; one is made in any case.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

#: What is measured, in the order of a turn.
CONTENDERS = ("torch", "expandable", "symmpool")
#: Bars: reserved over live bytes, at most; steps a second over torch's, at least.
MAX_RESERVED, MIN_RATE = 1.10, 0.99
#: What cuBLAS needs to be deterministic.
WORKSPACE = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def trainer(lengths):
    """A function that trains on one batch of each length, and returns some losses."""
    import torch

    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    width, layers, vocabulary = 768, 12, 8192
    layer = torch.nn.TransformerEncoderLayer(
        width, 12, 4 * width, dropout=0.0, batch_first=True, norm_first=True
    )
    model = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).cuda()
    embed = torch.nn.Embedding(vocabulary, width).cuda()
    head = torch.nn.Linear(width, vocabulary, bias=False).cuda()
    parameters = [*model.parameters(), *embed.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)

    def step(length):
        tokens = torch.randint(vocabulary, (8, length + 1), device="cuda")
        mask = torch.nn.Transformer.generate_square_subsequent_mask(length, "cuda")
        with torch.autocast("cuda", torch.bfloat16):
            out = head(model(embed(tokens[:, :-1]), is_causal=True, mask=mask))
            loss = torch.nn.functional.cross_entropy(out.flatten(0, 1).float(), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    all_lengths = torch.randint(64, 1024, (lengths,), generator=torch.Generator().manual_seed(1)).tolist()

    def train():
        losses = [step(length) for length in all_lengths]
        torch.cuda.synchronize()
        return [loss.item() for loss in losses[::10]]

    return train


def memory(which):
    """Peaks of live and of reserved bytes."""
    import torch

    import symmpool

    if which == "symmpool":
        stats = symmpool.memory_stats()
        return stats["peak_allocated"], stats["peak_reserved"]
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def serve(which, lengths):
    """A contender's process: a turn for each line that is read, and a line of JSON for each turn."""
    import symmpool

    if which == "symmpool":
        symmpool.install()
    train = trainer(lengths)
    for _ in sys.stdin:
        begin = time.perf_counter()
        losses = train()
        seconds = time.perf_counter() - begin
        live, reserved = memory(which)
        print(
            json.dumps({"seconds": seconds, "losses": losses, "live": live, "reserved": reserved}), flush=True
        )


class Contender:
    """A process that trains when it is its turn."""

    def __init__(self, which, lengths):
        self.which, self.turns = which, []
        self.errors = tempfile.TemporaryFile("w+")
        environment = os.environ | WORKSPACE
        if which == "expandable":
            environment["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        command = [sys.executable, __file__, "--only", which, "--lengths", str(lengths)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env=environment,
        )

    def turn(self):
        try:
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            self.errors.seek(0)
            sys.exit(f"{self.which} ended with {self.process.returncode}:\n{self.errors.read()}")
        return json.loads(line)

    def close(self):
        """Ends the process, and waits for its end."""
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self.errors.close()


def take_turns(options, contenders):
    """Returns the times and figures of each turn of each contender, without the first turn."""
    began, longest = time.perf_counter(), 0.0
    for which, contender in contenders.items():
        print(f"{which:10} {contender.turn()['seconds']:6.2f} s for the first turn", flush=True)
    found = {which: [] for which in contenders}
    for number in range(options.turns):
        begin = time.perf_counter()
        if number and begin - began + longest > options.seconds:
            print(f"no time for turn {number + 1}: one takes {longest:.0f} s", flush=True)
            break
        order = list(contenders)[number % len(contenders) :] + list(contenders)[: number % len(contenders)]
        for which in order:
            found[which].append(contenders[which].turn())
        longest = max(longest, time.perf_counter() - begin)
        rates = (f"{which} {options.lengths / turns[-1]['seconds']:.2f}" for which, turns in found.items())
        print(f"turn {number + 1} of {options.turns}, steps/s: {', '.join(rates)}", flush=True)
    return found


def summary(found, lengths):
    """Returns for each contender: reserved over live bytes, live bytes, and medians of the turns: of steps a
    second, and of these over torch's in the same turn. And whether losses are the same."""
    table = {}
    for which, turns in found.items():
        last = turns[-1]
        ratios = [
            torchs["seconds"] / mine["seconds"] for mine, torchs in zip(turns, found["torch"], strict=True)
        ]
        table[which] = {
            "reserved_over_live": last["reserved"] / last["live"],
            "live_bytes": last["live"],
            "steps_a_second": statistics.median(lengths / turn["seconds"] for turn in turns),
            "rate_over_torch": statistics.median(ratios),
        }
    losses = [[turn["losses"] for turn in turns] for turns in found.values()]
    return table, all(each == losses[0] for each in losses)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=12, help="at most (default 12)")
    parser.add_argument("--lengths", type=int, default=60, help="batches a turn (default 60)")
    parser.add_argument("--seconds", type=float, default=200, help="for all of it, about (default 200)")
    parser.add_argument("--json", metavar="FILE", help="write all that was measured")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.turns < 1 or options.lengths < 1:
        parser.error("at least 1 turn and 1 length")
    if options.only:
        return serve(options.only, options.lengths)
    contenders = {which: Contender(which, options.lengths) for which in CONTENDERS}
    try:
        found = take_turns(options, contenders)
    finally:
        for contender in contenders.values():
            contender.close()
    table, same = summary(found, options.lengths)
    print(f"{'':12}{'reserved / live':>16}{'live MiB':>10}{'steps/s':>10}{'of torch':>10}")
    for which, row in table.items():
        print(
            f"{which:12}{row['reserved_over_live']:16.3f}{row['live_bytes'] / (1 << 20):10.0f}"
            f"{row['steps_a_second']:10.2f}{row['rate_over_torch']:10.3f}"
        )
    print("losses are the same" if same else "LOSSES DIFFER")
    ours = table["symmpool"]
    met = ours["reserved_over_live"] <= MAX_RESERVED and ours["rate_over_torch"] >= MIN_RATE
    print(f"at most {MAX_RESERVED} and at least {MIN_RATE} of torch: {'met' if met else 'NOT met'}")
    if options.json:
        import torch

        from symmpool.bench import session

        arguments = map(session.without_folders, sys.argv[1:])
        command = ["python", "python/tests/gpu/measure_install.py", *arguments]
        report = session.facts(torch, "install", command, 1)
        report |= {"lengths": options.lengths, "same_losses": same, "results": table, "turns": found}
        with open(options.json, "w") as file:
            file.write(json.dumps(report, indent=1) + "\n")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
