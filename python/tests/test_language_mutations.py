"""The check of programs against small changes of right ones: each is refused, or shown to be right by
running it."""

import copy
import json

import pytest
from plan_model import Wrong, run_at_random

from symmpool import language as sl
from symmpool.language import library


def worlds(name):
    return (2, 4) if name.startswith(("halving", "hierarchical")) else (2, 3)


def shifted(span, by, chunks):
    """The place that many chunks further, or None where that is not."""
    changed = dict(span, index=span["index"] + by)
    end = changed["index"] + changed.get("count", 1)
    return changed if changed["index"] >= 0 and end <= chunks[span["buffer"]] else None


def operand_changes(operation, rank, plan, chunks):
    """The operation with one operand changed, in every way that is still an operation."""
    others = [peer for peer in range(plan["world"]) if peer != rank]
    if operation["op"] in ("signal", "wait"):
        for peer in others:
            if peer != operation["peer"]:
                yield dict(operation, peer=peer)
        yield dict(operation, channel=operation.get("channel", 0) + 1)
        yield dict(operation, op="wait" if operation["op"] == "signal" else "signal")
    for key in ("dst", "src"):
        if key not in operation:
            continue
        for by in (-1, 1):
            if changed := shifted(operation[key], by, chunks):
                yield dict(operation, **{key: changed})
        for peer in others:
            if operation[key].get("rank", rank) not in (rank, peer):
                yield dict(operation, **{key: dict(operation[key], rank=peer)})
        for buffer in ("input", "output", "scratch"):
            if changed := shifted(dict(operation[key], buffer=buffer), 0, chunks):
                yield dict(operation, **{key: changed})
    sources = operation.get("srcs", [])
    for index, source in enumerate(sources):
        if len(sources) > 1:
            yield dict(operation, srcs=sources[:index] + sources[index + 1 :])
        yield dict(operation, srcs=sources + [source])
        for by in (-1, 1):
            if changed := shifted(source, by, chunks):
                yield dict(operation, srcs=sources[:index] + [changed] + sources[index + 1 :])


def mutants(plan):
    """Every deletion of an operation, every swap of two neighbours, and changes of every operand."""
    outputs = {"all_gather": plan["world"], "reduce_scatter": 1 / plan["world"]}
    chunks = {
        "input": plan["chunks"],
        "output": int(plan["chunks"] * outputs.get(plan["collective"], 1)),
        "scratch": plan["scratch"],
    }
    for rank, program in enumerate(plan["programs"]):
        for index, operation in enumerate(program):
            for changed in [None, *operand_changes(operation, rank, plan, chunks)]:
                mutant = copy.copy(plan)
                mutant["programs"] = list(plan["programs"])
                replaced = [] if changed is None else [changed]
                mutant["programs"][rank] = program[:index] + replaced + program[index + 1 :]
                yield mutant
            if index + 1 < len(program):
                mutant = copy.copy(plan)
                mutant["programs"] = list(plan["programs"])
                pair = [program[index + 1], program[index]]
                mutant["programs"][rank] = program[:index] + pair + program[index + 2 :]
                yield mutant


@pytest.mark.parametrize("name", library.ALL)
def test_changed_programs_are_refused_or_right(name):
    refused = right = 0
    for world in worlds(name):
        plan = json.loads(library.ALL[name].trace(world))
        run_at_random(plan)
        for mutant in mutants(plan):
            if mutant["programs"] == plan["programs"]:
                continue
            try:
                sl.Algorithm(json.dumps(mutant))
            except sl.PlanError as error:
                assert error.kind and str(error)
                refused += 1
                continue
            try:
                run_at_random(mutant)
            except Wrong as wrong:
                raise AssertionError(f"accepted, but {wrong}: {mutant['programs']}") from None
            right += 1
    assert refused > 20, f"{refused} refused, {right} right"


def test_the_model_finds_what_is_wrong():
    # Else what the other test shows would be little.
    plan = json.loads(library.ALL["two_shot_all_reduce"].trace(3))
    wrong = 0
    for mutant in mutants(plan):
        try:
            run_at_random(mutant)
        except Wrong:
            wrong += 1
    assert wrong > 50


@pytest.mark.parametrize("name", library.ALL)
@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 6, 7, 8, 16])
def test_right_programs_raise_no_alarm(name, world):
    if name.startswith("halving") and world & (world - 1) or name.startswith("hierarchical") and world % 2:
        with pytest.raises(sl.PlanError.__mro__[1], match=f"among {world} ranks"):
            library.ALL[name].check(world)
        return
    library.ALL[name].check(world)
    if name in library.LL:
        library.ALL[name].compile(world, protocol="ll")
