"""`python -m symmpool bench experts`: dispatch to experts and combine, compared with all-to-alls and
all-gathers of torch.distributed, and with DeepEP where it is installed.

    torchrun --nproc-per-node 2 -m symmpool bench experts --tokens 1,8,128,4096
"""

import argparse
from functools import partial

from symmpool.bench import expert_routing, peers, plot, rounds, session, table, timing
from symmpool.bench.arguments import add_measuring, comma_separated, count_list, positive

#: The calls that are measured. In the last one the routing is new in every call; in the others a handle has
#: it.
CASES = ("dispatch", "dispatch_fp8", "combine", "routed")


def _choices(known):
    def parse(text):
        found = comma_separated(text)
        if not found or any(each not in known for each in found):
            raise argparse.ArgumentTypeError(f"{text!r}: there are {', '.join(known)}")
        return found

    return parse


def add_options(commands):
    command = commands.add_parser("experts", help="dispatch to experts and combine, compared in the same way")
    command.add_argument("--tokens", type=count_list, help="of each rank: 1,8,128,512,4096")
    command.add_argument("--hidden", type=positive, help="channels of a token (default 7168, on the CPU 512)")
    command.add_argument("--experts", type=positive, help="of all ranks (default 256, on the CPU 16)")
    command.add_argument("--top-k", type=positive, help="experts of a token (default 8, on the CPU 2)")
    command.add_argument(
        "--routing",
        type=_choices(expert_routing.KINDS),
        default=["uniform", "skewed"],
        help=f"a list of {', '.join(expert_routing.KINDS)} (default: uniform,skewed)",
    )
    command.add_argument(
        "--cases",
        type=_choices(CASES),
        default=list(CASES),
        help=f"a list of {', '.join(CASES)} (default: all); routed: layout, dispatch and combine",
    )
    command.add_argument("--num-sms", type=positive, help="the most SMs of symmpool's and DeepEP's kernels")
    command.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    command.add_argument(
        "--peers", help="only these, by their names in the table: all-to-all,DeepEP; or none"
    )
    add_measuring(command)


class Exchange:
    """One case of one contender: a call without arguments, and `wrong`, which counts wrong elements after it.
    `outputs` are tensors that every call writes, which are overwritten before a check."""

    def __init__(self, call, wrong, *outputs):
        self.call, self.wrong, self.outputs = call, wrong, outputs

    def poison(self):
        for output in self.outputs:
            output.fill_(77)


class Contender:
    """One implementation, for up to `most` tokens of each rank."""

    def __init__(self, ranks, options, most):
        self.ranks, self.options, self.most = ranks, options, most
        self.torch, self.dist = ranks.torch, ranks.dist

    def differ(self, found, wanted):
        """The number of wrong elements."""
        torch = self.torch
        if found.shape != wanted.shape or found.dtype != wanted.dtype:
            return max(found.numel(), wanted.numel(), 1)
        return int((found.view(torch.uint8) != wanted.view(torch.uint8)).sum())

    def confirm(self):
        pass

    def close(self):
        pass


class Ours(Contender):
    """Rows by rank, in the buffer's memory; the host waits for nothing."""

    def __init__(self, ranks, options, most, pools):
        from symmpool import experts

        super().__init__(ranks, options, most)
        shape = {"hidden": options.hidden, "experts": options.experts, "top_k": options.top_k}
        self.buffer = experts.Buffer(pools.get(ranks), **shape, max_tokens=most, num_sms=options.num_sms)

    def exchange(self, case, routing):
        buffer, x = self.buffer, routing.x[routing.rank]
        ids, weights = routing.ids[routing.rank], routing.weights[routing.rank]
        received, handle = buffer.dispatch(x, ids, weights)
        count = int(handle.num_rows)
        found, out = {}, self.torch.empty_like(x)

        def dispatch(quantize):
            found["received"], _ = buffer.dispatch(x, handle=handle, quantize=quantize)

        def wrong_dispatch(quantize):
            wanted, found_rows = routing.received(), found["received"].x[:count]
            if quantize is None:
                return self.differ(found_rows, wanted)
            rows, scales = expert_routing.quantized(self.torch, wanted)
            return self.differ(found_rows, rows) + self.differ(found["received"].scales[:count], scales)

        def combine(rows):
            buffer.combine(rows, handle, out=out)

        def routed():
            received, new = buffer.dispatch(x, ids, weights)
            buffer.combine(received.x, new, out=out)

        def wrong_sums():
            return self.differ(out, routing.combined())

        if case == "combine":
            return Exchange(partial(combine, received.x.clone()), wrong_sums, out)
        if case == "routed":
            return Exchange(routed, wrong_sums, out)
        quantize = "fp8" if case == "dispatch_fp8" else None
        # The same memory, also where it is seen as other elements.
        return Exchange(partial(dispatch, quantize), partial(wrong_dispatch, quantize), received.x)

    def confirm(self):
        self.buffer.synchronize()

    def close(self):
        self.buffer = None


