"""`python -m symmpool tune`: times every algorithm of a communicator, and writes which one was the fastest.

On the CPU it starts `--ranks` processes; on GPUs it is run under torchrun, one rank a GPU. It times the
built-in algorithms, those of plans (`--plan`, files that `algorithm.save` wrote), those of
`symmpool.language.library` (`--programs`) and those of one's own (`--module`, Python files), for each
collective and size, in memory of the pool and in other memory, and checks every result. The table is JSON,
which SYMMPOOL_TABLES or `symmpool.load_tables` loads:

    {"symmpool_tables": 1, "devices": ["cpu"], "rows": [
      {"collective": "all_gather", "world": 2, "windows": true, "up_to": 65536, "algorithm": "scratch"},
      {"collective": "all_gather", "world": 2, "windows": true, "up_to": null, "algorithm": "mine"}]}

A row is for calls of up to `up_to` bytes (null: any number) of the larger one of input and output. Rows that
differ in size alone form a group, in order of size. `collective` is all_reduce if it is absent. `windows` is
whether outputs are memory of the pool, `lamport` whether elements are floats of up to 32 bits; if they are
absent, the row is for both. `blocks` are a plan's thread blocks, where others than its own were faster. A
file that is there keeps its other groups.

Of a module, what its top level holds is timed: programs, which are compiled for so many ranks, and algorithms
that are made already, as `symmpool.native` makes them. A kernel in several launch shapes is several of these,
with a name each. Programs that load the table have to register what it names.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import symmpool
from symmpool import _symmpool
from symmpool.bench.arguments import comma_separated, count_list, positive, size_list
from symmpool.errors import DivergedError, Error, InvalidArgumentError, UnsupportedError

if TYPE_CHECKING:
    import numpy

    from symmpool.groups.types import GroupLike

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")
SIZES = [1 << power for power in range(10, 25, 2)]
#: The best algorithm of a size is kept for the next one unless another is faster by more than this fraction.
MARGIN = 0.02
#: If so many bytes or more were timed, the last row is for all larger sizes too.
ENDLESS = 16 << 20
#: For how long calls of one algorithm and size are repeated in a round, in seconds.
ROUND = 0.02
ROUNDS = 3


def collectives(text: str) -> list[str]:
    """The collectives that an argument names. Raises ArgumentTypeError for another one."""
    names = list(COLLECTIVES) if text == "all" else comma_separated(text)
    for name in names:
        if name not in COLLECTIVES:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(COLLECTIVES)}, all")
    if not names:
        raise argparse.ArgumentTypeError("no collective is named")
    return names


def parser() -> argparse.ArgumentParser:
    """The arguments of `python -m symmpool tune`."""
    command = argparse.ArgumentParser(
        prog="python -m symmpool tune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument(
        "--collective", type=collectives, default=list(COLLECTIVES), help="one, several, or all"
    )
    command.add_argument("--ranks", type=positive, help="processes to start on the CPU")
    command.add_argument("--sizes", type=size_list, default=SIZES, help="bytes, as 1K,64K,1M")
    command.add_argument("--plan", action="append", default=[], metavar="FILE", help="a plan to time as well")
    command.add_argument(
        "--module",
        action="append",
        default=[],
        metavar="FILE",
        help="a Python file whose programs and algorithms to time as well",
    )
    command.add_argument("--programs", action="store_true", help="time symmpool.language.library as well")
    command.add_argument(
        "--blocks", type=count_list, default=[], help="thread blocks to try for plans, as 8,16,32"
    )
    command.add_argument(
        "--device", choices=("cpu", "cuda"), help="cuda under torchrun unless given, else cpu"
    )
    command.add_argument("--out", required=True, metavar="FILE", help="the table to write, or to add to")
    return command


def main(arguments: list[str] | None = None) -> int:
    """Runs `python -m symmpool tune`. Returns the exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    options = parser().parse_args(given)
    try:
        launched = _symmpool.launch() is not None
        options.device = options.device or ("cuda" if launched else "cpu")
        if launched:
            return Tuner(symmpool.Group.from_env(), options).run()
        if "SYMMPOOL_TUNE" in os.environ:
            rank, world, store = os.environ["SYMMPOOL_TUNE"].split(",", 2)
            return Tuner(symmpool.Group(int(rank), int(world), store), options).run()
        if options.device == "cuda":
            parser().error("on GPUs: torchrun --nproc-per-node N -m symmpool tune ...")
        if not options.ranks:
            parser().error("--ranks says how many processes to start")
        read(options.out, ["cpu"])
        for path in options.plan + options.module:
            Path(path).read_text()
    except (Error, OSError) as error:
        print(f"tune: {error}", file=sys.stderr)
        return 1
    return start(given, options.ranks)


