"""CUDA graphs of compiled functions under `symmpool.install()`, as `mode="reduce-overhead"` asks for them.

torch has them share memory as a tree, for which it asks its own allocator where a pool's blocks are, and puts
them back. Another allocator cannot do that. So here each compiled function has a graph with its own memory.
torch's choice of functions, sizes and inputs stays: `torch._inductor.cudagraph_trees.cudagraphify` alone is
replaced (docs/decisions/compiled-graphs.md).

Results are copied out of the graph's memory. So they stay as they are when the function runs again, which
torch's trees do not promise. Inputs that torch calls static, such as parameters, are read where they are for
as long as their addresses stay the same, which each call looks at. Other inputs are copied in."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from symmpool.communicators.module_imports import when_imported

__all__ = ["GraphedFunction", "replace_trees"]

logger = logging.getLogger("symmpool")

TREES = "torch._inductor.cudagraph_trees"
#: Graphs that a function has recorded, one after the other, before it runs without: addresses of its static
#: inputs keep changing then.
MAX_RECORDS = 8

Model = Callable[[list[Any]], Any]
#: Records what a function does, and returns its results, which lie in the graph's memory, and the replay.
Capture = Callable[[Callable[[], Any]], tuple[Any, Callable[[], None]]]


def _on_device(function: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
    """Captures a CUDA graph on the current device."""
    from torch._dynamo.utils import preserve_rng_state

    graph = torch.cuda.CUDAGraph()
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)
    # Workspaces that a capture took would lie in its memory, and outlive it.
    clear()
    with preserve_rng_state(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = function()
    clear()
    return results, graph.replay


def _written(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without the dimensions in which all its elements are one."""
    for dimension, (size, stride) in enumerate(zip(tensor.size(), tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether elements of a tensor may lie in each other's place."""
    end = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size > 1 and stride < end:
            return True
        end += stride * max(size - 1, 0)
    return False


class _Results:
    """Results of a graph, and how a call gets copies of them."""

    def __init__(self, results: Sequence[Any], inputs: list[torch.Tensor], static: set[int]):
        self._results = list(results)
        self._kind = type(results) if isinstance(results, tuple) else list
        places = {
            inputs[i].untyped_storage().data_ptr(): i
            for i in static
            if inputs[i].untyped_storage().nbytes() > 0
        }
        # Results that lie in an input's memory, and the rest by storage.
        self._of_inputs: dict[int, int] = {}
        storages: dict[int, list[int]] = {}
        for number, result in enumerate(self._results):
            if not isinstance(result, torch.Tensor):
                continue
            at = result.untyped_storage().data_ptr()
            if at in places:
                self._of_inputs[number] = places[at]
                # A result that an input's memory holds is not held here.
                self._results[number] = _Place.of(result)
            else:
                storages.setdefault(at, []).append(number)
        self._alone = [
            numbers[0]
            for numbers in storages.values()
            if len(numbers) == 1 and not _overlaps(self._results[numbers[0]])
        ]
        alone = set(self._alone)
        self._together = [numbers for numbers in storages.values() if numbers[0] not in alone]

    def copies(self, inputs: list[torch.Tensor]) -> Any:
        """The results of the last replay, in memory that later ones leave as it is."""
        found = list(self._results)
        of = [self._results[number] for number in self._alone]
        made = [torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=x.device) for x in of]
        if made:
            torch._foreach_copy_(made, of)
        for number, copy in zip(self._alone, made, strict=True):
            found[number] = copy
        for numbers in self._together:
            storage = self._results[numbers[0]].untyped_storage().clone()
            for number in numbers:
                found[number] = _Place.of(self._results[number]).on(storage)
        for number, source in self._of_inputs.items():
            found[number] = self._results[number].on(inputs[source].untyped_storage())
        return self._kind(found)


class _Place:
    """A tensor but for its storage."""

    def __init__(self, place: tuple[Any, ...]):
        self._place = place

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Place:
        place = (tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype, tensor.device)
        return cls(place)

    def on(self, storage: Any) -> torch.Tensor:
        """The tensor on a storage."""
        offset, size, stride, dtype, device = self._place
        return torch.empty(0, dtype=dtype, device=device).set_(storage, offset, size, stride)


class _Recorded:
    """A graph: its inputs, which are copied in or read where they are, and its results."""

    def __init__(self, model: Model, inputs: list[torch.Tensor], static: set[int], capture: Capture):
        tensors = {i: x for i, x in enumerate(inputs) if isinstance(x, torch.Tensor)}
        self.pointers = {i: tensors[i].data_ptr() for i in static}
        self._copied = [i for i in tensors if i not in static]
        buffers = {
            i: torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=x.device)
            for i, x in tensors.items()
            if i not in static
        }
        self._targets = [_written(buffers[i]) for i in self._copied]
        # Static inputs are not held: their addresses are compared.
        results, self._replay = capture(lambda: model([buffers.get(i, x) for i, x in enumerate(inputs)]))
        results = results if isinstance(results, (list, tuple)) else [results]
        self._results = _Results(results, inputs, static)

    def moved(self, inputs: list[torch.Tensor]) -> list[int]:
        """The static inputs whose memory is another one than the graph's."""
        return [i for i, pointer in self.pointers.items() if inputs[i].data_ptr() != pointer]

    def run(self, inputs: list[torch.Tensor]) -> Any:
        """Replays the graph on these inputs."""
        if self._targets:
            torch._foreach_copy_(self._targets, [_written(inputs[i]) for i in self._copied])
        self._replay()
        found = self._results.copies(inputs)
        inputs.clear()
        return found


