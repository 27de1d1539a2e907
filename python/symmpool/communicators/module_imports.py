"""Changes of modules of torch that a program may import later."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec

__all__ = ["ModuleFinder", "when_imported"]


def when_imported(name: str, change: Callable[[ModuleType], None]) -> None:
    """Calls `change` with the module of that name: now, if it is loaded, and else when it is first imported.
    While one change of a module waits for its import, further ones are left out."""
    loaded = sys.modules.get(name)
    if loaded is not None:
        change(loaded)
    elif not any(isinstance(each, ModuleFinder) and each.name == name for each in sys.meta_path):
        sys.meta_path.insert(0, ModuleFinder(name, change))


class ModuleFinder(importlib.abc.MetaPathFinder):
    """Finds a module as others do, once, and changes it when it is there."""

    def __init__(self, name: str, change: Callable[[ModuleType], None]):
        self.name, self._change = name, change

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The specification that other finders have for the module; None for other modules."""
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        loader = spec.loader if spec is not None else None
        if loader is None:
            return spec
        execute, change = loader.exec_module, self._change

        def exec_module(module: ModuleType) -> None:
            execute(module)
            change(module)

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
