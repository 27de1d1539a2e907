"""Names that the plug-in for SGLang needs, in the sources of each version that it serves."""

import pytest
import sources

from symmpool.engines import sglang as ours

PARTS = "sglang/srt/distributed/device_communicators"
NEEDED = {
    "sglang/srt/distributed/parallel_state.py": {
        "init_distributed_environment": "world_size rank distributed_init_method local_rank backend"
    },
    f"{PARTS}/custom_all_reduce.py": {"dispatch_custom_allreduce": "group device"},
    f"{PARTS}/custom_all_reduce_v2.py": {
        "CustomAllReduceV2.__init__": "self group device",
        "CustomAllReduceV2.should_custom_ar": "self inp",
        "CustomAllReduceV2.custom_all_reduce": "self input",
        "CustomAllReduceV2.close": "self",
    },
    f"{PARTS}/pynccl.py": {
        "PyNcclCommunicator.__init__": "self group device library_path is_symmetric_memory_enabled"
    },
    "sglang/srt/plugins/hook_registry.py": {"HookRegistry.register": "cls target hook hook_type"},
    "sglang/srt/layers/flashinfer_comm_fusion.py": {ours._PREFLIGHT: ""},
}


@pytest.mark.parametrize("version", ["0.5.20", "0.5.21", "0.5.22", "0.5.23"])
def test_each_version_has_the_names_that_are_replaced(tmp_path, version):
    package = sources.wheel("sglang", version, tmp_path)
    assert sources.lacking(package, NEEDED) == []
    theirs = ("change_state", "_resolve_stream")
    assert sources.not_taken(package, f"{PARTS}/pynccl.py", True, theirs) == []
    # Our module stands for theirs, so it has every name that another module can import.
    allocator = sources.signatures(package, f"{PARTS}/pynccl_allocator.py")
    names = {each.partition(".")[0] for each in allocator if not each.startswith("_")}
    assert names - set(ours.__all__) == set()
