"""Makes the backend of torch.distributed known when torch is imported.

torch calls `register` at the end of its own import, by the entry point of the installed package. This stands
beside `symmpool`, and not in it, as importing that loads a compiled library: a program that never names
the backend is spared it, and whatever may be wrong with it.
"""

from __future__ import annotations

import sys
from typing import Any


def register() -> None:
    """Makes the name "symmpool" known to torch.distributed, if the program has imported that. Raises
    nothing: torch would not be imported then."""
    try:
        dist = sys.modules.get("torch.distributed")
        if dist is None or not dist.is_available() or "SYMMPOOL" in dist.Backend._plugins:
            return
        dist.Backend.register_backend("symmpool", _create, extended_api=True, devices=["cpu", "cuda"])
    except Exception:
        # Who names the backend hears of it from torch.
        return


def _create(options: Any, backend_options: Any = None) -> Any:
    from symmpool import backend

    return backend.create(options, backend_options)
