"""How tensors of torch are read, with a stand-in that has what is read of them: torch itself is
large, and what is read is little. test_torch.py has the real one, where it is installed."""

import subprocess
import sys
import textwrap

STAND_IN = """
    import ctypes

    class dtype:
        def __init__(self, name): self.name = name
        def __repr__(self): return f"torch.{self.name}"

    for name in "float32 float64 float16 bfloat16 int32 int64 uint8 int8 bool other".split():
        globals()[name] = dtype(name)

    class _C: pass

    strided = object()

    class Tensor:
        is_cpu = True
        device = "cpu"
        is_quantized = is_nested = False
        layout = strided
        def __init__(self, count, dtype=float32, contiguous=True):
            self.memory = (ctypes.c_float * count)(*[1.0] * count)
            self.dtype, self.contiguous = dtype, contiguous
        def is_contiguous(self): return self.contiguous
        def is_neg(self): return False
        def is_conj(self): return False
        def element_size(self): return 3
        def numel(self): return len(self.memory)
        def data_ptr(self): return ctypes.addressof(self.memory)
        def untyped_storage(self): return self
        def storage_offset(self): return 0
        def nbytes(self): return ctypes.sizeof(self.memory)

    class Parameter(Tensor): pass

    def get_default_dtype(): return float32

    def from_dlpack(block): return block
"""

PROGRAM = """
    import sys, torch, symmpool

    pool = symmpool.Pool(symmpool.Group.in_process(1)[0], "cpu")
    comm = symmpool.Communicator(pool)

    def refused(call, *words):
        try:
            call()
        except symmpool.InvalidArgumentError as error:
            assert all(word in str(error) for word in words), str(error)
        else:
            raise AssertionError("was taken")

    for kind in (torch.Tensor, torch.Parameter):
        x = kind(100)
        out = torch.Tensor(100)
        out.memory[99] = 5.0
        comm.all_reduce(x)
        comm.all_reduce(x, "sum", out)
        assert out.memory[99] == 1.0
        assert not pool.is_window(x)
    refused(lambda: comm.all_reduce(torch.Tensor(4, torch.bool)), "tensor", "bool", "float32")
    refused(lambda: comm.broadcast(torch.Tensor(4, torch.other), 0), "tensor", "other", "3 bytes")
    refused(lambda: comm.all_reduce(torch.Tensor(4, contiguous=False)), "tensor", "contiguous()")
    refused(lambda: comm.all_reduce(x, out=torch.Tensor(3)), "out", "100")
    refused(lambda: comm.all_reduce(x, out=torch.Tensor(100, torch.int32)), "out", "int32")
    elsewhere = torch.Tensor(4)
    elsewhere.is_cpu, elsewhere.device = False, "cuda:3"
    refused(lambda: comm.all_reduce(elsewhere), "tensor", "cuda:3", "cpu")

    for dtype, name in [(None, "float32"), (torch.int8, "int8"), ("bf16", "bfloat16")]:
        made = pool.empty((2, 3), dtype)
        assert isinstance(made, symmpool.Block) and made.dtype == name, made
    refused(lambda: pool.empty(3, torch.other), "dtype", "other", "bool, int16")
    print("all read")
"""


def test_tensors_of_torch_are_read(tmp_path):
    (tmp_path / "torch.py").write_text(textwrap.dedent(STAND_IN))
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n" + textwrap.dedent(PROGRAM)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "all read", done.stderr
