"""How calls of the backend are made that communicators serve: planned, made by a communicator, or refused."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from symmpool._symmpool import check_call
from symmpool.communicators import first_call
from symmpool.communicators.cache import looked_up
from symmpool.communicators.work import reason_of
from symmpool.errors import InvalidArgumentError, TimeoutError
from symmpool.torch_backend.counts import note
from symmpool.torch_backend.served_devices import NAME, number_of
from symmpool.torch_backend.work import TorchWork, joined

if TYPE_CHECKING:
    from collections.abc import Callable

    from symmpool.collectives.plans import Plan
    from symmpool.communicators.entry import CommunicatorEntry

__all__ = ["ServedCalls"]

_profiler_enabled = torch.autograd._profiler_enabled


class ServedCalls:
    """Methods by which a group makes its calls. It has `_served`, `_rank`, `_size` and `key` of its own, with
    the id of that (`_id`), and `_begun`, `_pass`, `_done` and `_keep`."""

    def _run(
        self: Any,
        operation: str,
        opts: Any,
        tensor: torch.Tensor,
        planner: Callable[..., Plan],
        *given: object,
        recorded: bool = False,
    ) -> dist.Work | None:
        """Makes a call of ours on a tensor's device, by what the planner makes of `given`. Returns its Work;
        None where the device is not served, which the first call finds out. `operation` is the call's name in
        torch.distributed, under which torch's profiler shows it, as "symmpool:all_reduce"."""
        if not recorded and _profiler_enabled():
            with torch.profiler.record_function(f"{NAME}:{operation}"):
                return self._run(operation, opts, tensor, planner, *given, recorded=True)
        try:
            call, arguments, prepare, results = planner(*given)
        except BaseException as why:
            if self._decline(tensor.device, why):
                raise
            return None
        try:
            # This repeats `cache.communicator_for`: a call less is felt by small calls.
            entry = looked_up[tensor.get_device()][self._id]
        except KeyError:
            entry = self._entry(tensor.device, call, None if prepare is not None else arguments)
            if entry is None:
                return None
        note(operation, NAME)
        function = getattr(entry.comm, call)
        if getattr(opts, "asyncOp", True):
            work = TorchWork(entry.begin(function, arguments, results, prepare))
            self._keep(work, results)
            return self._begun(work)
        if entry.pending is None and prepare is None:
            # This repeats `entry.run`.
            try:
                function(*arguments)
            except TimeoutError as error:
                entry.explain(error)
                raise
        else:
            entry.run(function, arguments, results, False, prepare)
        return self._done(results, tensor.device)

    def _run_one(
        self: Any,
        operation: str,
        tensors: list[torch.Tensor],
        opts: Any,
        planner: Callable[..., Plan],
        *given: object,
    ) -> dist.Work:
        """Makes a call on one tensor, which the planner is given first. Torch passes a list of it."""
        work = None
        if len(tensors) == 1 and self._moves(tensors[0]):
            work = self._run(operation, opts, tensors[0], planner, tensors[0], *given)
        return work if work is not None else self._pass(operation, operation, tensors, opts)

    def _run_each(self: Any, operation: str, opts: Any, calls: list[tuple[Any, ...]]) -> dist.Work | None:
        """Makes several calls, each given as a planner and its arguments, a tensor first. Returns one Work,
        or None as `_run` does. Where a plan is refused no call is made: the other ranks come to the first
        call, or begin all of them."""
        tensor = calls[0][1]
        try:
            made = [planner(*given) for planner, *given in calls]
            for call, arguments, prepare, _ in made:
                # A plan with a preparation has checked everything.
                if prepare is None:
                    check_call(number_of(tensor.device), self._rank, self._size, call, arguments)
        except BaseException as why:
            is_async = getattr(opts, "asyncOp", True)
            if self._decline(tensor.device, why, len(calls) if is_async else 1):
                raise
            return None
        works = [self._run(operation, opts, tensor, _as_it_is, plan) for plan in made[:1]]
        if works[0] is None:
            return None
        return joined(works + [self._run(operation, opts, tensor, _as_it_is, plan) for plan in made[1:]])

    def _entry(
        self: Any, device: torch.device, call: str, arguments: tuple[object, ...] | None
    ) -> CommunicatorEntry | None:
        """Returns the entry that serves a call on a device; None where a fallback backend does. Arguments,
        where they were not checked yet, are checked before a first call, which meets the other ranks."""
        if arguments is not None and not self._served.is_known(device) and self.may_serve(device):
            member = (self._rank, self._size)
            make = functools.partial(self._served.entry, self, device)
            first_call.check(self.key, number_of(device), member, (call, arguments), make)
        return self._served.entry(self, device)

    def _decline(self: Any, device: torch.device, why: BaseException, calls: int = 1) -> bool:
        """Reports to the other ranks that this one refuses a call on a device, or several that are begun
        together. Returns False where a fallback backend serves that device."""
        if not self._served.is_known(device) and self.may_serve(device):
            make = functools.partial(self._served.entry, self, device)
            first_call.report(self.key, why, make, calls)
            return True
        entry = self._served.entry(self, device)
        if entry is None:
            return False
        for _ in range(calls):
            entry.decline_call(reason_of(why))
        return True

    def _moves(self: Any, tensor: torch.Tensor) -> bool:
        """Whether ours takes calls on a tensor's device, as far as is known before the first one there. What
        is wrong with the call ours refuses, on every rank."""
        if not (tensor.is_cpu or tensor.is_cuda):
            if tensor.is_meta:
                self._refuse_meta(tensor)
            return False
        # Answers are kept by the device's number, as an object for the device costs as much as a call.
        served = self._served.known.get(tensor.get_device())
        return self.may_serve(tensor.device) if served is None else served

    def _refuse_meta(self: Any, tensor: torch.Tensor) -> None:
        """Refuses a tensor without memory, which torch's own backends take and leave as it is. The other
        ranks' tensors are where the group has calls."""
        why = InvalidArgumentError(
            f"symmpool: a tensor of shape {tuple(tensor.shape)} is on the meta device, without elements for "
            "the other ranks; pass one that has"
        )
        served = [number for number, is_served in list(self._served.known.items()) if is_served]
        if self._decline(torch.device("cpu" if not served or -1 in served else f"cuda:{served[0]}"), why):
            raise why

    def _reduces(self: Any, tensor: torch.Tensor) -> bool:
        """Whether ours makes an all-reduce. Those of sparse tensors are made by torch's other backends."""
        return tensor.layout is torch.strided and self._moves(tensor)


def _as_it_is(plan: Plan) -> Any:
    """A planner for what was planned."""
    return plan
