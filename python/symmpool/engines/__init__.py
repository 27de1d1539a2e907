"""Modules with the names that serving engines use, on this package's pools.

| module | replaces |
| --- | --- |
| `symmpool.engines.vllm` | vLLM's `vllm.distributed.device_communicators.pynccl_allocator` |
| `symmpool.engines.sglang` | SGLang's `sglang.srt.distributed.device_communicators.pynccl_allocator` |
| `symmpool.engines.custom_allreduce` | the class `CustomAllreduce` of both |
| `symmpool.engines.nccl_communicator` | the class `PyNcclCommunicator` of both |
| `symmpool.engines.flashinfer_comm` | FlashInfer's `allreduce_fusion`, which both call |

`symmpool.engines.fused_moe` sends tokens for vLLM's modular kernels; `symmpool.deep_ep` has the names of
`deep_ep`.

An installed package is active in both engines by its plug-ins (`symmpool.plugins`), which call the functions
`install` here. Without them, `install()` of the first two replaces the engines' modules. It must be called in
each process that an engine starts, before that process makes a pool. `install_custom_allreduce()` and
`install_nccl_communicator()` of these modules replace the classes.
"""

from symmpool.engines.custom_allreduce import CustomAllreduce

__all__ = ["CustomAllreduce"]
