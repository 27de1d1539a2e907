"""Makes the backend of torch.distributed known when torch is imported.

torch calls `register` at the end of its own import, by the entry point of the installed package. It is a
package of its own, as importing `symmpool` loads a compiled library: a program that never names the backend
does not load it, and is safe from whatever may be wrong with it.
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
        # A program that names the backend gets torch's error about it.
        return


def _create(options: Any, backend_options: Any = None) -> Any:
    from symmpool import backend

    return backend.create(options, backend_options)
