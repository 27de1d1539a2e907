"""How one row of a table is measured: every contender is prepared and checked, tried in all forms, and then
timed in several rounds in its fastest form."""

from symmpool.bench import timing

#: Spans that are timed of each form when forms are tried; their median decides.
TRIAL = 5


def prepare_all(contenders, row, prepare):
    """A case and its forms by contender, as `prepare` makes them. A contender that cannot be prepared on some
    rank is missing in the row."""
    running = {}
    for name, contender in contenders.items():
        try:
            running[name] = prepare(contender)
        except ValueError as error:
            row.missing[name] = str(error)
    return running


def measure(ranks, options, running, row, begin, report_progress):
    """Tries every contender in every form, and then times it in all rounds in its fastest form; each round
    starts with another contender. Times of the trial only choose the form. `begin` is called with a case
    before it is timed, `report_progress` with the name of each finished step. A row has the microseconds per
    call of the slowest rank."""
    names = list(running)

    def time(name, form, repeats):
        begin(running[name][0])
        ranks.meet()
        return max(ranks.gather(form.time(ranks.torch, repeats)))

    best = {}
    for name in names:
        forms = running[name][1]
        tried = {}
        if len(forms) > 1:
            tried = {form.name: time(name, form, min(TRIAL, options.replays)) for form in forms}
        # Every rank has the same times here, so all choose the same.
        best[name] = min(forms, key=lambda form: tried.get(form.name, 0))
        row.forms[name], row.tried[name] = best[name].name, tried
    report_progress("forms")
    row.rounds = {name: [] for name in names}
    for number in range(options.rounds):
        for name in timing.order(names, number):
            row.rounds[name].append(time(name, best[name], options.replays))
        report_progress(f"round {number + 1}")


def confirm(ranks, contenders, running, row):
    """Removes contenders whose calls turn out to have failed only now. Returns their names."""
    _, failed = ranks.attempt_each({name: contenders[name].confirm for name in running})
    row.rounds.update({name: [] for name in failed})
    row.missing.update(failed)
    return list(failed)
