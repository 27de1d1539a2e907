"""Verdicts on what works on a machine with these facts, what does not, and why."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

#: The first NCCL with symmetric windows, and the first whose windows may consist of several handles.
NCCL_WINDOWS, NCCL_PARTS = [2, 27, 0], [2, 30, 3]
#: The oldest CUDA driver.
CUDA = 12040
#: A warning is given below this limit of open files: a pool needs one for every segment of every rank.
FILES = 1024


@dataclass
class Verdict:
    """A feature, and whether it works."""

    what: str
    #: Whether it works; None if it works with a warning.
    works: bool | None
    why: str

    def as_dict(self) -> dict[str, Any]:
        """The verdict for JSON."""
        return asdict(self)


def judge(facts: dict[str, Any]) -> list[Verdict]:
    """All verdicts, in the order of the report."""
    found = [host(facts), *limits(facts)]
    found += [devices(facts), links(facts), across(facts), kernels(facts)]
    found += [tensors(facts), scopes(facts), install(facts), backend(facts), windows(facts)]
    found += [triton(facts), *engines(facts), *launch(facts), *variables(facts)]
    return found


def host(facts: dict[str, Any]) -> Verdict:
    """Whether pools and collectives in host memory work."""
    what = "pools and collectives in host memory"
    memory = facts["memory"]
    for problem, name in (
        (facts["host_error"], ""),
        (memory["memfd_error"], "memory cannot be shared: "),
        (memory["reserve_error"], "address space cannot be reserved: "),
    ):
        if problem:
            return Verdict(what, False, f"{name}{problem}")
    return Verdict(what, True, f"{facts['system']['cpus']} CPUs; ranks on one machine, one user")


def limits(facts: dict[str, Any]) -> list[Verdict]:
    """Returns the verdicts on this process's limits that get in the way; none where all is well."""
    memory, found = facts["memory"], []
    if memory["open_files"] is not None and memory["open_files"] < FILES:
        why = f"only {memory['open_files']} open files (ulimit -n); a segment takes one"
        found.append(Verdict("many segments", None, why))
    if memory["address_space_bytes"] is not None:
        why = "address space is limited (ulimit -v); pass a smaller stride to Pool"
        found.append(Verdict("many ranks", None, why))
    sizes = [memory["available_bytes"], memory["cgroup_bytes"]]
    smallest = min((size for size in sizes if size is not None), default=None)
    if smallest is not None and smallest < 1 << 30:
        why = f"{smallest >> 20} MiB of memory are left"
        found.append(Verdict("large pools in host memory", None, why))
    return found


def usable(facts: dict[str, Any]) -> list[dict[str, Any]]:
    """The devices without an error."""
    return [device for device in facts["cuda"]["devices"] if not device["error"]]


def devices(facts: dict[str, Any]) -> Verdict:
    """Whether pools on CUDA devices work."""
    what = "pools on CUDA devices"
    cuda = facts["cuda"]
    if cuda["error"]:
        return Verdict(what, False, cuda["error"])
    if not cuda["devices"]:
        return Verdict(what, False, "the driver shows no device; see CUDA_VISIBLE_DEVICES")
    good, all_of_them = usable(facts), cuda["devices"]
    if len(good) < len(all_of_them):
        bad = next(device for device in all_of_them if device["error"])
        why = f"device {bad['ordinal']}: {bad['error']}"
        return Verdict(what, False if not good else None, why)
    if any(device["driver"] < CUDA for device in good):
        return Verdict(what, False, "the driver is older than CUDA 12.4")
    if not any(device["posix_fd"] or device["fabric"] for device in good):
        return Verdict(what, False, "memory can be exported neither as descriptors nor by FABRIC")
    names = sorted({device["name"] for device in good})
    return Verdict(what, True, f"{len(good)} x {', '.join(names)}")


