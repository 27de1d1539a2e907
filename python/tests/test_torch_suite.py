"""PyTorch's own tests of torch.distributed, on the backend, on the CPU."""

import os

import torch_suite

from symmpool.torch_backend.registration import has_python_backends

#: What fails on gloo as well, of torch 2.11: what these tests need is a GPU, or their processes.
AS_ON_GLOO = {
    "test_SyncBatchNorm_process_group",
    "test_all_to_all_cuda",
    "test_all_to_all_cuda_complex",
    "test_all_to_all_full_group_cuda",
    "test_barrier_timeout_global",
    "test_batch_isend_irecv_mixed_backend_err",
    "test_batch_isend_irecv_op_err",
    "test_new_subgroups_with_group_param",
}
#: These ask for a backend by the name "gloo".
BY_NAME = {"test_get_backend", "test_monitored_barrier_gloo", "test_monitored_barrier_gloo_subgroup"}
if has_python_backends():
    # DDP's log has "custom" for any backend that is not torch's own.
    BY_NAME.add("test_ddp_logging_data_cpu")


#: Beginnings of the names of tests that run over hosts where the variable below is not set.
OVER_HOSTS = ("test_all_", "test_barrier", "test_broadcast", "test_gather", "test_reduce", "test_scatter")
#: "all" has all tests run over hosts.
EXTENT = "SYMMPOOL_SUITE_OVER_HOSTS"


def check(names, world, hosts, least):
    arguments = ["--backend", "symmpool", "--as", "gloo", "--world", str(world), "--hosts", str(hosts)]
    options = torch_suite.parser().parse_args([*arguments, *names])
    observed = {}
    found = torch_suite.suite(options, lambda name, word, answers: observed.update({name: answers}))
    wrong = {name for name, word in found.items() if word not in ("ok", "skipped")}
    assert wrong <= AS_ON_GLOO | BY_NAME, {name: observed[name] for name in wrong - AS_ON_GLOO - BY_NAME}
    # Were they all left out, nothing would have been tested.
    assert list(found.values()).count("ok") >= least


def test_all_that_gloo_passes():
    # There are 99 with torch 2.11.
    check([], 2, 1, 80)


def test_what_gloo_passes_on_two_hosts_of_two_ranks(monkeypatch):
    # The module of the tests asks for both when it is imported.
    monkeypatch.setenv("BACKEND", "gloo")
    monkeypatch.setenv("WORLD_SIZE", "4")
    # There are 100 with torch 2.11.
    if os.environ.get(EXTENT) == "all":
        check([], 4, 2, 80)
        return
    names = [name for name in torch_suite.names() if name.startswith(OVER_HOSTS) and "cuda" not in name]
    check([name for name in names if name not in AS_ON_GLOO | BY_NAME], 4, 2, 30)
