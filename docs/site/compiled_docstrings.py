"""Docstrings of the compiled module for mkdocstrings, which reads signatures from the stubs alone."""

import importlib
import inspect

import griffe

COMPILED = "symmpool._symmpool"


class CompiledDocstrings(griffe.Extension):
    """Gives what the stubs declare the docstring that the compiled object has."""

    def on_object(self, *, obj, loader, **_):
        module, _, name = obj.path.partition(f"{COMPILED}.")
        if module or not name or obj.docstring:
            return
        found = importlib.import_module(COMPILED)
        for part in name.split("."):
            found = getattr(found, part, None)
        # An object's own docstring, not what a class inherits from `object`.
        text = getattr(found, "__doc__", None)
        inherited = getattr(object, obj.name, None)
        if isinstance(text, str) and text != getattr(inherited, "__doc__", None):
            obj.docstring = griffe.Docstring(inspect.cleandoc(text), parent=obj)
