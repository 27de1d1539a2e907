"""What `symmpool.install()` reserves and costs beside torch's allocator, on one GPU.

    python python/tests/gpu/measure_install.py [--rounds 3] [--json FILE]

Trains a small GPT with batches of many lengths, as in tests/traces, in a process for each allocator
and round: torch's, torch's with expandable segments, and ours. Prints reserved bytes over peak live
bytes, and steps per second; losses must be the same.
"""

import argparse
import json
import os
import subprocess
import sys
import time


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


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--json")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        return train(options.only, options.steps)
    found = {"torch": [], "expandable": [], "symmpool": []}
    for _ in range(options.rounds):
        for which, rounds in found.items():
            command = [sys.executable, __file__, "--only", which, "--steps", str(options.steps)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=600)
            if done.returncode:
                sys.exit(done.stdout + done.stderr)
            rounds.append(json.loads(done.stdout.splitlines()[-1]))
    print(f"{'':12}{'reserved / live':>16}{'live MiB':>10}{'steps/s':>10}")
    for which, rounds in found.items():
        best = max(rounds, key=lambda r: r["rate"])
        ratio = max(r["reserved"] / r["live"] for r in rounds)
        print(f"{which:12}{ratio:16.3f}{best['live'] / (1 << 20):10.0f}{best['rate']:10.2f}")
    same = all(r["losses"] == found["torch"][0]["losses"] for rs in found.values() for r in rs)
    print("losses are the same" if same else "LOSSES DIFFER")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