class GraphedFunction:
    """A compiled function whose calls are a graph's, but the first, which runs it as it is."""

    def __init__(
        self,
        model: Model,
        static: Sequence[int],
        mutated: Sequence[int],
        device: torch.device,
        capture: Capture,
    ):
        self._model, self._device, self._capture = model, device, capture
        self._static, self._mutated = set(static), set(mutated)
        # Addresses of static inputs in the first call: where the next one differs, the input is none.
        self._before: dict[int, int] = {}
        self._recorded: _Recorded | None = None
        self._records = 0
        self._runs_as_it_is = not self._mutated <= self._static

    def first(self, inputs: list[torch.Tensor]) -> Any:
        """Runs the function as it is, which loads its kernels."""
        if any(isinstance(x, torch.Tensor) and not self._takes(x) for x in inputs):
            self._runs_as_it_is = True
        self._static = {i for i in self._static if isinstance(inputs[i], torch.Tensor)}
        self._before = {i: inputs[i].data_ptr() for i in self._static}
        return self._model(inputs)

    def _takes(self, tensor: torch.Tensor) -> bool:
        if tensor.device.type != self._device.type:
            return False
        return not _overlaps(_written(tensor))

    def __call__(self, inputs: list[torch.Tensor]) -> Any:
        """Returns the function's results for these inputs, and empties the list, as compiled functions do."""
        if self._runs_as_it_is or (self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            return self._model(inputs)
        recorded = self._recorded
        if recorded is None or recorded.moved(inputs):
            recorded = self._record(inputs)
            if recorded is None:
                return self._model(inputs)
        return recorded.run(inputs)

    def _record(self, inputs: list[torch.Tensor]) -> _Recorded | None:
        before = self._before if self._recorded is None else self._recorded.pointers
        moved = {i for i, pointer in before.items() if inputs[i].data_ptr() != pointer}
        # Memory that the function writes to has to be written where it is.
        self._static -= moved - self._mutated
        self._recorded = None
        self._records += 1
        if self._records > MAX_RECORDS:
            self._runs_as_it_is = True
            logger.warning(
                "symmpool: a compiled function runs without a CUDA graph from now on: memory that it writes "
                "to was another one in %s calls; keep buffers where they are",
                MAX_RECORDS,
            )
            return None
        self._recorded = _Recorded(self._model, inputs, self._static, self._capture)
        return self._recorded


def _cudagraphify(
    model: Model,
    inputs: list[torch.Tensor],
    static_input_idxs: Sequence[int] = (),
    *,
    device_index: int,
    mutated_input_idxs: Sequence[int] = (),
    kernel_free_cudagraph: bool = False,
    **rest: object,
) -> tuple[Model, Any]:
    """Returns what torch's function of this name does: the function with graphs, and the results of its first
    call."""
    if kernel_free_cudagraph:
        return model, model(inputs)
    device = torch.device("cuda", device_index)
    graphed = GraphedFunction(model, static_input_idxs, mutated_input_idxs, device, _on_device)

    def run(given: list[Any]) -> Any:
        with torch.cuda.device(device_index):
            return graphed(given)

    return run, graphed.first(inputs)


class _NoTree:
    """Answers for a tree's manager where a function's graph is here: no call waits for others."""

    @property
    def current_node(self) -> _NoTree:
        return self

    def _is_cuda_graph_recorded_tensor(self, tensor: torch.Tensor) -> bool:
        return False

    def set_to_running_backward(self) -> None:
        """Does nothing."""


def _replace(module: Any) -> None:
    of_torch = module.get_manager

    def get_manager(device_index: int | None = None, create_if_none_exists: bool = True) -> Any:
        found = of_torch(device_index, create_if_none_exists)
        return _NoTree() if found is None and not create_if_none_exists else found

    module.cudagraphify, module.get_manager = _cudagraphify, get_manager


def replace_trees() -> None:
    """Has compiled functions record graphs of their own, from their next compilation on. The program is left
    to import the module of trees, which takes seconds."""
    when_imported(TREES, _replace)
