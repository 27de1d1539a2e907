"""How programs of random cases begin: their usual options, and each rank's device."""

import argparse
import os

import torch


def parser(description, count, what):
    """With options for the kind of device, and for which cases are made."""
    it = argparse.ArgumentParser(description=description)
    it.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    it.add_argument("--count", type=int, default=count, help=f"of {what} (default {count})")
    it.add_argument("--begin", type=int, default=0, help="the first one's number")
    it.add_argument("--seed", type=int, default=1)
    return it


def device_of(kind):
    """This rank's device, the current one; None, and a line that says so, where there is no such."""
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        print("skipped: no CUDA device")
        return None
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device