def start(arguments: list[str], world: int) -> int:
    """Runs the ranks as processes; 0 if all ended well."""
    with tempfile.TemporaryDirectory(prefix="symmpool-tune-") as folder:
        ranks = []
        try:
            for rank in range(world):
                variables = {**os.environ, "SYMMPOOL_TUNE": f"{rank},{world},file://{folder}"}
                command = [sys.executable, "-m", "symmpool", "tune", *arguments]
                ranks.append(subprocess.Popen(command, env=variables))
            return max(abs(process.wait()) for process in ranks)
        finally:
            for process in ranks:
                process.kill()
                process.wait()


def algorithms_of(path: str, world: int) -> list[symmpool.Algorithm]:
    """The algorithms at the top level of a Python file, and its programs, compiled for so many ranks."""
    from symmpool.language.program import Program

    try:
        module = runpy.run_path(path, run_name=Path(path).stem)
    except (Error, OSError):
        raise
    except Exception as error:
        raise InvalidArgumentError(f"{path}: {type(error).__name__}: {error}") from error
    found: dict[int, symmpool.Algorithm] = {}
    for value in module.values():
        if isinstance(value, Program):
            found[id(value)] = value.compile(world)
        elif isinstance(value, symmpool.Algorithm):
            found[id(value)] = value
    if not found:
        raise InvalidArgumentError(f"{path}: its top level holds neither a program nor an algorithm")
    return list(found.values())


class Tuner:
    """One rank: its memory, and the algorithms with what they are called in the table."""

    def __init__(self, group: GroupLike, options: argparse.Namespace):
        self.options = options
        device = "cpu" if options.device == "cpu" else f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        self.cuda = options.device == "cuda"
        if self.cuda:
            import torch

            self.torch = torch
            # Graphs capture a stream of the current device.
            torch.cuda.set_device(device)
            self.device_name = torch.cuda.get_device_name(device)
        else:
            self.device_name = "cpu"
        self.pool = symmpool.Pool(group, device)
        self.comm = symmpool.Communicator(self.pool, timeout=120)
        self.device = device
        self.wrong: list[str] = []
        # The table's name and blocks, by registered name.
        self.names: dict[str, tuple[str, int | None]] = {}

    def register(self) -> None:
        """Registers the plans, programs and kernels that are to be timed."""
        from symmpool import language

        plans = [language.load(path) for path in self.options.plan]
        if self.options.programs:
            from symmpool.language import library

            for program in library.ALL.values():
                try:
                    plans.append(program.compile(self.comm.world))
                except Error:
                    continue  # not for so many ranks
        for path in self.options.module:
            plans += algorithms_of(path, self.comm.world)
        for plan in plans:
            if plan.origin == "native" and not self.cuda:
                if self.comm.rank == 0:
                    print(f"{plan.name} is a kernel, which host memory cannot have: it is not timed")
                continue
            self.comm.register(plan)
            self.names[plan.name] = (plan.name, None)
            for blocks in self.options.blocks if self.cuda and plan.origin == "plan" else ():
                text = json.loads(plan.to_json())
                text.update(name=f"{plan.name}@{blocks}", blocks=blocks)
                variant = language.Algorithm(json.dumps(text))
                self.comm.register(variant)
                self.names[variant.name] = (plan.name, blocks)

    def run(self) -> int:
        """Times all algorithms of all collectives; rank 0 writes the table. Returns the exit status."""
        table = read(self.options.out, [self.device_name])
        self.register()
        # bfloat16 stands for what the Lamport protocol carries, int32 for what it does not.
        dtypes = [("bfloat16", True), ("int32", False)] if self.cuda else [("float32", None)]
        for collective in self.options.collective:
            for dtype, lamport in dtypes:
                for windows in (True, False):
                    times = self.times(collective, dtype, windows)
                    group = {"collective": collective, "world": self.comm.world}
                    if lamport is not None:
                        group["lamport"] = lamport
                    replace(table, {**group, "windows": windows}, fastest(times, self.names))
                    if self.comm.rank == 0:
                        place = "memory of the pool" if windows else "other memory"
                        show(f"{collective}, {dtype}, {place}", times)
        self.comm.barrier()
        self.comm.synchronize()
        if self.wrong:
            print(f"tune: wrong results on rank {self.comm.rank}: {self.wrong}", file=sys.stderr)
        elif self.comm.rank == 0:
            Path(self.options.out).write_text(text_of(table))
            print(f"{len(table['rows'])} rows in {self.options.out}")
        return 1 if self.wrong else 0

    def times(self, collective: str, dtype: str, windows: bool) -> dict[int, dict[str, float]]:
        """Microseconds of each algorithm that can serve the call, by size."""
        found: dict[int, dict[str, float]] = {}
        for size in self.options.sizes:
            call = TimedCall(self, collective, dtype, size, windows)
            able = [each.name for each in self.comm.algorithms(collective) if self.is_right(call, each.name)]
            rounds: dict[str, list[float]] = {name: [] for name in able}
            for _ in range(ROUNDS):
                for name in able:
                    rounds[name].append(call.time(name))
            found[size] = {name: statistics.median(times) for name, times in rounds.items()}
        return found

    def is_right(self, call: TimedCall, name: str) -> bool:
        """Whether the algorithm serves the call. Wrong results are noted."""
        try:
            call.clear()
            call.make(name)
            self.comm.synchronize()
        except (UnsupportedError, InvalidArgumentError, DivergedError):
            served = 0.0
        else:
            served = 1.0
            if not call.is_right():
                self.wrong.append(f"{name} of {call.collective} of {call.size} bytes")
        return self.slowest(-served) == -1.0

    def slowest(self, value: float) -> float:
        """The largest of all ranks' values."""
        import numpy as np

        if self.cuda:
            whole = self.torch.tensor([value], dtype=self.torch.float64, device=self.device)
            self.comm.all_reduce(whole, "max", algorithm="auto")
            return float(whole.item())
        array = np.array([value])
        self.comm.all_reduce(array, "max", algorithm="auto")
        return float(array[0])


