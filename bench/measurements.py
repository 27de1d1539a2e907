"""The measurements of `bench/record_gpu`: the command of each, and how long it may take."""

import socket
from dataclasses import dataclass

#: The arguments with which cargo builds a program.
PROGRAMS = {
    "bench_commit": ["-p", "symmpool-bench", "--bin", "bench_commit"],
    "cuda_check": ["-p", "symmpool-tests", "--bin", "cuda_check"],
    "cuda_collectives": ["-p", "symmpool-tests", "--bin", "cuda_collectives"],
    "on_a_stream": ["-p", "symmpool-collectives", "--example", "on_a_stream"],
}
#: Collectives of programs and of kernels in documents, and ours of the same shape.
PLANS = ",".join([
    "plan_two_shot,two_shot_pipeline,plan_two_shot_pull,two_shot_pull,plan_one_shot,one_shot_pull,plan_one_shot_ll",
    "one_shot_ll,plan_two_shot_in_scratch_ll,two_shot_ll,plan_all_gather,native_my_all_gather,plan_reduce_scatter",
    "plan_reduce_scatter_pull,plan_reduce_scatter_ll,native_my_all_gather_of_vectors,reduce_scatter",
    "native_my_all_gather_of_vectors_ahead",
    "plan_all_to_all,all_to_all_direct,all_gather",
])  # fmt: skip
SIZES = "1K,4K,16K,64K,128K,256K,512K,1M,4M,16M,64M,256M,1G"


def in_bytes(sizes):
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return ",".join(str(int(size[:-1]) * units[size[-1]]) for size in sizes.split(","))


