"""Frame of every benchmark: it connects the ranks, describes the machine, reports results, and
disconnects."""

import json
import os
import platform
import re
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path

import symmpool
from symmpool import _symmpool
from symmpool.bench import peers
from symmpool.bench.arguments import comma_separated

DTYPES = {
    "f32": "float32",
    "f64": "float64",
    "f16": "float16",
    "bf16": "bfloat16",
    "i32": "int32",
    "i64": "int64",
    "u8": "uint8",
    "i8": "int8",
}


class Progress:
    """A progress line on standard error, on rank 0, if that is a terminal."""

    def __init__(self, total, shown):
        self.total, self.done, self.shown = total, 0, shown and sys.stderr.isatty()

    def step(self, what):
        self.done += 1
        if self.shown:
            bar = "#" * (20 * self.done // self.total)
            line = f"[{bar:<20}] {self.done}/{self.total} {what}"
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)

    def close(self):
        if self.shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def driver_version():
    """The version of the NVIDIA driver from /proc; None without one."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"Module(?:\s+for\s+\S+)?\s+(\d+(?:\.\d+)+)", text)
    return found[1] if found else None


def without_folders(argument):
    """A command's argument as it may be published: only the last part of a path, also in `--name=PATH`."""
    name, equals, value = argument.rpartition("=")
    return name + equals + os.path.basename(value.rstrip("/"))


def facts(torch, benchmark, command, world, on_cuda=True):
    """On what and how results were measured, for programs with one process for each device of one machine.
    `command` begins with names of this repository; folders in its arguments are left out."""
    cuda = torch.cuda
    commit, kernels = _symmpool.built()
    nccl, devices = None, [platform.machine()] * world
    if on_cuda:
        nccl = ".".join(map(str, cuda.nccl.version()))
        count = cuda.device_count()
        devices = [cuda.get_device_name(rank % count) for rank in range(world)]
    return {
        "benchmark": benchmark,
        "symmpool": symmpool.__version__,
        "commit": commit,
        "kernels": kernels,
        "measured_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": command,
        "world": world,
        "devices": devices,
        "driver": driver_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": nccl,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cores": os.cpu_count(),
        "environment": peers.environment(),
    }


def describe(benchmark, ranks, arguments, contenders, missing):
    """The facts of a benchmark of this package, with the devices of all ranks."""
    torch = ranks.torch
    command = ["python", "-m", "symmpool", "bench", *map(without_folders, arguments)]
    device = torch.cuda.get_device_name(ranks.device) if ranks.on_cuda else platform.machine()
    return {
        **facts(torch, benchmark, command, ranks.world, ranks.on_cuda),
        "devices": ranks.gather(device),
        "contenders": list(contenders),
        "missing": missing,
    }


def require_writable(path):
    """Raises SystemExit if a file cannot be written, before hours are spent on its contents."""
    if not path.parent.is_dir():
        raise SystemExit(f"{path}: there is no folder {path.parent}")
    if path.is_dir():
        raise SystemExit(f"{path} is a folder")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise SystemExit(f"{path} cannot be written to")


def find_torch(options, example):
    """torch, and whether the benchmark runs on GPUs, none of which is used yet. Raises SystemExit if there is
    none, and outside of torchrun, for which `example` has arguments."""
    try:
        import torch
        import torch.distributed
    except ImportError as error:
        raise SystemExit(f"the benchmark needs torch, which cannot be imported: {error}") from error
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise SystemExit(f"the benchmark runs under torchrun: torchrun {example}")
    on_cuda = torch.cuda.is_available() if options.device == "auto" else options.device == "cuda"
    if on_cuda and not torch.cuda.is_available():
        raise SystemExit("--device cuda: torch sees no CUDA device")
    return torch, on_cuda


def find_device(options, example):
    """torch, and this process's device, which becomes the current one. Raises SystemExit as `find_torch`."""
    torch, on_cuda = find_torch(options, example)
    if not on_cuda:
        return torch, torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return torch, device


def connect(options):
    """Initializes torch.distributed, and returns this process's ranks and device."""
    torch, device = find_device(options, "--nproc-per-node 4 -m symmpool bench allreduce")
    timeout = timedelta(seconds=options.timeout)
    if device.type == "cuda":
        torch.distributed.init_process_group("nccl", timeout=timeout, device_id=device)
    else:
        torch.distributed.init_process_group("gloo", timeout=timeout)
    return peers.Ranks(torch, device, options.timeout)


def fill_in(options, usual):
    """Gives options that were left out the values that are usual on the device."""
    for name, value in usual.items():
        if getattr(options, name) is None:
            setattr(options, name, value)


def require_parts(options, sizes, dtype, world):
    """Raises SystemExit if a size does not divide into whole elements for each rank."""
    unit = dtype.itemsize * world
    if any(size % unit for size in sizes):
        raise SystemExit(
            f"sizes must be multiples of {unit} bytes: {options.dtype} for each of {world} ranks"
        )


def requested_peers(options):
    """The names given with --peers, an empty list for "none"; None if the option is not given."""
    if options.peers is None:
        return None
    if options.peers == "none":
        return []
    return comma_separated(options.peers)


def devices(facts):
    """Number and names of devices, for a title."""
    return f"{facts['world']} x {', '.join(sorted(set(facts['devices'])))}"


def where(facts):
    """Ranks, devices and versions, for a heading."""
    devices = ", ".join(sorted(set(facts["devices"])))
    nccl = f", NCCL {facts['nccl']}, driver {facts['driver']}" if facts["nccl"] else ""
    return f"{facts['world']} ranks on {devices}; torch {facts['torch']}{nccl}"


def describe_forms(facts):
    """A heading's words about the figures in brackets; empty on the CPU, where there are none."""
    return "; in brackets: calls in a graph, the best for each contender" if facts["nccl"] else ""


def print_missing(facts, rows, which):
    """Prints which contenders were not measured, at all or in a row, and why. `which` describes a row."""
    for name, why in facts["missing"].items():
        print(f"\nmissing: {name}: {why}")
    for row in rows:
        for name, why in row.missing.items():
            print(f"missing {which(row)}: {name}: {why}")


def write(options, facts, rows):
    """Writes all figures to the file that --json names."""
    if options.json:
        # Paths are written as text.
        given = {key: value for key, value in vars(options).items() if key not in ("json", "plot")}
        if given.get("matrix"):
            given["matrix"] = given["matrix"].name
        whole = {**facts, "options": given, "results": [row.to_json() for row in rows]}
        options.json.write_text(json.dumps(whole, indent=1, default=str) + "\n")


def end(ranks, contenders, pools, rows, report):
    """Calls `report` on rank 0 with the names of symmpool's contenders and of the others, and releases
    everything. Returns the exit status: 1 if symmpool was wrong or missing, or a file was not written."""
    ours = [name for name in contenders if name.split()[0] == "ours"]
    others = [name for name in contenders if name not in ours]
    unwritten = False
    if ranks.rank == 0:
        try:
            report(ours, others)
        except OSError as error:
            # The other ranks wait for this one, so it goes on to the end.
            print(f"not everything was written: {error}", file=sys.stderr)
            unwritten = True
    ranks.meet()
    for name, contender in contenders.items():
        _, why = ranks.attempt(contender.close)
        if why is not None and ranks.rank == 0:
            print(f"closing {name}: {why}", file=sys.stderr)
    pools.close()
    ranks.dist.destroy_process_group()
    wrong = any(name in row.missing for row in rows for name in ours)
    return 1 if wrong or unwritten or not ours else 0
