"""On which devices a group's collectives are ours, which all ranks agree on at the first call on each."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

import torch

from symmpool.communicators import cache, forks
from symmpool.communicators.entry import explainer
from symmpool.errors import Error, TimeoutError, UnsupportedError
from symmpool.groups import agreement, declined_calls, process_groups, resolution
from symmpool.torch_backend import subgroups

if TYPE_CHECKING:
    from symmpool.communicators.entry import CommunicatorEntry
    from symmpool.torch_backend.group_state import GroupState
    from symmpool.torch_backend.p2p import PointToPoint

__all__ = ["NAME", "ServedDevices", "number_of"]

logger = logging.getLogger("symmpool.backend")

NAME = "symmpool"

# The variable by which a program wants calls of GPUs on several hosts to be ours, at 1 on all ranks.
OVER_HOSTS = "SYMMPOOL_BACKEND_OVER_HOSTS"

# How far apart ranks may be that began to wait at one time, in seconds, when they have waited.
_LATENESS = 2.0


def number_of(device: torch.device) -> int:
    """Returns the number of a device, like `symmpool.communicators.devices.number_of`, which takes a device's
    name."""
    if device.type == "cpu":
        return -1
    return torch.cuda.current_device() if device.index is None else device.index


class ServedDevices:
    """Whether communicators of ours serve a group, by device. Methods take the group of ours, which this does
    not keep: a group that the program lets go of is to go at once, with its store."""

    def __init__(self, seconds: float, p2p: PointToPoint):
        """`seconds` is the group's timeout; `p2p` takes the communicator on CUDA once there is one."""
        self._p2p = p2p
        self.seconds = seconds
        # Whether calls are ours, by the device's number; unknown before the first call, and at the end.
        self.known: dict[int, bool] = {}
        self.ended = False
        # Whether this is a copy in a forked child.
        self.is_lost = False
        forks.renew_in_children(self)

    def forked(self) -> None:
        """In a forked child, whose calls would be made in its parent's name."""
        self.is_lost = True
        self.known.clear()

    def end(self) -> None:
        """From now on calls are refused."""
        self.ended = True
        self.known.clear()

    def raise_at_end(self, group: GroupState) -> None:
        """Raises InvalidStateError once the group has ended, and in a forked child."""
        if self.is_lost:
            raise forks.error("a process group")
        if self.ended:
            raise resolution.ended(group.key)

    def may_serve(self, group: GroupState, device: torch.device) -> bool:
        """Whether `serves` may be True, as far as is known here. Talks to nobody."""
        known = self.known.get(number_of(device))
        return not self.ended and _is_named(group, device.type) if known is None else known

    def is_named(self, group: GroupState, device: torch.device) -> bool:
        """Whether the program named ours for such devices, which is the same on all ranks at any time."""
        return _is_named(group, device.type)

    def serves(self, group: GroupState, device: torch.device) -> bool:
        """Whether every rank has a communicator of ours there. The first call is collective."""
        number = number_of(device)
        found = self.known.get(number)
        if found is None:
            self.raise_at_end(group)
            # A thread may still meet the ranks, to report a call that this one has refused.
            declined_calls.await_reports(group.key)
            found = self.known.get(number)
        if found is None:
            found = _is_named(group, device.type) and self._agree(group, number)
            self.known[number] = found
        return found

    def is_known(self, device: torch.device) -> bool:
        """Whether the ranks have agreed on the device, or the group has ended."""
        return self.ended or self.is_lost or number_of(device) in self.known

    def entry(self, group: GroupState, device: torch.device) -> CommunicatorEntry | None:
        """Returns the entry that serves calls on a device; None where ours does not. The first call is
        collective."""
        return cache.look_up(None, group.key, number_of(device)) if self.serves(group, device) else None

    def _agree(self, group: GroupState, number: int) -> bool:
        name = "cpu" if number < 0 else f"cuda:{number}"
        # Without the device's number: ranks use different ones.
        kind = "cpu" if number < 0 else "cuda"
        first = f"the first call on {kind}"
        # Every rank comes here first, also one that cannot make a communicator: a rank that is missing now is
        # absent, and nobody waits for it again. On the CPU the ranks meet for the pool at once, and look who
        # came here if that takes too long: a round trip to the store is much of what a first call takes.
        here = f"backend/{kind}/here"
        if kind == "cpu" and subgroups.make(group, here, self.seconds, first):
            return True
        announced = agreement.announce(group.key, here) if kind == "cpu" else None
        if announced is None:
            agreement.agree(group.key, here, None, self.seconds, first)
        why, left, spans = None, self.seconds + _LATENESS, False
        try:
            if kind == "cuda":
                spans = len(cache.hosts_of(group.key, number)) > 1
                if spans:
                    refusals = agreement.agree(group.key, "backend/hosts", _why_not(), left, first)
                    if refusals:
                        raise UnsupportedError(agreement.reasons(refusals))
            made = cache.communicator(group.key, name)
            if kind == "cpu":
                # All ranks have one: they agree without round trips to the store. One that has failed since
                # lets go of its pool, which ends the barrier.
                made.barrier()
                return True
        except TimeoutError as error:
            # The ranks that were waited for have given their reason before, or never will; the other ranks
            # have waited as long as this one.
            why, left = str(error), _LATENESS
            if announced is not None:
                try:
                    agreement.check_all_came(group.key, announced, self.seconds, first)
                except TimeoutError:
                    # This rank meets the ranks that have not been here yet in its next call.
                    group.begin_anew()
                    raise
                # They may have come when this rank had waited already.
                left += self.seconds
        except Error as error:
            why = str(error)
        # A rank that has no communicator is here up to a whole timeout before those that wait for it in vain.
        refusals = agreement.agree(group.key, f"backend/{kind}", why, left, first)
        if refusals and group.rank() == 0:
            served, why = process_groups.description_of(group.key), agreement.reasons(refusals)
            logger.warning("another backend serves collectives of %s on %s: %s", served, name, why)
        # Messages over hosts stay the fallback's.
        if kind == "cuda" and not refusals and not spans:
            self._choose_channels(group, number, first)
        return not refusals

    def _choose_channels(self, group: GroupState, number: int, first: str) -> None:
        """All ranks have a communicator, which carries point-to-point calls from now on, but on channels that
        one of the ranks has begun to use before."""
        entry = cache.look_up(None, group.key, number)
        assert entry is not None

        def exchange(here: str) -> list[str]:
            answers = agreement.agree(group.key, "backend/channels", here or None, self.seconds, first)
            return list(answers.values())

        self._p2p.use_communicator(exchange, entry.comm, number, explainer(entry))


def _why_not() -> str | None:
    """Why calls of ranks on several hosts are not ours, unless the program wants them to be."""
    if os.environ.get(OVER_HOSTS) == "1":
        return None
    return (
        f"symmpool: the ranks are on several hosts, and {OVER_HOSTS}=1 is not set: calls on GPUs over hosts "
        "cannot be captured in CUDA graphs yet (docs/hosts.md)"
    )


def _is_named(group: GroupState, kind: str) -> bool:
    """Whether `init_process_group` named ours for such devices: it may name several backends."""
    return process_groups.backends_of(group.key).get(kind, NAME) == NAME