class Words:
    """The parts of commands. `scratch` is a folder for what they write besides reports; `pick` returns the
    usual value, or the one for a quick run."""

    def __init__(self, options, programs, scratch):
        self.ranks, self.quick, self.programs = options.ranks, options.quick, programs
        self.python, self.random_programs = options.python, options.random_programs
        self.scratch = scratch

    def pick(self, usual, quick):
        return quick if self.quick else usual

    def alone(self, script, *more):
        return [self.python, script, *more]

    def launch(self, *what):
        """A process a rank, at a port that is free now."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = str(server.getsockname()[1])
        ranks = ["--nproc-per-node", str(self.ranks), "--master-port", port]
        return [self.python, "-m", "torch.distributed.run", *ranks, *what]

    def checks(self, name, *arguments):
        """A program of python/tests/gpu that compares what ranks find."""
        return self.launch(f"python/tests/gpu/ranks_{name}.py", *arguments)

    def bench(self, *arguments):
        return self.launch("-m", "symmpool", "bench", *arguments)

    def built(self, name):
        """The path of a program. Where cargo has built it, examples are in a folder of their own."""
        example = self.programs / "examples" / name
        return str(example if example.exists() else self.programs / name)

    def program(self, name, *arguments):
        return [self.built(name), *arguments]

    def collectives(self, mode, *arguments):
        return self.program("cuda_collectives", mode, "--ranks", str(self.ranks), *arguments)


@dataclass
class Measurement:
    name: str
    what: str
    #: Seconds: about how long it takes, and when it is ended.
    about: float
    deadline: float
    #: The command without `--json FILE`, made of `Words`.
    command: object
    #: "json": it writes a report. "results": the same, but without the facts of the machine. "log": the
    #: last lines that it prints are kept.
    kind: str = "json"
    #: The program of `PROGRAMS` that it needs; empty for a Python program.
    program: str = ""
    #: It needs at least so many ranks; `alone` means that it always runs as one.
    least: int = 2
    alone: bool = False
    #: The end of the report's file name, if it is not `name`; {ranks} stands for their number.
    file: str = ""


def measurements():
    """All measurements: first those that are quoted most, last those that take longest."""

    def it(*of, **more):
        return Measurement(*of, **more)

    return [
        it("allreduce", "all-reduces, compared with NCCL and torch's symmetric memory", 60, 300,
           lambda w: w.bench("allreduce", "--eager", "--sizes", w.pick(SIZES, "4K,1M,16M"))),
        it("alltoallv", "all-to-alls of traffic matrices, compared with NCCL and vdev", 100, 400,
           lambda w: w.bench("alltoallv", "--eager", "--sizes",
                             w.pick("4K,64K,1M,16M,64M,256M", "4K,16M"))),
        it("device_splits", "what splits on the device cost, compared with splits on the host", 25, 120,
           lambda w: w.bench("alltoallv", "--matrices", "even", "--peers", "none", "--rounds", "5",
                             "--sizes", w.pick("4K,64K,1M,4M,16M,64M,256M", "4K,16M"))),
        it("collectives", "every collective, compared with NCCL, on windows and on torch's memory", 60, 240,
           lambda w: w.bench("collectives", "--eager", "--sizes",
                             w.pick("64K,1M,4M,16M,64M,256M", "64K,16M"))),
        it("collectives_memory", "every collective with less device memory of symmpool's", 60, 240,
           lambda w: w.bench("collectives", "--eager", "--peers", "none", "--device-memory", "96M,48M,16M",
                             "--sizes", w.pick("1M,4M,8M,16M,32M,64M,256M", "64K,16M"))),
        it("order", "collectives in the orders of programs, compared with fresh ones and NCCL", 500, 590,
           lambda w: w.bench("order", "--seconds", w.pick("480", "120"), *w.pick([], ["--quick"]))),
        it("collectives_sm_budgets", "every collective with fewer SMs, as beside others", 90, 240,
           lambda w: w.bench("collectives", "--peers", "none", "--sm-budgets", "116,88,66,44,22,12",
                             "--sizes", w.pick("64K,256K,1M,2M,4M,16M,64M,256M", "64K,4M"))),
        it("training", "FSDP2, DDP, tensor parallelism and decoding of a Llama, compared with NCCL", 380, 590,
           lambda w: w.bench("training", "--kinds", "fsdp,ddp,tp,decode,decode_graph",
                             *w.pick([], ["--rounds", "1", "--steps", "5"]))),
        *(it(f"training_client{name}", f"FSDP2 of a program that reads every loss, {threads}", 400, 590,
             lambda w, threads=threads: w.bench(
                 "training", "--kinds", "fsdp", "--vocabulary", "32000", "--optimizer", "foreach",
                 "--each-step", "--threads", threads[0],
                 *w.pick(["--steps", "44", "--rounds", "10"], ["--steps", "5", "--rounds", "1"])))
          for name, threads in (("", "4 threads"), ("_one", "1 thread"))),
        it("training_compiled", "tensor parallelism with compiled layers and fused matmuls", 400, 590,
           lambda w: w.bench("training", "--kinds", "tp_compiled", "--contenders",
                             "NCCL,NCCL fused,ours,ours fused", "--rounds", "2",
                             *w.pick(["--batch", "8"], ["--steps", "5"]))),
        it("decoding_compiled", "tensor-parallel decoding with a compiled model and fused norms", 250, 500,
           lambda w: w.bench("training", "--kinds", "decode_compiled", "--contenders", "NCCL,ours,ours fused",
                             *w.pick([], ["--rounds", "1"]))),
        it("overlap_backend", "collectives of the backend during matrix products", 60, 240,
           lambda w: w.bench("overlap", "--backend", "--eager", "--sizes",
                             w.pick("1M,4M,16M,64M,256M", "4M"))),
        it("overlap", "the same of communicators, on torch's memory", 60, 240,
           lambda w: w.bench("overlap", "--eager", "--sizes", w.pick("4M,32M,128M", "4M"))),
        it("overlap_windows", "the same in windows", 60, 240,
           lambda w: w.bench("overlap", "--windows", "--eager", "--sizes", w.pick("4M,32M,128M", "4M"))),
        it("allreduce_rust", "the same all-reduces from Rust, and an eager call's host time", 40, 180,
           lambda w: w.collectives("bench", "--algorithms", "auto", "--in-place", "--sizes",
                                   in_bytes(w.pick(SIZES, "4K,1M,16M"))), program="cuda_collectives"),
        it("plans", "programs and kernels of one's own, compared with our kernels", 30, 150,
           lambda w: w.collectives("bench", "--algorithms", PLANS, "--sizes",
                                   in_bytes(w.pick("1K,64K,1M,4M,16M,64M,256M", "64K,16M"))),
           program="cuda_collectives"),
        it("experts", "dispatch to experts and combine, compared with NCCL", 60, 240,
           lambda w: w.bench("experts", "--tokens", w.pick("1,8,32,128,512,4096", "8,128"),
                             "--routing", "uniform", "--rounds", w.pick("3", "1"))),
        it("experts_24", "the same with 24 SMs, of many tokens", 30, 120,
           lambda w: w.bench("experts", "--tokens", w.pick("512,4096", "128"), "--routing", "uniform",
                             "--cases", "dispatch,dispatch_fp8,combine", "--num-sms", "24",
                             "--rounds", w.pick("3", "1"))),
        it("norms", "all-reduces with residual and RMSNorm, compared with NCCL", 150, 400,
           lambda w: w.bench("fused", "--tokens", w.pick("1,8,32,64,128,256,512,1024,2048", "8,128"),
                             "--rounds", w.pick("3", "1"))),
        it("matmuls", "matrix products with their communication, compared with torch's", 170, 400,
           lambda w: w.bench("fused", "--what", "matmul", *w.pick([], ["--rows", "2048"]),
                             "--rounds", w.pick("2", "1"))),
        it("allreduce_scratch", "the largest all-reduces with 768 MiB of scratch", 30, 120,
           lambda w: w.bench("allreduce", "--eager", "--sizes", w.pick("64M,256M,1G", "64M"), "--scratch",
                             "768M", "--peers", "NCCL,NCCL window,two-shot")),
        it("host", "host time of eager calls, of async_op and of `with pool:`", 20, 120,
           lambda w: w.launch("python/tests/gpu/measure_host.py", "--rounds", w.pick("7", "2"))),
        it("commit", "commits of new memory, and their phases", 25, 150,
           lambda w: w.program("bench_commit", "--driver", "cuda", "--ranks", str(w.ranks),
                               "--repeats", w.pick("21", "15")), program="bench_commit"),
        it("windows", "new windows, compared with torch's symmetric memory and NCCL", 25, 120,
           lambda w: w.launch("python/tests/gpu/measure_windows.py", "--rounds", w.pick("15", "3"))),
        it("tensor_parallel", "a tensor-parallel transformer, with NCCL and with symmpool", 50, 240,
           lambda w: w.launch("bench/programs/tensor_parallel.py", "--rounds", w.pick("3", "1"),
                              "--steps", w.pick("60", "5"))),
        it("tensor_parallel_fused", "a tensor-parallel Llama with fused calls and without", 400, 590,
           lambda w: w.launch("bench/programs/tensor_parallel_fused.py", "--rounds", w.pick("3", "1"),
                              "--seconds", w.pick("0.3", "0.05"), "--programs",
                              w.pick("decode,prefill,training", "decode,prefill"))),
        it("selftest", "one device's life cycle and misuse", 8, 90,
           lambda w: w.program("cuda_check", "--self-test"), "results", "cuda_check", 1),
        it("ranks", "handles between ranks", 10, 90,
           lambda w: w.program("cuda_check", "--ranks", str(w.ranks)), "results", "cuda_check",
           file="ranks{ranks}"),
        it("pool", "pools between ranks: commits, and errors that all get", 15, 120,
           lambda w: w.program("cuda_check", "--pool", "--ranks", str(w.ranks)), "results", "cuda_check",
           file="pool{ranks}"),
        it("killed", "a rank killed in the middle of a call", 20, 90,
           lambda w: w.collectives("killed"), "log", "cuda_collectives"),
        it("faults", "ranks that differ or stay away, with every algorithm", 75, 150,
           lambda w: w.collectives("faults"), "log", "cuda_collectives"),
        it("matrices", "random traffic matrices, compared with NCCL", 30, 180,
           lambda w: w.checks("matrices", *w.pick([], ["--count", "500"])),
           "log"),
        it("programs", "random programs of calls on the backend", 50, 150,
           lambda w: w.checks("programs", "--count", "100000", "--seconds",
                              w.pick("40", "5")), "log"),
        it("on_a_stream", "a stream of a Rust program's own, eager and in a graph", 5, 60,
           lambda w: w.launch("--no-python", w.built("on_a_stream")), "log", "on_a_stream"),
        *(it(f"example_{name}", "an example that teaches", 10, 90,
             lambda w, name=name: w.launch(f"examples/{name}.py"), "log")
          for name in ("data_parallel", "moe", "triton_all_reduce")),
        it("torch", "everything with torch's signatures, compared with NCCL", 60, 240,
           lambda w: w.checks("torch"), "log"),
        it("engines", "what serving engines call of the adapters", 20, 100,
           lambda w: w.checks("engines"), "log"),
        it("language", "every program of the library, and a kernel of one's own", 30, 120,
           lambda w: w.checks("language"), "log"),
        it("tune", "the tuner, with programs and several numbers of blocks", 40, 150,
           lambda w: w.launch("-m", "symmpool", "tune", "--collective", "all_gather", "--programs",
                              "--blocks", "8,32", "--sizes", w.pick("64K,1M,16M", "64K"),
                              "--out", str(w.scratch / "table.json")), "log"),
        it("one_sided", "copies and signals between ranks", 20, 120,
           lambda w: w.checks("one_sided"), "log"),
        it("captures", "random programs of calls in graphs and outside of them", 60, 150,
           lambda w: w.checks("captures", "--seconds", w.pick("40", "5")), "log"),
        it("memory", "what groups hold of their devices' memory, before and after large calls", 15, 90,
           lambda w: w.checks("memory"), "log"),
        it("fused_norms", "fused norms, compared with separate operations", 60, 240,
           lambda w: w.checks("fused"), "log"),
        it("fused_matmuls", "fused matmuls, compared with separate operations", 60, 240,
           lambda w: w.checks("matmul"), "log"),
        it("async_tp", "cases of torch's tests of asynchronous tensor parallelism", 60, 300,
           lambda w: w.checks("async_tp"), "log"),
        it("routings", "random routings to experts, compared with plain PyTorch", 60, 300,
           lambda w: w.checks("experts", *w.pick([], ["--seeds", "20"])), "log"),
        it("deep_ep", "what DeepEP's own tests hold, under its names", 60, 240,
           lambda w: w.checks("deep_ep"), "log"),
        it("wrong_sums", "random programs over NCCL's windows", 200, 360,
           lambda w: w.launch("bench/programs/wrong_sums.py", "--programs",
                              w.pick(str(w.random_programs), "20"), "--seconds", "270")),
        it("soak_mixed", "a million calls of all kinds, with graphs", 20, 120,
           lambda w: w.collectives("soak", "--calls", w.pick("1000000", "50000")), "log",
           "cuda_collectives"),
        it("soak", "ten million all-reduces of random sizes and algorithms", 110, 300,
           lambda w: w.collectives("soak", "--calls", w.pick("10000000", "50000"), "--algorithms",
                                   "all_reduce"), "log", "cuda_collectives"),
        it("huge", "more than 2^31 elements", 40, 180,
           lambda w: w.collectives("check", "--algorithms", "huge"), "log", "cuda_collectives"),
        it("check", "every collective, bit by bit", 200, 480,
           lambda w: w.collectives("check", *w.pick([], ["--quick"])), "log", "cuda_collectives"),
        it("install", "symmpool.install(), compared with torch's allocator, on one GPU", 140, 300,
           lambda w: w.alone("python/tests/gpu/measure_install.py", "--turns", w.pick("12", "1"), "--lengths",
                             w.pick("60", "4")), least=1, alone=True),
    ]  # fmt: skip
