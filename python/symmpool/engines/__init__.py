"""Modules with the names that serving engines use, on this package's pools.

| module | stands in for |
| --- | --- |
| `symmpool.engines.vllm` | vLLM's `vllm.distributed.device_communicators.pynccl_allocator` |
| `symmpool.engines.sglang` | SGLang's `sglang.srt.distributed.device_communicators.pynccl_allocator` |
| `symmpool.engines.custom_allreduce` | the class `CustomAllreduce` of both |

`install()` of the first two puts them in the places of the engines' modules. Engines start processes that
import these on their own, so it is for each of them, before any has made a pool: an entry point
`symmpool.engines.vllm:install` in the group `vllm.general_plugins`, or `symmpool.engines.sglang:install` in
`sglang.srt.plugins`, is called there. `install_custom_allreduce()` of theirs does the same for the class.
"""

from symmpool.engines.custom_allreduce import CustomAllreduce

__all__ = ["CustomAllreduce"]
