"""Prints the folder in which `import deep_ep` finds `symmpool.deep_ep`:

PYTHONPATH=$(python -m symmpool.deep_ep) python program.py"""

from pathlib import Path

print(Path(__file__).with_name("importable"))
