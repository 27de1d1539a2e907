"""Programs: a function that is traced for each rank, and what becomes of it."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import operator
import os
import reprlib
from collections.abc import Callable, Sequence

from symmpool._symmpool import Algorithm
from symmpool.errors import InvalidArgumentError, PlanError
from symmpool.language.rank import Rank, Tracer, plan_error, whole

#: The collectives, and how many chunks their inputs have unless a program says otherwise.
CHUNKS: dict[str, int | str] = {
    "all_reduce": 1,
    "all_gather": 1,
    "reduce_scatter": "world",
    "broadcast": 1,
    "all_to_all": "world",
}

#: Bytes of the longest plan, as collectives/src/plan/format.rs has it.
MAX_BYTES = 64 << 20

#: What one chunk of an output must hold: the reduction of chunks of inputs, each given as (rank, chunk).
OutputChunk = Sequence[tuple[int, int]]


def check_name(name: object, of: str) -> str:
    """Refuses what is no name."""
    if not isinstance(name, str):
        raise TypeError(f"name={name!r}: the name of {of} is a string")
    if not name:
        raise InvalidArgumentError(f"name='': {of} has a name")
    return name


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective of one's own: `outputs(rank, world)` says for each chunk of that rank's output of
    which chunks of inputs it is the reduction, as a list of `(rank, chunk)`; a copy where it is one. `[]` is
    for a rank without output.

        neighbours = sl.Collective("shift", lambda rank, world: [[((rank + 1) % world, 0)]])
    """

    name: str
    outputs: Callable[[int, int], Sequence[OutputChunk]]

    def __post_init__(self) -> None:
        check_name(self.name, "a collective")
        if not callable(self.outputs):
            raise TypeError(
                f"outputs={self.outputs!r}: a function of a rank and the number of ranks is needed"
            )


class Program:
    """A traced function. `algorithm` makes one of a function."""

    def __init__(
        self,
        function: Callable[[Rank], None],
        collective: str | Collective,
        chunks: int | str | None,
        name: str | None,
        reproducible: bool,
    ):
        functools.update_wrapper(self, function)
        self._function = function
        self._collective = collective
        self._chunks = chunks
        self._reproducible = reproducible
        #: The name of the algorithm.
        self.name = function.__name__ if name is None else check_name(name, "an algorithm")

    @property
    def collective(self) -> str:
        """Name of the collective that the program computes."""
        return self._collective if isinstance(self._collective, str) else self._collective.name

    def check(self, world_size: int) -> None:
        """Proves that the program computes its collective among so many ranks, on every schedule; else
        PlanError."""
        Algorithm(self.trace(world_size))

    def compile(self, world_size: int, protocol: str = "simple", blocks: int | None = None) -> Algorithm:
        """Checks the program and makes an algorithm of it.

        `protocol` is how data shows on devices that it has arrived: "simple", by signals, or "ll", by
        flags with the data, for programs that reach peers by puts into scratch alone; PlanError where
        they do not. `blocks` are thread blocks on devices at most, 1 to 1024; without it that is left to
        the size of a call.
        """
        return Algorithm(self.trace(world_size, protocol, blocks))

    def trace(self, world_size: int, protocol: str = "simple", blocks: int | None = None) -> str:
        """The plan as JSON, not checked: runs the function once for each rank."""
        world = whole(world_size, "world_size")
        if not 1 <= world <= 1024:
            raise InvalidArgumentError(f"world_size={world}: 1 to 1024 ranks are possible")
        if blocks is not None and not 1 <= whole(blocks, "blocks") <= 1024:
            raise InvalidArgumentError(f"blocks={blocks}: 1 to 1024 are possible")
        if protocol not in ("simple", "ll"):
            raise InvalidArgumentError(f"protocol={protocol!r}: there are 'simple' and 'll'")
        chunks = self._input_chunks(world)
        outputs = self._outputs(chunks, world)
        if outputs is None:
            sizes = [self._output_chunks(chunks, world)] * world
        else:
            sizes = [len(of_rank) for of_rank in outputs]
        source = inspect.unwrap(self._function).__code__.co_filename
        tracers = [
            Tracer(rank, world, {"input": [chunks] * world, "output": sizes}, source) for rank in range(world)
        ]
        for tracer in tracers:
            self._function(Rank(tracer, tracer.rank))
            if tracer.scratch != tracers[0].scratch:
                raise plan_error(
                    "out_of_range",
                    tracer.rank,
                    (source, self._function.__code__.co_firstlineno),
                    f"scratch of {tracer.scratch} chunks, and rank 0 has {tracers[0].scratch}: ranks that "
                    "differ would reach into the wrong places of each other",
                )
        plan = {
            "symmpool_plan": 1,
            "name": self.name,
            "collective": self.collective
            if outputs is None
            else {"name": self.collective, "outputs": outputs},
            "world": world,
            "chunks": chunks,
            "scratch": sum(tracers[0].scratch),
            "reproducible": self._reproducible,
            "protocol": protocol,
            "source": os.path.basename(source),
            "programs": [tracer.operations for tracer in tracers],
        }
        if blocks is not None:
            plan["blocks"] = blocks
        return json.dumps(plan)

    def __call__(self, *_: object, **__: object) -> None:
        """Raises TypeError: a program is compiled, and runs as an algorithm."""
        raise TypeError(
            f"{self.name} is a program, which runs as an algorithm: {self.name}.compile(world_size=...)"
        )

    def __repr__(self) -> str:
        return f"symmpool.language.Program({self.name!r}, {self.collective!r})"

    def _input_chunks(self, world: int) -> int:
        chunks = self._chunks
        if chunks is None:
            chunks = CHUNKS.get(self.collective, 1) if isinstance(self._collective, str) else 1
        if chunks == "world":
            return world
        count = whole(chunks, "chunks")
        parts = world if self._collective in ("reduce_scatter", "all_to_all") else 1
        if not 1 <= count <= 1 << 16 or count % parts:
            raise InvalidArgumentError(
                f"chunks={count} of {self.name}: from 1 to 65536, and as many for each of {parts} parts"
            )
        return count

    def _output_chunks(self, chunks: int, world: int) -> int:
        match self._collective:
            case "all_gather":
                return chunks * world
            case "reduce_scatter":
                return chunks // world
            case _:
                return chunks

    def _outputs(self, chunks: int, world: int) -> list[list[list[list[int]]]] | None:
        """Contents of each chunk of each rank's output, for a collective of one's own."""
        if isinstance(self._collective, str):
            return None
        return [self._outputs_of(rank, chunks, world) for rank in range(world)]

    def _outputs_of(self, rank: int, chunks: int, world: int) -> list[list[list[int]]]:
        name = self.collective
        assert not isinstance(self._collective, str)
        promised = self._collective.outputs(rank, world)
        try:
            outputs = [
                [[operator.index(of), operator.index(chunk)] for of, chunk in place] for place in promised
            ]
        except (TypeError, ValueError):
            shown = reprlib.repr(promised)
            raise TypeError(
                f"{name}: outputs(rank {rank}, {world}) is {shown}. It must be a list with, for each chunk "
                "of the output, a list of (rank, chunk); [] for a rank without output"
            ) from None
        for index, place in enumerate(outputs):
            for of, chunk in place:
                if not (0 <= of < world and 0 <= chunk < chunks):
                    raise PlanError(
                        f"out_of_range: {name}: output[{index}] of rank {rank} must hold input[{chunk}] of "
                        f"rank {of}, which is not there",
                        "out_of_range",
                        rank,
                        0,
                    )
        return outputs


