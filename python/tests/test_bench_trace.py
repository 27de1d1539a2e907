"""Where a step loses time, of traces whose events are made up."""

import pytest

from symmpool.bench.training import trace

COMPUTE, SIDE = 7, 20
GEMM = "nvjet_tst_128x256_64x4_bz_coopA_NNT"


def event(name, begin, length, cat="kernel", stream=COMPUTE, **arguments):
    arguments |= {"stream": stream} if cat in ("kernel", "gpu_memcpy", "gpu_memset") else {}
    return {"ph": "X", "name": name, "cat": cat, "ts": begin, "dur": length, "tid": 1, "args": arguments}


def step(number=1):
    return event(f"ProfilerStep#{number}", 0, 500, "user_annotation")


def test_intervals_are_joined_crossed_and_left_out():
    joined = trace.union([(5, 7), (0, 2), (1, 3), (7, 8), (4, 4)])
    assert joined == [(0, 3), (5, 8)] and trace.length(joined) == 6
    assert trace.common(joined, [(2, 6), (7, 20)]) == [(2, 3), (5, 6), (7, 8)]
    assert trace.without((-1, 9), joined) == [(-1, 0), (3, 5), (8, 9)]
    assert trace.without((0, 8), [(0, 8)]) == [] and trace.union([]) == []


def test_products_beside_communication_are_compared_with_the_same_alone():
    events = [
        step(),
        event(GEMM, 0, 10, grid=[8, 1, 1]),
        event(GEMM, 10, 14, grid=[8, 1, 1]),  # beside communication: 4 us longer
        event(GEMM, 24, 30, grid=[9, 1, 1]),  # another shape, never alone
        event("ncclDevKernel_AllGather_RING_LL", 11, 40, stream=SIDE),
    ]
    found = trace.summarize(events)
    assert found["matmul_us"] == 54 and found["matmul_overlapped_us"] == 44
    assert found["matmul_excess_us"] == pytest.approx(4) and found["matmul_ratio"] == pytest.approx(1.4)
    assert found["communication_us"] == 40 and found["exposed_us"] == 0
    assert found["gaps_us"] == 0 and found["step_us"] == 54


def test_gaps_are_split_into_waits_for_communication_and_nothing_at_all():
    events = [
        step(),
        event(GEMM, 0, 10),
        event("symmpool_two_shot_push", 5, 25, stream=SIDE),  # alone from 10 to 30
        event(GEMM, 40, 10),
        event("elementwise_kernel", 50, 5),
    ]
    found = trace.summarize(events)
    assert found["gaps_us"] == 30 and found["idle_us"] == 10 and found["exposed_us"] == 20
    assert found["other_us"] == 5 and found["step_us"] == 55


def test_copies_of_collectives_and_those_of_the_program_are_told_apart():
    events = [
        step(),
        event(GEMM, 0, 100),
        event("symmpool_all_to_all", 10, 5, stream=SIDE),
        event("Memcpy DtoD (Device -> Device)", 15, 20, "gpu_memcpy", SIDE),  # to staging
        event("Memcpy PtoP (Device -> Device)", 35, 7, "gpu_memcpy", 21),
        event("Memcpy DtoD (Device -> Device)", 100, 4, "gpu_memcpy"),
        event("void at::native::split_with_sizes_copy_out_contiguous_no_cast_kernel", 104, 6),
        event("Memset (Device)", 110, 1, "gpu_memset"),
    ]
    found = trace.summarize(events)
    assert found["communication_us"] == 5 + 20 + 7
    assert found["copies_us"] == 4 + 6 and found["other_us"] == 1


def test_communication_on_the_compute_stream_is_exposed_and_leaves_copies_there_alone():
    events = [
        step(),
        event(GEMM, 0, 10),
        event("symmpool_one_shot", 10, 3),
        event("Memcpy DtoD (Device -> Device)", 13, 2, "gpu_memcpy"),
    ]
    found = trace.summarize(events)
    assert found["exposed_us"] == 3 and found["communication_us"] == 3
    assert found["copies_us"] == 2 and found["gaps_us"] == 0


def test_host_time_counts_calls_within_calls_once():
    events = [
        step(),
        step(2),
        event(GEMM, 0, 10),
        event("cudaLaunchKernel", 0, 4, "cuda_runtime"),
        event("cuLaunchKernelEx", 5, 6, "cuda_driver"),
        event("cudaStreamSynchronize", 20, 50, "cuda_runtime"),
        event("symmpool:all_gather_into_tensor", 100, 30, "user_annotation"),
        event("_c10d_functional::all_reduce", 200, 40, "cpu_op"),
        event("symmpool:all_reduce", 205, 30, "user_annotation"),
        event("aten::mm", 300, 40, "cpu_op"),
    ]
    found = trace.summarize(events)
    # The figures are means of two steps.
    assert found["launches"] == 1 and found["launch_us"] == 5
    assert found["collective_calls"] == 1 and found["collective_host_us"] == 35
    assert set(found) == set(trace.ROWS)


def test_a_trace_with_nothing_to_sum_up_says_what_is_missing():
    with pytest.raises(ValueError, match="no step"):
        trace.summarize([event(GEMM, 0, 1)])
    with pytest.raises(ValueError, match="nothing that ran on a device"):
        trace.summarize([step(), event("aten::mm", 0, 1, "cpu_op"), {"ph": "M", "name": "process_name"}])


def test_a_comparison_names_where_the_last_loses_most():
    one = dict.fromkeys(trace.ROWS, 10.0)
    other = {**one, "step_us": 50.0, "exposed_us": 35.0, "copies_us": 12.0}
    text = trace.compare({"NCCL": one, "ours": other})
    last = text.splitlines()[-1]
    assert last.startswith("ours's step takes +40 us compared with NCCL's")
    assert last.index("nothing else on the device (+25 us)") < last.index("by kernels (+2 us)")
    assert "loses most" not in trace.compare({"ours": other})
    assert trace.compare({"NCCL": other, "ours": one}).endswith("loses most in: nothing")
