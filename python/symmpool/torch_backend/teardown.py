"""Waits of ranks where a default group ends, so that another can come to its place.

A default group's store is served by rank 0's process and ends with the group there. A rank that left
before, and began the next group at once, would find the server of the last one, and lose it in the middle
of what it does. So the others do not leave before that server has. They see so by their connections to it,
which the store has anyway.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket

from symmpool.groups.store import tcp_below

# How long a server is waited for, in seconds: it may be none of rank 0's, and one that stays.
# Rank 0 first ends what it has itself, which takes NCCL parts of a second.
LONGEST_WAIT = 2.0


def await_server(store: object) -> None:
    """Waits until the server of a store is gone, if it is one that goes."""
    server = tcp_below(store)
    # A launcher's server outlives its ranks' groups.
    if server is None or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return
    with contextlib.ExitStack() as stack:
        gone = select.poll()
        links = _links_to(server.port)
        for link in links:
            gone.register(stack.enter_context(link), select.POLLRDHUP)
        # Those to a server that went before are of groups that the program still holds.
        dead = gone.poll(0)
        for descriptor, _ in dead:
            gone.unregister(descriptor)
        if len(dead) < len(links):
            gone.poll(LONGEST_WAIT * 1000)


def _links_to(port: int) -> list[socket.socket]:
    """This process's connections to a server's port, each once more."""
    links = []
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    continue
                link = socket.socket(fileno=os.dup(int(name)))
                if link.family in (socket.AF_INET, socket.AF_INET6) and link.type == socket.SOCK_STREAM:
                    with contextlib.suppress(OSError):
                        if link.getpeername()[1] == port:
                            links.append(link)
                            continue
                link.close()
    return links