def links(facts: dict[str, Any]) -> Verdict:
    """Whether collectives between this machine's devices work."""
    what = "collectives between the devices of this machine"
    good = usable(facts)
    if len(good) < 2:
        seen = facts["launcher"].get("CUDA_VISIBLE_DEVICES")
        if len(good) == 1 and seen is not None:
            why = f"CUDA_VISIBLE_DEVICES={seen} shows one device here; ranks that each see another one meet"
            return Verdict(what, None, why)
        return Verdict(what, False, f"{len(good)} usable devices; ranks may share one on request")
    if not all(device["posix_fd"] for device in good):
        return Verdict(what, False, "a device does not export memory as POSIX descriptors")
    if len(good) > 8:
        return Verdict(what, None, "at most 8 ranks take part in collectives on devices")
    return Verdict(what, True, facts["cuda"]["mesh"] or "links unknown")


def across(facts: dict[str, Any]) -> Verdict:
    """Whether memory of devices can be shared between machines."""
    what = "device memory shared across machines"
    good = usable(facts)
    if good and all(device["fabric"] for device in good):
        return Verdict(what, True, "FABRIC handles work")
    why = good[0]["fabric_why"] if good else "no device"
    return Verdict(what, False, f"FABRIC handles: {why}")


def kernels(facts: dict[str, Any]) -> Verdict:
    """Whether kernels for devices can be compiled, and are kept."""
    what = "kernels for devices"
    compiler, cache = facts["nvrtc"], facts["kernel_cache"]
    if compiler["error"]:
        return Verdict(what, False, compiler["error"])
    version = ".".join(map(str, compiler["version"]))
    if cache["error"]:
        return Verdict(what, None, f"NVRTC {version}; not kept on disk: {cache['error']}")
    return Verdict(what, True, f"NVRTC {version}, {compiler['place']}")


def tensors(facts: dict[str, Any]) -> Verdict:
    """Whether calls take tensors of torch."""
    what = "tensors of torch"
    torch = facts["torch"]
    if torch["version"] is None:
        return Verdict(what, False, f"{torch['error']}; numpy arrays and Blocks work without")
    if usable(facts) and not torch["cuda"]:
        return Verdict(what, None, f"torch {torch['version']} is built without CUDA")
    if not torch["fast_exchange"]:
        why = f"torch {torch['version']} has no DLPack function table: calls take a little longer"
        return Verdict(what, True, why)
    return Verdict(what, True, f"torch {torch['version']}")


def _cannot_allocate(facts: dict[str, Any], what: str) -> Verdict | None:
    """Why torch's allocator cannot be replaced; None if it can."""
    torch = facts["torch"]
    if torch["version"] is None:
        return Verdict(what, False, torch["error"])
    if not torch["cuda"] or not torch["allocator"]["pluggable"]:
        return Verdict(what, False, f"torch {torch['version']} is built without CUDA")
    if not usable(facts):
        return Verdict(what, False, "no device; on the CPU there is pool.empty()")
    return None


def scopes(facts: dict[str, Any]) -> Verdict:
    """Whether `with pool:` works on devices."""
    what = "torch's allocations in a pool (with pool:)"
    refused = _cannot_allocate(facts, what)
    if refused is not None:
        return refused
    torch, allocator = facts["torch"], facts["torch"]["allocator"]
    if not allocator["mempool"]:
        return Verdict(what, False, f"torch {torch['version']} has no torch.cuda.use_mem_pool; update it")
    if allocator["backend"] == "cudaMallocAsync":
        why = "torch's allocator is cudaMallocAsync (PYTORCH_CUDA_ALLOC_CONF), which has no MemPool"
        return Verdict(what, False, why)
    return Verdict(what, True, f"MemPool of torch {torch['version']}")


def install(facts: dict[str, Any]) -> Verdict:
    """Whether `symmpool.install()` works."""
    what = "all of torch's CUDA memory (symmpool.install())"
    refused = _cannot_allocate(facts, what)
    if refused is not None:
        return refused
    allocator = facts["torch"]["allocator"]
    if allocator["install_error"]:
        return Verdict(what, False, allocator["install_error"])
    return Verdict(what, True, "before torch first uses CUDA")


