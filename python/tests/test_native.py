"""symmpool.native: what cannot be a kernel is refused by name, and so are kernels in host memory.

That they run is checked on emulated devices (`cuda_collectives check --algorithms native`).
"""

import numpy as np
import pytest
from ranks import values

import symmpool
from symmpool.language import library

SOURCE = """
#include <symmpool/device.cuh>
extern "C" __global__ void gather(const __grid_constant__ symmpool::DeviceComm comm,
                                  const __grid_constant__ symmpool::DeviceCall call) {}
"""


def test_a_kernel_is_an_algorithm(tmp_path):
    algorithm = symmpool.native(SOURCE, "gather", "all_gather", windows=["output"], grid=16)
    assert (algorithm.name, algorithm.collective, algorithm.origin) == ("gather", "all_gather", "native")
    assert algorithm.windows == ["output"] and algorithm.blocks == 16 and not algorithm.in_place
    path = tmp_path / "kernels.cu"
    path.write_text(SOURCE)
    for same in (path, str(path)):
        again = symmpool.native(same, kernel="gather", collective="all_gather", windows=["output"], grid=16)
        assert again.hash == algorithm.hash
    named = symmpool.native(path, "gather", "all_gather", name="mine", world=2, in_place=True)
    assert (named.name, named.world, named.in_place) == ("mine", 2, True)
    with pytest.raises(symmpool.UnsupportedError, match="native"):
        named.explain()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"collective": "all_redux"}, "all_redux"),
        ({"kernel": "no name"}, "no name"),
        ({"windows": ["scratch"]}, "scratch"),
        ({"grid": 0}, "0 blocks"),
        ({"grid": -1}, "grid"),
        ({"threads": 100}, "100 threads"),
        ({"world": 9}, "9 ranks"),
        ({"name": "auto"}, "auto"),
        ({"path_or_source": "\n\0"}, "NUL"),
    ],
)
def test_nonsense_is_refused(wrong, words):
    right = {"path_or_source": SOURCE, "kernel": "gather", "collective": "all_gather"}
    with pytest.raises(symmpool.InvalidArgumentError, match=words):
        symmpool.native(**(right | wrong))
    with pytest.raises(FileNotFoundError):
        symmpool.native("no_such_file.cu", "gather", "all_gather")


def on_the_host(group):
    pool = symmpool.Pool(group, "cpu")
    comm = symmpool.Communicator(pool, timeout=60)
    comm.register(symmpool.native(SOURCE, "gather", "all_gather"))
    x, out = pool.empty(4, np.float32), pool.empty(8, np.float32)
    said = []
    for call in (
        lambda: comm.all_gather_into_tensor(out, x, algorithm="gather"),
        lambda: symmpool.native(SOURCE, "gather", "all_gather").execute(comm, x, out),
    ):
        try:
            call()
        except symmpool.UnsupportedError as error:
            said.append("gather" in str(error) and "host memory" in str(error))
    comm.barrier()
    return said


def test_there_are_no_kernels_in_host_memory():
    assert values(2, on_the_host) == [[True, True]] * 2


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_90a", "sm_100"])
def test_a_kernel_is_compiled_without_a_device(arch):
    algorithm = symmpool.native(SOURCE, "gather", "all_gather")
    assert algorithm.compile(arch=arch) > 100
    assert algorithm.compile(arch, world=8) > 100


def test_what_is_wrong_with_a_kernel_is_said_with_its_line():
    with pytest.raises(symmpool.InvalidArgumentError, match=r"no kernel gathr.*gather in line 3"):
        symmpool.native(SOURCE, "gathr", "all_gather").compile()
    mangled = SOURCE.replace('extern "C" ', "")
    with pytest.raises(symmpool.InvalidArgumentError, match=r'gather.cu:3: gather must be extern "C"'):
        symmpool.native(mangled, "gather", "all_gather").compile()
    broken = SOURCE.replace("{}", "{\n    undeclared = 1;\n}")
    with pytest.raises(symmpool.InvalidArgumentError, match=r"gather\.cu\(5\): error.*undeclared"):
        symmpool.native(broken, "gather", "all_gather").compile("sm_90")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"arch": "hopper"}, "hopper"),
        ({"arch": "sm_"}, "sm_"),
        ({"arch": "9.0"}, "9.0"),
        ({"world": 9}, "1 to 8"),
        ({"world": 0}, "1 to 8"),
        ({"op": "median"}, "median"),
        ({"dtype": "bool"}, "bool"),
    ],
)
def test_compile_refuses_nonsense(options, words):
    reduces = symmpool.native(SOURCE, "gather", "all_reduce")
    with pytest.raises((symmpool.InvalidArgumentError, TypeError), match=words):
        reduces.compile(**options)


def test_only_kernels_are_compiled():
    plan = library.ring_all_reduce.compile(2)
    with pytest.raises(symmpool.UnsupportedError, match=r"ring_all_reduce of all_reduce is no kernel"):
        plan.compile(arch="sm_90")
    with pytest.raises(symmpool.UnsupportedError, match="7.5"):
        symmpool.native(SOURCE, "gather", "all_gather").compile("sm_75")