def algorithm(
    collective: str | Collective,
    *,
    chunks: int | str | None = None,
    name: str | None = None,
    reproducible: bool = True,
) -> Callable[[Callable[[Rank], None]], Program]:
    """Makes a program of a function of one rank.

    `collective` is "all_reduce", "all_gather", "reduce_scatter", "broadcast" (from rank 0; calls with
    another root rotate the ranks), "all_to_all", or a `Collective` of one's own. `chunks` counts the
    input's equal chunks, a number or "world"; unless given, one, and for reduce-scatter and all-to-all
    one for each rank. The output has as many in all-reduce, broadcast and all-to-all, `world` times as
    many in all-gather, and a `world`-th in reduce-scatter. `name` is the function's unless given. With
    `reproducible=False` ranks may reduce in different orders, whose results may differ in the last bits.
    """
    if not isinstance(collective, Collective) and collective not in CHUNKS:
        known = ", ".join(CHUNKS)
        raise InvalidArgumentError(
            f"collective={collective!r}: there are {known}, and sl.Collective for one's own"
        )
    if isinstance(chunks, str) and chunks != "world":
        raise InvalidArgumentError(f'chunks={chunks!r}: a number, or "world"')

    def make(function: Callable[[Rank], None]) -> Program:
        if not callable(function):
            raise TypeError(f"{function!r} is no function of a rank")
        return Program(function, collective, chunks, name, reproducible)

    return make


def load(path: str | os.PathLike[str]) -> Algorithm:
    """Reads an algorithm that `Algorithm.save` has written, and proves it anew. OSError where there is no
    file, InvalidArgumentError for what is no plan, PlanError for a plan that is wrong."""
    with open(path, "rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise InvalidArgumentError(f"{os.fspath(path)}: more than {MAX_BYTES} bytes; no plan has so many")
    return Algorithm(data.decode("utf-8", "replace"))
