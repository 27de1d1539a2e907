"""How programs of several ranks begin: their usual options, and each rank's device.

With SYMMPOOL_SHARED_DEVICE=1 ranks share devices, and gloo takes NCCL's place.
"""

import argparse
import os

import torch

#: Whether ranks share devices.
SHARED = os.environ.get("SYMMPOOL_SHARED_DEVICE") == "1"
#: torch's backend that is compared on CUDA.
PEER = "gloo" if SHARED else "nccl"


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
    number = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", number % torch.cuda.device_count() if SHARED else number)
    torch.cuda.set_device(device)
    return device
