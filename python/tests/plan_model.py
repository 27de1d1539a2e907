"""A naive model of plans: all ranks step by step, in a random order, with numbers for data.

It shares nothing with the check. Copies take two steps, so that a peer may write between reading and
writing; ranks make two calls, one behind the other, and may be a call ahead of others; and memory of a
rank that is not in the call holds nothing that makes sense.
"""

import random
from collections import defaultdict

PRIME = (1 << 61) - 1


class Wrong(Exception):
    """The plan does not do what it should on this schedule."""


def leaf(call, rank, chunk):
    """A number for a chunk of an input, such that no two different sums are equal by chance."""
    return random.Random(f"{call} {rank} {chunk}").randrange(PRIME)


def expected(plan, call, rank, index):
    world, each = plan["world"], plan["chunks"]
    match plan["collective"]:
        case "all_reduce":
            return sum(leaf(call, peer, index) for peer in range(world)) % PRIME
        case "reduce_scatter":
            place = rank * (each // world) + index
            return sum(leaf(call, peer, place) for peer in range(world)) % PRIME
        case "all_gather":
            return leaf(call, index // each, index % each)
        case "broadcast":
            return leaf(call, 0, index)
        case "all_to_all":
            part = each // world
            return leaf(call, index // part, rank * part + index % part)
    raise AssertionError(plan["collective"])


def output_chunks(plan):
    match plan["collective"]:
        case "all_gather":
            return plan["chunks"] * plan["world"]
        case "reduce_scatter":
            return plan["chunks"] // plan["world"]
    return plan["chunks"]


class Model:
    def __init__(self, plan, seed):
        self.plan, self.random = plan, random.Random(seed)
        self.world = plan["world"]
        #: The call that each rank is in; between calls it is in none, and has ended so many.
        self.ended = [0] * self.world
        self.inside = [False] * self.world
        self.memory = {}
        self.signals = defaultdict(int)
        self.arrived = [0] * self.world
        self.runs = [self.run(rank) for rank in range(self.world)]

    def place(self, call, rank, span, offset):
        owner = span.get("rank", rank)
        name = span["buffer"]
        if name != "scratch" and not (self.inside[owner] and self.ended[owner] == call):
            raise Wrong(f"rank {rank} touches the {name} of rank {owner}, which is not in call {call}")
        parity = call % 2 if name == "scratch" else None
        return owner, name, span["index"] + offset, parity

    def run(self, rank):
        """Makes a rank's operations: yields the condition that it waits for, where others may step in
        between."""
        for call in range(2):
            # Nobody is more than a call ahead.
            yield (
                lambda call=call: (
                    all(
                        inside or ended >= call for inside, ended in zip(self.inside, self.ended, strict=True)
                    )
                    and min(self.ended[r] + self.inside[r] for r in range(self.world)) >= call
                )
            )
            self.inside[rank] = True
            for index in range(self.plan["chunks"]):
                has_data = self.plan["collective"] != "broadcast" or rank == 0
                self.memory[rank, "input", index, None] = leaf(call, rank, index) if has_data else None
            for index in range(output_chunks(self.plan)):
                self.memory[rank, "output", index, None] = None
            for index in range(self.plan["scratch"]):
                self.memory[rank, "scratch", index, call % 2] = self.memory.get(
                    (rank, "scratch", index, call % 2)
                )
            yield None
            for operation in self.plan["programs"][rank]:
                yield from self.operate(call, rank, operation)
                yield None
            for index in range(output_chunks(self.plan)):
                if self.memory[rank, "output", index, None] != expected(self.plan, call, rank, index):
                    raise Wrong(f"output[{index}] of rank {rank} in call {call}")
            self.inside[rank] = False
            self.ended[rank] += 1
            yield None

    def operate(self, call, rank, operation):
        match operation["op"]:
            case "signal":
                self.signals[rank, operation["peer"], operation.get("channel", 0)] += 1
            case "wait":
                way = operation["peer"], rank, operation.get("channel", 0)
                yield lambda: self.signals[way] > 0
                self.signals[way] -= 1
            case "barrier":
                self.arrived[rank] += 1
                mine = self.arrived[rank]
                yield lambda: min(self.arrived) >= mine
            case "join":
                pass
            case _:
                sources = operation.get("srcs") or [operation["src"]]
                for offset in range(operation["dst"].get("count", 1)):
                    read = [self.memory.get(self.place(call, rank, src, offset)) for src in sources]
                    yield None
                    total = None if None in read else sum(read) % PRIME
                    self.memory[self.place(call, rank, operation["dst"], offset)] = total

    def play(self):
        waiting = dict(enumerate([None] * self.world))
        live = set(range(self.world))
        while live:
            ready = [rank for rank in sorted(live) if waiting[rank] is None or waiting[rank]()]
            if not ready:
                raise Wrong(f"ranks {sorted(live)} wait for ever")
            rank = self.random.choice(ready)
            # Some steps at once, so that ranks come far apart.
            for _ in range(self.random.choice((1, 1, 3, 20))):
                try:
                    waiting[rank] = next(self.runs[rank])
                except StopIteration:
                    live.remove(rank)
                    break
                if waiting[rank] is not None and not waiting[rank]():
                    break
        if any(self.signals.values()):
            raise Wrong("signals that nobody waited for")


def run_at_random(plan, schedules=12):
    """Runs a plan in several random orders; Wrong if one of them shows a mistake."""
    for seed in range(schedules):
        Model(plan, seed).play()
