"""The handle of torch's symmetric memory, as programs import it; `symmpool.memory.handle` has it."""

from symmpool.memory.handle import SIGNAL_PAD_SIZE, SymmetricMemory, rendezvous

__all__ = ["SIGNAL_PAD_SIZE", "SymmetricMemory", "rendezvous"]
