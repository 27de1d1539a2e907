"""How one row of a table is measured: everybody is prepared and checked, tried in all forms, and then timed
in turns in the form that suits it best."""

from symmpool.bench import timing

#: Spans of each form when forms are tried, of which the median says which is best.
TRIAL = 5


def prepared(contenders, row, prepare):
    """What `prepare` makes of each contender: a case and its forms, by name. Who cannot be, on whichever
    rank, is missing in the row."""
    running = {}
    for name, contender in contenders.items():
        try:
            running[name] = prepare(contender)
        except ValueError as error:
            row.missing[name] = str(error)
    return running


def measure(ranks, options, running, row, begin, told):
    """Tries everybody in every form, then times all in all rounds in the form that was each one's best,
    another first in each round. What the trial found only says which form that is. `begin` gets every case
    before its turn, `told` what is over. A row has the slowest rank's microseconds a call."""
    names = list(running)

    def turn(name, form, repeats):
        begin(running[name][0])
        ranks.meet()
        return max(ranks.gather(form.time(ranks.torch, repeats)))

    best = {}
    for name in names:
        forms = running[name][1]
        tried = {}
        if len(forms) > 1:
            tried = {form.name: turn(name, form, min(TRIAL, options.replays)) for form in forms}
        # Every rank has the same times here, so all choose the same.
        best[name] = min(forms, key=lambda form: tried.get(form.name, 0))
        row.forms[name], row.tried[name] = best[name].name, tried
    told("forms")
    row.rounds = {name: [] for name in names}
    for number in range(options.rounds):
        for name in timing.order(names, number):
            row.rounds[name].append(turn(name, best[name], options.replays))
        told(f"round {number + 1}")


def confirm(ranks, contenders, running, row):
    """Leaves out who says only now that calls did not do what they should. Returns their names."""
    _, failed = ranks.attempt_each({name: contenders[name].confirm for name in running})
    row.rounds.update({name: [] for name in failed})
    row.missing.update(failed)
    return list(failed)
