"""Symmetric memory as programs of torch use it: scopes of pools, `install`, handles, and NCCL's windows."""
