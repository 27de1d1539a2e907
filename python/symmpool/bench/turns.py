"""How one row of a table is measured: everybody is prepared and checked, then timed in turns."""

from symmpool.bench import timing


def prepared(contenders, row, prepare):
    """What `prepare` makes of each contender: a case and its graph (None on the CPU), by name. Who cannot
    be, on whichever rank, is missing in the row."""
    running = {}
    for name, contender in contenders.items():
        try:
            running[name] = prepare(contender)
        except ValueError as error:
            row.missing[name] = str(error)
    return running


def measure(ranks, options, running, row, calls, begin, told):
    """Times all in all rounds, another first in each: `begin` gets every case before its turn, `told` the
    number of every round when it is over. A row has the slowest rank's microseconds a call."""
    names = list(running)
    row.rounds = {name: [] for name in names}
    for number in range(options.rounds):
        for name in timing.order(names, number):
            case, graph = running[name]
            begin(case)
            ranks.meet()
            if graph is None:
                spent = timing.time_loop(case.call, calls, options.replays)
            else:
                spent = timing.time_graph(ranks.torch, graph, calls, options.replays)
            row.rounds[name].append(max(ranks.gather(spent)))
        told(f"round {number + 1}")


def confirm(ranks, contenders, running, row):
    """Leaves out who says only now that calls did not do what they should. Returns their names."""
    _, failed = ranks.attempt_each({name: contenders[name].confirm for name in running})
    row.rounds.update({name: [] for name in failed})
    row.missing.update(failed)
    return list(failed)
