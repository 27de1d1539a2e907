"""`import deep_ep` in an engine's process."""

from __future__ import annotations

import importlib.util
import sys

from symmpool.plugins.report import ServiceReport
from symmpool.plugins.versions import ENGINES, installed

__all__ = ["put_in_place"]


def put_in_place(report: ServiceReport, managers: str) -> None:
    """`import deep_ep` finds ours, unless DeepEP itself is installed. `managers` are the engine's settings
    that need it."""
    ours = getattr(sys.modules.get("deep_ep"), "__name__", "") == "symmpool.deep_ep"
    if not ours and importlib.util.find_spec("deep_ep") is not None:
        found = ENGINES["deep_ep"]
        version = installed(found)
        report.left.append(
            f"{managers}, as {found.name}{f' {version}' if version else ''} is installed; uninstall that, "
            "and symmpool has its names"
        )
        return
    from symmpool import deep_ep

    deep_ep.install()
    report.served.append(f"{managers} (import deep_ep)")
