"""Graphs of compiled functions under `symmpool.install()`, on the CPU: a graph is pretended, which runs the
function again on the tensors that it was recorded with."""

import subprocess
import sys

import pytest
import torch

from symmpool.memory import compiled_graphs
from symmpool.memory.compiled_graphs import GraphedFunction

CPU = torch.device("cpu")


class Pretended:
    """A compiled function, and captures of it: in one, nothing is computed."""

    def __init__(self, body):
        self.body, self.captures, self.replays, self.eager = body, 0, 0, 0
        self.given = None

    def model(self, inputs):
        given = list(inputs)
        inputs.clear()
        if self.given is None:
            self.eager += 1
            return self.body(given)
        self.given.extend(given)
        # Results lie in the graph's memory, as the function lays them out, and hold nothing of use.
        saved = [x.clone() if isinstance(x, torch.Tensor) else x for x in given]
        results = self.body(given)
        for x, before in zip(given, saved):
            if isinstance(x, torch.Tensor):
                x.copy_(before)
        return results

    def capture(self, function):
        self.captures += 1
        self.given = []
        results, given, self.given = function(), self.given, None

        def replay():
            self.replays += 1
            for into, found in zip(results, self.body(given)):
                if isinstance(into, torch.Tensor) and into.data_ptr() != found.data_ptr():
                    into.copy_(found)

        return results, replay

    def graphed(self, static=(), mutated=()):
        return GraphedFunction(self.model, static, mutated, CPU, self.capture)


def test_results_stay_when_the_function_runs_again():
    weight = torch.full((4,), 3.0)
    pretended = Pretended(lambda given: [given[0] * given[1], 7, None])
    graphed = pretended.graphed(static=[0])
    results = [graphed.first([weight, torch.full((4,), 1.0)])]
    results += [graphed([weight, torch.full((4,), float(i))]) for i in range(2, 8)]
    assert [found[0].tolist() for found in results] == [[3.0 * i] * 4 for i in range(1, 8)]
    assert all(found[1:] == [7, None] for found in results)
    assert (pretended.eager, pretended.captures, pretended.replays) == (1, 1, 6)
    # A parameter's new values are read where they are.
    weight.fill_(5)
    assert graphed([weight, torch.ones(4)])[0].tolist() == [5.0] * 4 and pretended.captures == 1


def test_inputs_that_move_are_copied_from_then_on():
    pretended = Pretended(lambda given: (given[0] + given[1],))
    graphed = pretended.graphed(static=[0, 1])
    kept = [torch.full((4,), float(i)) for i in range(20)]
    weight = torch.ones(4)
    graphed.first([weight, kept[0]])
    for x in kept[1:]:
        (found,) = graphed([weight, x])
        assert torch.equal(found, x + 1)
    assert pretended.captures == 1 and pretended.replays == 19
    # A parameter that was replaced.
    weight = torch.full((4,), 9.0)
    for x in kept:
        assert torch.equal(graphed([weight, x])[0], x + 9)
    assert pretended.captures == 2 and isinstance(graphed([weight, kept[0]]), tuple)


def test_what_a_function_writes_to_is_written_once_a_call():
    def body(given):
        given[0].add_(given[1])
        return [given[0] * 2]

    pretended, state = Pretended(body), torch.zeros(4)
    graphed = pretended.graphed(static=[0], mutated=[0])
    found = [graphed.first([state, torch.ones(4)])[0]]
    found += [graphed([state, torch.ones(4)])[0] for _ in range(5)]
    assert state.tolist() == [6.0] * 4 and [x[0].item() for x in found] == [2, 4, 6, 8, 10, 12]
    # Its memory moves: at first graphs are recorded anew, and then it runs without.
    states = [torch.zeros(4) for _ in range(3 * compiled_graphs.MAX_RECORDS)]
    for nth, each in enumerate(states):
        assert graphed([each, torch.full((4,), float(nth))])[0].tolist() == [2.0 * nth] * 4
        assert each.tolist() == [nth] * 4
    assert pretended.captures == compiled_graphs.MAX_RECORDS and pretended.eager > 1


def test_a_function_that_writes_to_inputs_that_move_has_no_graph():
    def body(given):
        given[0].mul_(2)
        return [given[0]]

    pretended = Pretended(body)
    graphed = pretended.graphed(mutated=[0])
    for call in (graphed.first, graphed, graphed):
        x = torch.ones(3)
        assert call([x])[0] is x and x.tolist() == [2.0] * 3
    assert pretended.captures == 0


def test_results_that_share_memory_do_so_afterwards():
    def body(given):
        whole = given[0] * 2
        return [whole, whole[1:], given[1][:2], whole.view(2, 3).t(), given[0][0].expand(3)]

    pretended, weight = Pretended(body), torch.arange(6.0)
    graphed = pretended.graphed(static=[1])
    graphed.first([torch.zeros(6), weight])
    first = graphed([torch.arange(6.0), weight])
    graphed([torch.ones(6), weight])
    assert first[0].tolist() == [0, 2, 4, 6, 8, 10] and first[1].tolist() == [2, 4, 6, 8, 10]
    assert first[1].data_ptr() == first[0][1:].data_ptr() and first[3].tolist() == [[0, 6], [2, 8], [4, 10]]
    # A result that lies in a parameter's memory is a view of that.
    assert first[2].data_ptr() == weight.data_ptr() and first[4].tolist() == [0, 0, 0]
    first[0].zero_()
    assert not first[3].any()


@pytest.mark.parametrize("make", [lambda: torch.ones(1, 3).expand(4, 3), lambda: torch.ones(4, 8)[:, ::2]])
def test_inputs_of_any_strides_are_copied(make):
    pretended = Pretended(lambda given: [given[0] + 1])
    graphed = pretended.graphed()
    graphed.first([make()])
    for value in (2.0, 3.0):
        assert bool((graphed([make() * 0 + value if value == 2 else make() * value])[0] == value + 1).all())
        assert bool((graphed([make()])[0] == 2).all())
    assert pretended.captures == 1


def test_inputs_that_lie_in_their_own_place_have_no_graph():
    pretended = Pretended(lambda given: [given[0] + 1])
    graphed = pretended.graphed()
    x = torch.arange(6.0).as_strided((4, 3), (1, 1))
    for call in (graphed.first, graphed):
        assert torch.equal(call([x])[0], x + 1)
    assert pretended.captures == 0


def test_torchs_module_of_trees_is_changed_when_it_is_imported():
    program = """
import sys
from symmpool.memory import compiled_graphs
compiled_graphs.replace_trees()
assert compiled_graphs.TREES not in sys.modules
import torch._inductor.cudagraph_trees as trees
assert trees.cudagraphify is compiled_graphs._cudagraphify
assert trees.get_manager(0, False).set_to_running_backward() is None
assert not any(getattr(each, "name", None) == compiled_graphs.TREES for each in sys.meta_path)
import inspect
taken = inspect.signature(compiled_graphs._cudagraphify).parameters
assert list(taken)[:3] == ["model", "inputs", "static_input_idxs"]
print(trees.cudagraphify_impl.__module__)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == compiled_graphs.TREES
