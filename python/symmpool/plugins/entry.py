"""Entry of an installed symmpool in the processes of serving engines: `vllm.general_plugins` and
`sglang.srt.plugins` lead here.

The engine calls its function in every process that it starts, before that makes groups. One line in the
engine's log says what symmpool serves there, what it does not and why. SYMMPOOL_ENGINES=off turns it off;
"on" is the default, and "any" serves versions of engines that are not known.
"""

from __future__ import annotations

import importlib
import logging
import os

from symmpool._symmpool import version as own_version
from symmpool.errors import InvalidArgumentError
from symmpool.plugins.report import VARIABLE, ServiceReport
from symmpool.plugins.versions import ENGINES, EngineVersions

__all__ = ["mode", "sglang", "vllm"]

_MODES = ("on", "off", "any")

# The process that the line was said in: a forked child has the engine's modules as they were, and no line.
_said: list[int] = []


def mode() -> str:
    """Returns the value of SYMMPOOL_ENGINES: "on", "off" or "any". Raises InvalidArgumentError for anything
    else."""
    value = os.environ.get(VARIABLE, "").strip().lower() or "on"
    if value not in _MODES:
        raise InvalidArgumentError(
            f"{VARIABLE}={os.environ[VARIABLE]!r}: it is on, off, or any (for versions of engines that are "
            "not known); unset it, or set one of these on every rank"
        )
    return value


def vllm() -> None:
    """Called by vLLM in each of its processes."""
    _begin(ENGINES["vllm"], "vllm", "symmpool.plugins.vllm", "vllm.plugins.symmpool")


def sglang() -> None:
    """Called by SGLang in each of its processes."""
    _begin(ENGINES["sglang"], "sglang", "symmpool.plugins.sglang", "sglang.srt.plugins.symmpool")


def _begin(engine: EngineVersions, package: str, plugin: str, log: str) -> None:
    """Puts in place what serves an engine, and says so once a process. `log` is a logger of the engine's, as
    the engine shows no others."""
    logger = logging.getLogger(log)
    wanted = mode()
    if os.getpid() in _said:
        return
    _said.append(os.getpid())
    if wanted == "off":
        logger.info("symmpool %s serves nothing in this process: %s=off", own_version(), VARIABLE)
        return
    version = str(getattr(importlib.import_module(package), "__version__", "unknown"))
    problem = engine.problem(version)
    if problem is not None and wanted != "any":
        logger.warning(
            "symmpool %s serves nothing in this process: %s, and %s to %s are known; set %s=any to have it "
            "serve this version on every rank, or off to be rid of this line",
            own_version(),
            problem,
            engine.oldest,
            engine.newest,
            VARIABLE,
        )
        return
    report: ServiceReport = importlib.import_module(plugin).put_in_place()
    remark = problem or engine.remark(version, report.place)
    if remark is not None:
        report.advice.append(f"Beware: {remark}")
    logger.info("%s", report.line(engine.name, version))
