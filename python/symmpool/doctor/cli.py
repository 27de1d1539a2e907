"""The command line, and the report as a table."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from symmpool.doctor import facts as machine_facts
from symmpool.doctor.verdicts import Verdict, judge

WORDS = {True: "yes", None: "partly", False: "no"}
WIDTH = 100


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0 if at least pools in host memory work, else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m symmpool doctor",
        description="What this machine has, what will work on it, what will not, and why.",
    )
    parser.add_argument("--json", action="store_true", help="print facts and verdicts as JSON")
    parser.add_argument("--no-torch", action="store_true", help="do not import torch")
    options = parser.parse_args(arguments)
    facts = machine_facts.collect(with_torch=not options.no_torch)
    verdicts = judge(facts)
    if options.json:
        whole = {"facts": facts, "verdicts": [verdict.as_dict() for verdict in verdicts]}
        print(json.dumps(whole, indent=2))
    else:
        print("\n".join(report(facts, verdicts)))
    return 0 if verdicts[0].works is not False else 1


def report(facts: dict[str, Any], verdicts: list[Verdict]) -> list[str]:
    """The lines that `doctor` prints."""
    commit = f", commit {facts['commit']}" if facts.get("commit") else ""
    lines = [f"symmpool {facts['symmpool']}{commit}", ""]
    lines += table(rows(facts)) + [""]
    lines += matrix(facts["cuda"])
    lines += ["What will work:", ""]
    lines += table([(verdict.what, WORDS[verdict.works], verdict.why) for verdict in verdicts])
    return lines


def size(bytes: int | None) -> str:
    """Bytes as text, in GiB; None is no limit."""
    return "no limit" if bytes is None else f"{bytes / (1 << 30):,.1f} GiB"


def rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns names and values of the machine's facts."""
    system, memory, torch = facts["system"], facts["memory"], facts["torch"]
    found = [
        ("system", f"Linux {system['kernel']}, {system['machine']}, {system['cpus']} CPUs"),
        ("Python", f"{system['python']}, {facts['launcher']['executable']}"),
        ("memory left", size(memory["available_bytes"])),
        ("of the control group", size(memory["cgroup_bytes"])),
        ("shared memory", memory["memfd_error"] or "memfd works"),
        ("open files", str(memory["open_files"] or "no limit")),
        ("torch", torch_row(torch)),
    ]
    for device in facts["cuda"]["devices"]:
        name = f"cuda:{device['ordinal']}"
        if device["error"]:
            found.append((name, device["error"]))
            continue
        driver = f"driver for CUDA {device['driver'] // 1000}.{device['driver'] % 1000 // 10}"
        handles = [word for word, has in (("POSIX", device["posix_fd"]),) if has]
        handles.append(f"FABRIC {device['fabric_why']}")
        free = f"{size(device['free_bytes'])} of {size(device['total_bytes'])} free"
        found.append((name, f"{device['name']}, {free}, {driver}"))
        found.append(("", f"handles: {', '.join(handles)}"))
    if not facts["cuda"]["devices"]:
        found.append(("CUDA", facts["cuda"]["error"] or "no device"))
    held = facts["communicators"]
    if facts["cuda"]["devices"] and held["bytes"]:
        first, further = (f"{bytes / (1 << 20):,.0f} MiB" for bytes in held["bytes"])
        if held["growing_bytes"]:
            least, most = (f"{bytes / (1 << 20):,.0f} MiB" for bytes in held["growing_bytes"])
            found.append(("a group", f"{least} of a device, {most} from its first large call on"))
            found.append(("a Communicator", f"{first} of a device"))
        else:
            found.append(("a communicator", f"{first} of a device, each further one of a process {further}"))
        found += rooms(facts["cuda"]["devices"], held["growing_bytes"])
        found.append(("how a call is made", 'print(symmpool.communicator(group).explain("all_reduce", x))'))
    for each in held.get("held", []):
        wants = (
            f", and wants {each['wanted'] / (1 << 20):,.0f} MiB more for large calls"
            if each["wanted"]
            else ""
        )
        has = f"{each['total'] / (1 << 20):,.1f} MiB of {each['device']}{wants}"
        found.append((f"held for {each['group']}", has))
    compiler, nccl = facts["nvrtc"], facts["nccl"]
    version = compiler["error"] or ".".join(map(str, compiler["version"]))
    found.append(("NVRTC", version if compiler["error"] else f"{version}, {compiler['place']}"))
    cache = facts["kernel_cache"]
    stored = cache["place"] or "not kept"
    stored = f"{stored} ({cache['error']})" if cache["error"] else stored
    found.append(("compiled kernels", stored))
    if nccl["version"] is None:
        found.append(("NCCL", nccl["error"]))
    else:
        found.append(("NCCL", f"{'.'.join(map(str, nccl['version']))}, {nccl['place']}"))
    for each in facts["engines"].values():
        served = f"served from {each['served'][0]} to {each['served'][1]}"
        ran = f"; {', '.join(each['tested'])} ran" if each["tested"] else ""
        found.append((each["name"], f"{each['installed'] or 'not installed'}; {served}{ran}"))
    variables = {name: text for name, text in facts["launcher"].items() if name != "executable"}
    if variables:
        found.append(("environment", ", ".join(f"{name}={text}" for name, text in variables.items())))
    return found