class TimedCall:
    """A call of a collective on buffers of its own, whose larger one has about `size` bytes."""

    def __init__(self, rank: Tuner, collective: str, dtype: str, size: int, windows: bool):
        import numpy as np

        self.rank, self.collective, self.size = rank, collective, size
        world, me = rank.comm.world, rank.comm.rank
        each = 2 if dtype == "bfloat16" else 4
        parts = 1 if collective in ("all_reduce", "broadcast") else world
        # Multiples of what plans divide parts into.
        self.part = max(size // each // parts // (4 * world), 1) * 4 * world
        whole = parts * self.part
        counts = {"reduce_scatter": (whole, self.part), "all_gather": (self.part, whole)}
        inputs, outputs = counts.get(collective, (whole, whole))
        # Sums of so small numbers are exact in every type.
        data = [(np.arange(inputs) * 7 + of * 13) % 30 for of in range(world)]
        mine = slice(me * self.part, (me + 1) * self.part)
        match collective:
            case "all_reduce":
                self.expected = np.sum(data, axis=0)
            case "reduce_scatter":
                self.expected = np.sum(data, axis=0)[mine]
            case "all_gather":
                self.expected = np.concatenate(data)
            case "broadcast":
                self.expected = data[0]
            case _:
                self.expected = np.concatenate([each[mine] for each in data])
        self.data = data[me]
        self.input = self._empty(inputs, dtype, windows)
        self.output = self._empty(outputs, dtype, windows)
        self._fill(self.input, self.data)
        self.calls = 0

    def _empty(self, count: int, dtype: str, windows: bool) -> Any:
        rank = self.rank
        if rank.cuda:
            kind = getattr(rank.torch, dtype)
            if windows:
                return rank.pool.empty(count, dtype=kind)
            return rank.torch.empty(count, dtype=kind, device=rank.device)
        import numpy as np

        return np.asarray(rank.pool.empty(count, np.dtype(dtype))) if windows else np.empty(count, dtype)

    def _fill(self, tensor: Any, values: numpy.ndarray[Any, Any] | int) -> None:
        if self.rank.cuda:
            tensor.copy_(self.rank.torch.as_tensor(values).to(tensor.dtype))
        else:
            tensor[:] = values

    def clear(self) -> None:
        """Fills the output with what no call leaves there; the root of a broadcast has its data there."""
        is_root = self.collective == "broadcast" and self.rank.comm.rank == 0
        self._fill(self.output, self.data if is_root else 31)

    def is_right(self) -> bool:
        """Whether the output holds the result, bit by bit."""
        import numpy as np

        found = self.output.float().cpu().numpy() if self.rank.cuda else self.output
        return bool(np.array_equal(found, self.expected))

    def make(self, name: str) -> None:
        """Makes the call by the algorithm of this name."""
        comm = self.rank.comm
        match self.collective:
            case "all_reduce":
                comm.all_reduce(self.input, out=self.output, algorithm=name)
            case "reduce_scatter":
                comm.reduce_scatter_tensor(self.output, self.input, algorithm=name)
            case "all_gather":
                comm.all_gather_into_tensor(self.output, self.input, algorithm=name)
            case "broadcast":
                comm.broadcast(self.output, 0, algorithm=name)
            case _:
                comm.all_to_all_single(self.output, self.input, algorithm=name)

    def time(self, name: str) -> float:
        """Microseconds of a call, on the slowest rank."""
        once = self.rank.slowest(self._span(name, 1))
        calls = max(3, min(1000, int(ROUND / max(once, 1e-7))))
        return 1e6 * self.rank.slowest(self._span(name, calls)) / calls

    def _span(self, name: str, calls: int) -> float:
        """Seconds of so many calls; on a GPU in a graph."""
        if not self.rank.cuda:
            begin = time.perf_counter()
            for _ in range(calls):
                self.make(name)
            return time.perf_counter() - begin
        torch = self.rank.torch
        self.make(name)
        self.rank.comm.synchronize()
        graph = torch.cuda.CUDAGraph()
        in_graph = min(calls, 20)
        with torch.cuda.graph(graph):
            for _ in range(in_graph):
                self.make(name)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        begin.record()
        replays = max(1, calls // in_graph)
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        self.rank.comm.synchronize()
        return begin.elapsed_time(end) / 1e3 / (replays * in_graph) * calls


def fastest(
    times: dict[int, dict[str, float]], names: dict[str, tuple[str, int | None]]
) -> list[dict[str, Any]]:
    """Returns the rows without their group: the fastest algorithms, each up to the largest size."""
    rows: list[tuple[int | None, str]] = []
    for size, row in sorted(times.items()):
        if not row:
            continue
        best = min(row, key=lambda name: row[name])
        if rows and rows[-1][1] in row and row[rows[-1][1]] <= row[best] * (1 + MARGIN):
            best = rows.pop()[1]
        elif rows and rows[-1][1] == best:
            rows.pop()
        rows.append((size, best))
    if rows and (rows[-1][0] or 0) >= ENDLESS:
        rows[-1] = (None, rows[-1][1])
    found = []
    for up_to, name in rows:
        algorithm, blocks = names.get(name, (name, None))
        entry = {"up_to": up_to, "algorithm": algorithm}
        found.append(entry if blocks is None else {**entry, "blocks": blocks})
    return found


GROUP = ("collective", "world", "lamport", "windows")


def group_of(row: dict[str, Any]) -> tuple[object, ...]:
    """Returns the fields that rows of a table for the same calls have in common."""
    return (row.get("collective", "all_reduce"), *(row.get(name) for name in GROUP[1:]))


def replace(table: dict[str, Any], group: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Replaces a group of rows, or adds it."""
    if rows:
        table["rows"] = [row for row in table["rows"] if group_of(row) != group_of(group)]
        table["rows"] += [{**group, **row} for row in rows]


def read(path: str, devices: list[str]) -> dict[str, Any]:
    """The table of a file, or a new one if there is no file."""
    try:
        table = json.loads(Path(path).read_text())
    except FileNotFoundError:
        return {"symmpool_tables": 1, "devices": devices, "rows": []}
    except ValueError as error:
        raise InvalidArgumentError(f"{path}: it is no JSON: {error}") from error
    rows = table.get("rows") if isinstance(table, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise InvalidArgumentError(f"{path}: rows: it is no table of algorithms")
    if table.get("symmpool_tables", 1) != 1:
        raise InvalidArgumentError(f"{path}: symmpool_tables: version {table['symmpool_tables']!r}, not 1")
    if not set(devices) <= set(table.get("devices", [])):
        raise InvalidArgumentError(
            f"{path}: devices: it is of {table.get('devices')}, and this is {devices[0]}: name another file"
        )
    return table


def text_of(table: dict[str, Any]) -> str:
    """The text of a table, with a line for each row."""
    rows = ",\n".join(f"    {json.dumps(row, separators=(',', ':'))}" for row in table["rows"])
    head = f'{{\n  "symmpool_tables": 1,\n  "devices": {json.dumps(table["devices"])},\n  "rows": [\n'
    return f"{head}{rows}\n  ]\n}}\n"


def show(title: str, times: dict[int, dict[str, float]]) -> None:
    """Prints microseconds by size and algorithm."""
    names = list(dict.fromkeys(name for row in times.values() for name in row))
    print(title)
    print(" ".join([f"{'bytes':>10}", *(f"{name:>{max(len(name), 9)}}" for name in names)]))
    for size, row in times.items():
        cells = [f"{row[name]:.1f}" if name in row else "-" for name in names]
        print(" ".join([f"{size:>10}", *(f"{c:>{max(len(n), 9)}}" for n, c in zip(names, cells))]))
