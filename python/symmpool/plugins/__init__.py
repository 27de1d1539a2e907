"""symmpool in serving engines by plug-in: the installed package is active in vLLM and SGLang without a
change of theirs.

`python/symmpool/plugins/entry.py` has the functions that engines call, and says what SYMMPOOL_ENGINES means;
docs/recipes/ has a page for each engine.
"""