def torch_row(torch: dict[str, Any]) -> str:
    """torch's version, and which versions are served and were tested."""
    if torch["version"] is None:
        return torch["error"]
    oldest, _ = torch["served"]
    return (
        f"{torch['version']}; the backend needs {oldest} or newer; {', '.join(torch['tested'])} were tested"
    )


#: Bytes of a device that communicators leave to others.
LEFT = 64 << 20


def rooms(devices: list[dict[str, Any]], growing: list[int] | None) -> list[tuple[str, str]]:
    """The devices that have no room for the memory of a group's large calls now."""
    found = []
    for device in devices:
        if growing is None or device["error"] or device["free_bytes"] >= growing[1] + LEFT:
            continue
        why = f"has no room for {growing[1] / (1 << 20):,.0f} MiB: large calls take up to 2.5 times as long"
        found.append((f"memory of cuda:{device['ordinal']}", why))
    return found


def matrix(cuda: dict[str, Any]) -> list[str]:
    """The lines of a matrix of links between devices; none for fewer than two devices."""
    if len(cuda["links"]) < 2:
        return []
    lines = [f"Links ({cuda['mesh']}):", ""]
    lines.append("      " + "".join(f"{at:>6}" for at in range(len(cuda["links"]))))
    for at, row in enumerate(cuda["links"]):
        lines.append(f"{at:>6}" + "".join(f"{link:>6}" for link in row))
    return [*lines, ""]


def brief(text: str) -> str:
    """A message without the list of libraries that were tried; the JSON has it."""
    text = text.removeprefix("symmpool: ")
    head, tried, rest = text.partition("; tried")
    if not tried:
        return text
    advice = rest.partition(". ")[2]
    return f"{head}. {advice}" if advice else head


def table(found: Sequence[tuple[str, ...]]) -> list[str]:
    """Lines with aligned columns. The last column is wrapped if it is long."""
    widths = [max(len(row[at]) for row in found) for at in range(len(found[0]) - 1)]
    left = sum(widths) + 2 * len(widths)
    lines = []
    for row in found:
        first = "".join(f"{cell:<{width}}  " for cell, width in zip(row[:-1], widths, strict=True))
        width = max(WIDTH - left, 40)
        text = brief(row[-1])
        parts = textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False) or [""]
        lines.append((first + parts[0]).rstrip())
        lines += [" " * left + part for part in parts[1:]]
    return lines


if __name__ == "__main__":
    sys.exit(main())
