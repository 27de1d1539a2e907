"""The backend "symmpool" of torch.distributed, as programs import it.

Importing this module makes the name known to torch. `symmpool.torch_backend.process_group` describes what the
backend serves.
"""

from symmpool.torch_backend.counts import backend_counts, last_backend
from symmpool.torch_backend.process_group import SymmpoolProcessGroup
from symmpool.torch_backend.registration import create, register

__all__ = ["SymmpoolProcessGroup", "backend_counts", "create", "last_backend", "register"]

register()
