"""Report of what symmpool serves in an engine's process, as one line."""

from __future__ import annotations

from dataclasses import dataclass, field

from symmpool._symmpool import version as own_version

__all__ = ["VARIABLE", "ServiceReport"]

VARIABLE = "SYMMPOOL_ENGINES"


@dataclass
class ServiceReport:
    """Summary of what symmpool serves in an engine's process."""

    #: The device that the engine's ranks compute on, in words.
    place: str
    served: list[str] = field(default_factory=list)
    #: What is not served, and why.
    left: list[str] = field(default_factory=list)
    #: What is to be set for speed.
    advice: list[str] = field(default_factory=list)

    def line(self, engine: str, version: str) -> str:
        """All of it as one line."""
        parts = [f"symmpool {own_version()} serves {engine} {version} on {self.place}: "]
        parts.append(", ".join(self.served) or "nothing")
        if self.left:
            parts.append(f"; not served: {'; '.join(self.left)}")
        parts.append("".join(f". {advice}" for advice in self.advice))
        return "".join(parts) + f". {VARIABLE}=off turns it off"