def triton(facts: dict[str, Any]) -> Verdict:
    """Whether Triton can use handles of symmetric memory."""
    what = "Triton on handles of symmetric memory"
    found = facts["triton"]
    if found["version"] is None:
        return Verdict(what, False, f"{found['error']}; kernels in CUDA work without")
    if facts["torch"]["version"] is None:
        return Verdict(what, False, facts["torch"]["error"])
    if not usable(facts):
        return Verdict(what, False, f"Triton {found['version']}, but no device")
    return Verdict(what, True, f"Triton {found['version']}")


def engines(facts: dict[str, Any]) -> list[Verdict]:
    """A verdict for each serving engine that is installed, and for each library that engines call."""
    found = []
    for each in facts["engines"].values():
        if each["installed"] is None:
            continue
        if each["problem"]:
            why = f"{each['problem']}; SYMMPOOL_ENGINES=any on every rank serves it all the same"
            found.append(Verdict(f"in {each['name']}", False, why))
            continue
        ran = any(each["installed"] == version.partition(" ")[0] for version in each["tested"])
        why = f"{each['installed']}, {'which ran' if ran else 'which was not run'} with symmpool"
        found.append(Verdict(f"in {each['name']}", True, why))
    return found


def variables(facts: dict[str, Any]) -> list[Verdict]:
    """A verdict for each variable that is wrong or unknown."""
    variables = facts["variables"]
    found = [Verdict(f"variable {name}", False, why) for name, why in variables["wrong"].items()]
    why = "there is no such variable; is another one meant?"
    return found + [Verdict(f"variable {name}", None, why) for name in variables["unknown"]]


def launch(facts: dict[str, Any]) -> list[Verdict]:
    """The verdict on the group that a launcher describes; none where there is no launcher."""
    what, found = "the group that the launcher describes (Group.from_env)", facts["launch"]
    if found["error"] is not None:
        return [Verdict(what, False, found["error"])]
    if found["launcher"] is None:
        return []
    local = "" if found["local_rank"] is None else f", {found['local_rank']} on its machine"
    who = f"rank {found['rank']} of {found['world']}{local}"
    return [Verdict(what, True, f"{found['launcher']}: {who}; ranks meet at {found['rendezvous']}")]


def backend(facts: dict[str, Any]) -> Verdict:
    """Whether the backend of torch.distributed works, and with which fallbacks."""
    what = "backend of torch.distributed"
    torch = facts["torch"]
    if torch["version"] is None or not torch["distributed"]:
        return Verdict(what, False, "torch.distributed is not available")
    problem = torch["problem"]
    if problem is not None and "older" in problem:
        return Verdict(what, False, f"{problem}, whose DDP waits for ever for a backend written in Python")
    fallbacks = [name for name in ("nccl", "gloo") if torch[name]]
    if not fallbacks:
        return Verdict(what, None, "no fallback backend (NCCL or gloo) for calls that it does not serve")
    seen = "" if torch["python_backends"] else "; torch's hooks and flight recorder need torch 2.14"
    why = f"fallback backends: {', '.join(fallbacks)}{seen}"
    if problem is not None:
        return Verdict(what, None, f"{problem}, so nothing of it was tested; {why}")
    return Verdict(what, True, why)


def windows(facts: dict[str, Any]) -> Verdict:
    """Whether windows can be registered with NCCL."""
    what = "windows registered with NCCL"
    nccl = facts["nccl"]
    if nccl["version"] is None:
        return Verdict(what, False, f"no NCCL: {nccl['error']}")
    version = ".".join(map(str, nccl["version"]))
    if nccl["version"] < NCCL_WINDOWS or not nccl["windows"]:
        return Verdict(what, False, f"NCCL {version}; windows need NCCL 2.27")
    if not usable(facts):
        return Verdict(what, False, f"NCCL {version}, but no device")
    if nccl["version"] < NCCL_PARTS:
        why = f"NCCL {version}: one handle a window, so lanes of windows that blocks do not cross"
        return Verdict(what, None, why)
    return Verdict(what, True, f"NCCL {version}")