class AllToAll(Contender):
    """torch.distributed's all_to_all_single: a row for each token and rank, sizes known to the host."""

    def exchange(self, case, routing):
        torch, dist, world, me = self.torch, self.dist, self.ranks.world, routing.rank
        x = routing.x[me]
        if case == "routed" and self.ranks.on_cuda:
            raise ValueError("the host must know the sizes of an all-to-all, which a graph cannot tell it")

        def layout():
            index = [routing.on(rank, me).nonzero()[:, 0] for rank in range(world)]
            send = [len(each) for each in index]
            receive = [int(routing.on(me, source).sum()) for source in range(world)]
            return torch.cat(index), send, receive

        index, send, receive = layout()
        rows = x.new_empty((sum(receive), x.shape[1]))
        out = torch.empty_like(x)
        found = {}

        def dispatch(tokens, rows, index=index, send=send, receive=receive):
            dist.all_to_all_single(rows, tokens[index], receive, send)

        def dispatch_fp8(rows, scale_rows):
            tokens, scales = expert_routing.quantized(torch, x)
            # NCCL and gloo know bytes where they do not know the type.
            dispatch(tokens.view(torch.uint8), rows.view(torch.uint8))
            dispatch(scales, scale_rows)

        def combine(rows, index=index, send=send, receive=receive):
            back = rows.new_empty((sum(send), x.shape[1]))
            dist.all_to_all_single(back, rows, send, receive)
            out.zero_()
            out.index_add_(0, index, back)

        def routed():
            index, send, receive = layout()
            rows = x.new_empty((sum(receive), x.shape[1]))
            dispatch(x, rows, index, send, receive)
            combine(rows, index, send, receive)

        def wrong_rows():
            return self.differ(rows, routing.received())

        def wrong_sums():
            return self.differ(out, routing.combined())

        def wrong_fp8():
            wanted, scales = expert_routing.quantized(torch, routing.received())
            return self.differ(found["rows"], wanted) + self.differ(found["scales"], scales)

        if case == "dispatch":
            return Exchange(partial(dispatch, x, rows), wrong_rows, rows)
        if case == "combine":
            return Exchange(partial(combine, routing.received()), wrong_sums, out)
        if case == "routed":
            return Exchange(routed, wrong_sums, out)
        found["rows"] = rows.to(torch.float8_e4m3fn)
        found["scales"] = rows.new_empty((len(rows), x.shape[1] // 128), dtype=torch.float32)
        return Exchange(partial(dispatch_fp8, found["rows"], found["scales"]), wrong_fp8)


class AllGather(Contender):
    """All tokens, ids and weights go to every rank; a reduce-scatter sums up what comes back."""

    def exchange(self, case, routing):
        torch, dist, world, me = self.torch, self.dist, self.ranks.world, routing.rank
        x, ids, weights = routing.x[me], routing.ids[me], routing.weights[me]
        whole = x.new_empty((world * len(x), x.shape[1]))
        all_ids = ids.new_empty((world * len(ids), ids.shape[1]))
        all_weights = weights.new_empty(all_ids.shape)
        out = torch.empty_like(x)
        scales = whole.new_empty((len(whole), x.shape[1] // 128), dtype=torch.float32)
        quantized = whole.to(torch.float8_e4m3fn)
        here = torch.cat([routing.on(me, source) for source in range(world)])[:, None]

        def gather(to, tokens):
            dist.all_gather_into_tensor(to, tokens)
            dist.all_gather_into_tensor(all_ids, ids)
            dist.all_gather_into_tensor(all_weights, weights)

        def gather_fp8():
            rows, own = expert_routing.quantized(torch, x)
            gather(quantized.view(torch.uint8), rows.view(torch.uint8))
            dist.all_gather_into_tensor(scales, own)

        def scatter(rows):
            dist.reduce_scatter_tensor(out, rows)

        def routed():
            gather(whole, x)
            scatter(torch.where(here, whole, 0))

        def wrong_rows():
            return self.differ(whole, torch.cat(routing.x))

        def wrong_fp8():
            rows, wanted = expert_routing.quantized(torch, torch.cat(routing.x))
            return self.differ(quantized, rows) + self.differ(scales, wanted)

        def wrong_sums():
            # A sum that begins with zeros has zeros without a sign.
            return self.differ(out + 0, routing.combined() + 0)

        if case == "dispatch":
            return Exchange(partial(gather, whole, x), wrong_rows, whole)
        if case == "dispatch_fp8":
            return Exchange(gather_fp8, wrong_fp8, scales)
        if case == "combine":
            return Exchange(partial(scatter, torch.where(here, torch.cat(routing.x), 0)), wrong_sums, out)
        return Exchange(routed, wrong_sums, out)


class DeepEP(Contender):
    """DeepEP's normal mode within a host, where `deep_ep` can be imported."""

    def __init__(self, ranks, options, most):
        import deep_ep

        super().__init__(ranks, options, most)
        if options.num_sms:
            deep_ep.Buffer.set_num_sms(options.num_sms)
        configs = [
            get(ranks.world)
            for get in (deep_ep.Buffer.get_dispatch_config, deep_ep.Buffer.get_combine_config)
        ]
        bytes_ = max(each.get_nvl_buffer_size_hint(2 * options.hidden, ranks.world) for each in configs)
        self.buffer = deep_ep.Buffer(ranks.dist.group.WORLD, bytes_, 0)
        self.ids_type = getattr(deep_ep, "topk_idx_t", ranks.torch.int64)

    def exchange(self, case, routing):
        torch, buffer, me = self.torch, self.buffer, routing.rank
        x, weights = routing.x[me], routing.weights[me]
        ids = routing.ids[me].to(self.ids_type)

        def route(tokens, worst=0):
            ranks, _, experts, inside, _ = buffer.get_dispatch_layout(ids, routing.experts)
            return buffer.dispatch(
                tokens,
                topk_idx=ids,
                topk_weights=weights,
                num_tokens_per_rank=ranks,
                is_token_in_rank=inside,
                num_tokens_per_expert=experts,
                num_worst_tokens=worst,
            )

        received, _, _, _, handle, _ = route(x)
        found = {}

        def dispatch():
            found["rows"] = buffer.dispatch(x, handle=handle)[0]

        def dispatch_fp8(tokens):
            found["rows"], found["scales"] = buffer.dispatch(tokens, handle=handle)[0]

        def combine():
            found["out"] = buffer.combine(received, handle)[0]

        def routed():
            rows, _, _, _, new, _ = route(x, len(x) * self.ranks.world)
            found["out"] = buffer.combine(rows, new)[0]

        def wrong_rows():
            return self.differ(found["rows"], routing.received())

        def wrong_fp8():
            rows, scales = expert_routing.quantized(torch, routing.received())
            return self.differ(found["rows"], rows) + self.differ(found["scales"].contiguous(), scales)

        def wrong_sums():
            return self.differ(found["out"], routing.combined())

        if case == "dispatch":
            return Exchange(dispatch, wrong_rows)
        if case == "dispatch_fp8":
            # It takes tokens that are quantised, and the call has no part in that.
            return Exchange(partial(dispatch_fp8, expert_routing.quantized(torch, x)), wrong_fp8)
        return Exchange(combine if case == "combine" else routed, wrong_sums)

    def close(self):
        self.buffer = None


def set_up(ranks, options, most, only):
    """The contenders that could be set up, symmpool first, and by name the reasons why others could not."""
    pools = peers.Pools()
    others = [("all-to-all", AllToAll), ("all-gather", AllGather)]
    if ranks.on_cuda:
        others.append(("DeepEP", DeepEP))
    if unknown := [name for name in only or [] if name not in dict(others)]:
        raise SystemExit(f"--peers {unknown[0]}: there are {', '.join(dict(others))}")
    plans = {"ours": partial(Ours, ranks, options, most, pools)}
    plans |= {
        name: partial(kind, ranks, options, most) for name, kind in others if only is None or name in only
    }
    return *ranks.attempt_each(plans), pools


class Row(table.Row):
    """The results of one case, routing and number of tokens."""

    def __init__(self, case, routing, size, world):
        super().__init__(size, world)
        self.case, self.routing, self.tokens = case, routing.kind, routing.tokens

    def to_json(self):
        figures = self.figures(lambda name: {"gb_s": self.size / self.microseconds(name) / 1e3})
        return {
            "case": self.case,
            "routing": self.routing,
            "tokens": self.tokens,
            "heaviest_bytes": self.size,
            "figures": figures,
            "missing": self.missing,
        }


def prepare(ranks, options, contender, row, routing):
    """An exchange, checked, and its forms. Raises ValueError on every rank if that fails on any."""
    step = ranks.insist
    exchange = step(lambda: contender.exchange(row.case, routing))
    forms = timing.forms(ranks, exchange.call, row.size, options)
    graphs = [form.run for form in forms if form.name not in (timing.EAGER, timing.LOOP)]
    for run in [*graphs, exchange.call]:
        step(exchange.poison)
        step(run)
        wrong = sum(ranks.gather(step(exchange.wrong)))
        if wrong:
            raise ValueError(f"{wrong:,} wrong bytes, over all ranks")
    return exchange, forms


def measure(ranks, options, contenders, row, routing, step):
    running = rounds.prepare_all(contenders, row, lambda each: prepare(ranks, options, each, row, routing))

    def report_progress(what):
        step(f"{row.case}, {row.routing}, {row.tokens} tokens, {what}")

    rounds.measure(ranks, options, running, row, lambda exchange: None, report_progress)
    if options.eager:
        for name, (exchange, _) in running.items():
            ranks.meet()
            spent = timing.time_eager(exchange.call, timing.EAGER_CALLS, 5, ranks.synchronize)
            row.eager[name] = tuple(max(column) for column in zip(*ranks.gather(spent)))
    for name in rounds.confirm(ranks, contenders, running, row):
        row.eager.pop(name, None)


def cells(rows, ours, others):
    """The table's heading and lines."""
    names = [*ours, *others]
    heading = ["call", "routing", "tokens", *names, "GB/s", "best peer", "peer/ours"]
    lines = []
    for row in rows:
        _, own = row.best(ours)
        rival, theirs = row.best(others)
        speed = None if own is None else row.size / own / 1e3
        ratio = None if own is None or theirs is None else theirs / own
        times = [row.shown(name) for name in names]
        end = [table.figure(speed), rival or "-", table.figure(ratio)]
        lines.append([row.case, row.routing, str(row.tokens), *times, *end])
    return heading, lines


def with_defaults(options, on_cuda):
    """The options, with what the device suggests where nothing was given."""
    defaults = {"tokens": [1, 8, 128, 512, 4096], "hidden": 7168, "experts": 256, "top_k": 8}
    if not on_cuda:
        defaults = {"tokens": [1, 8, 64], "hidden": 512, "experts": 16, "top_k": 2}
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.top_k > options.experts:
        raise SystemExit(
            f"--top-k {options.top_k}: a token has different experts, and there are {options.experts}"
        )
    return options


def run(options, arguments):
    ranks = session.connect(options)
    options = with_defaults(options, ranks.on_cuda)
    only = session.requested_peers(options)
    contenders, missing, pools = set_up(ranks, options, max(options.tokens), only)
    todo = [
        (case, kind, tokens)
        for case in options.cases
        for kind in options.routing
        for tokens in options.tokens
    ]
    rows = []
    progress = session.Progress(len(todo) * (options.rounds + 1), ranks.rank == 0)
    try:
        for case, kind, tokens in todo:
            routing = expert_routing.make(
                ranks.torch, ranks, kind, tokens, options.hidden, options.experts, options.top_k
            )
            row_bytes = (
                options.hidden + options.hidden // 32 if case == "dispatch_fp8" else 2 * options.hidden
            )
            size = routing.sent() * row_bytes * (2 if case == "routed" else 1)
            row = Row(case, routing, max(size, 1), ranks.world)
            measure(ranks, options, contenders, row, routing, progress.step)
            rows.append(row)
    finally:
        progress.close()
    facts = session.describe("experts", ranks, arguments, contenders, missing)

    def print_report(ours, others):
        report(options, facts, rows, ours, others)

    return session.end(ranks, contenders, pools, rows, print_report)


def report(options, facts, rows, ours, others):
    made_for = f"hidden {options.hidden}, top-{options.top_k} of {options.experts} experts"
    print(f"experts, {made_for}, {session.where(facts)}")
    print(
        "microseconds per call, slowest rank, median of rounds; GB/s: the heaviest rank's bytes to or from "
        f"others{session.describe_forms(facts)}\n"
    )
    print(table.format_table(*cells(rows, ours, others)))
    if options.eager:
        print("\neager: microseconds of host time per call / until it is done\n")
        print(table.format_table(*table.eager_cells(rows, [*ours, *others])))
    session.print_missing(facts, rows, lambda row: f"for {row.case}, {row.routing}, {row.tokens} tokens")
    session.write(options, facts, rows)
    if options.plot:
        title = f"experts, {made_for}, {session.devices(facts)}"
        panels = plot.panels_by(rows, lambda row: f"{row.case}, {row.routing}")
        plot.save(options.plot, panels, ours, others, title, facts, axis="the heaviest rank's bytes")
