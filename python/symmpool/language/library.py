"""Programs to begin with: each is right for any number of ranks, unless it says otherwise, and short
enough to read.

    from symmpool.language import library

    comm.register(library.ring_all_reduce.compile(comm.world))

They show the usual algorithms, and which synchronisation each needs. Rabenseifner's halving and doubling,
and the others, are described in Thakur, Rabenseifner, Gropp: Optimization of Collective Communication
Operations in MPICH (2005).
"""

from symmpool.errors import InvalidArgumentError
from symmpool.language.program import Program, algorithm
from symmpool.language.rank import Chunks, Rank, Scratch


def _wait_all(me: Rank) -> None:
    for peer in me.peers():
        me.wait(peer)


def _of_all(me: Rank, own: Chunks, inbox: Scratch) -> list[Chunks]:
    """A chunk of each rank, in rank order: this rank's own, and what peers have put into the inbox."""
    return [own if rank == me.rank else inbox[rank] for rank in range(me.world)]


def _reduce_directly(me: Rank, result: Chunks) -> None:
    """Every rank puts to each peer that peer's chunk, and reduces its own."""
    inbox = me.scratch(me.world)
    for peer in me.peers():
        me.put(peer.at(inbox)[me.rank], me.input[peer.rank])
        me.signal(peer)
    _wait_all(me)
    me.reduce(result, _of_all(me, me.input[me.rank], inbox))


def _reduce_by_reads(me: Rank, result: Chunks) -> None:
    """Every rank reduces its own chunk of all inputs where they lie."""
    inputs = {peer.rank: peer.input for peer in me.peers()} | {me.rank: me.input}
    me.reduce(result, [inputs[rank][me.rank] for rank in range(me.world)])


def _reduce_around_ring(me: Rank, result: Chunks) -> None:
    """Partial sums go round the ring; the sum of this rank's chunk ends here."""
    last, n = me.world - 1, me.world
    partial, inbox = me.scratch(n), me.scratch(n)
    if n == 1:
        me.copy(result, me.input[0])
        return
    right, left = me.peer((me.rank + 1) % n), me.peer((me.rank - 1) % n)
    for step in range(last):
        chunk, got = (me.rank - step - 1) % n, (me.rank - step - 2) % n
        me.put(right.at(inbox)[chunk], partial[chunk] if step else me.input[chunk])
        me.signal(right)
        me.wait(left)
        me.reduce(result if got == me.rank else partial[got], [inbox[got], me.input[got]])


def _gather_around_ring(me: Rank) -> None:
    """Each rank's chunk of its output goes round the ring."""
    for step in range(me.world - 1):
        right, left = me.peer((me.rank + 1) % me.world), me.peer((me.rank - 1) % me.world)
        chunk = (me.rank - step) % me.world
        me.put(right.output[chunk], me.output[chunk])
        me.signal(right)
        me.wait(left)


@algorithm("all_reduce")
def one_shot_all_reduce(me: Rank) -> None:
    """Every rank puts its input to all, and reduces what it got: one step, and the least latency."""
    inbox = me.scratch(me.world)
    for peer in me.peers():
        me.put(peer.at(inbox)[me.rank], me.input[0])
        me.signal(peer)
    _wait_all(me)
    me.reduce(me.output[0], _of_all(me, me.input[0], inbox))


@algorithm("all_reduce", chunks="world")
def two_shot_all_reduce(me: Rank) -> None:
    """Every rank reduces one chunk and puts the result to all: two steps, and the least traffic."""
    _reduce_directly(me, me.output[me.rank])
    for peer in me.peers():
        me.put(peer.output[me.rank], me.output[me.rank])
        me.signal(peer)
    _wait_all(me)


@algorithm("all_reduce", chunks="world")
def two_shot_ll_all_reduce(me: Rank) -> None:
    """Reduces in two shots through scratch alone, so that it can be compiled with protocol="ll"."""
    results = me.scratch(me.world)
    _reduce_directly(me, me.output[me.rank])
    for peer in me.peers():
        me.put(peer.at(results)[me.rank], me.output[me.rank])
        me.signal(peer)
    for peer in me.peers():
        me.wait(peer)
        me.copy(me.output[peer.rank], results[peer.rank])


@algorithm("all_reduce", chunks="world")
def two_shot_pull_all_reduce(me: Rank) -> None:
    """Every rank reduces one chunk of all inputs where they lie: windows, and no scratch."""
    me.barrier()
    _reduce_by_reads(me, me.output[me.rank])
    for peer in me.peers():
        me.put(peer.output[me.rank], me.output[me.rank])
    me.barrier()


@algorithm("all_reduce", chunks="world")
def ring_all_reduce(me: Rank) -> None:
    """Partial sums go round the ring, then results do: for ranks that are linked to their neighbours
    alone."""
    _reduce_around_ring(me, me.output[me.rank])
    _gather_around_ring(me)


@algorithm("all_reduce", chunks="world")
def halving_doubling_all_reduce(me: Rank) -> None:
    """Recursive halving, then doubling (Rabenseifner): log2(world) steps each. For powers of two."""
    if me.world & (me.world - 1):
        raise InvalidArgumentError(
            f"halving_doubling_all_reduce among {me.world} ranks: a power of two is needed"
        )
    inbox, sums = me.scratch(me.world), me.scratch(me.world)
    first, count, have = 0, me.world, me.input
    while count > 1:
        count //= 2
        peer = me.peer(me.rank ^ count)
        keep = first + count if me.rank & count else first
        give = first if me.rank & count else first + count
        # A step's halves are twice as long as the next one's, so each step has a place of its own in the
        # inbox.
        me.put(peer.at(inbox)[count : 2 * count], have[give : give + count])
        me.signal(peer)
        me.wait(peer)
        pair = [have[keep : keep + count], inbox[count : 2 * count]]
        me.reduce(
            (sums if count > 1 else me.output)[keep : keep + count],
            pair if me.rank & count == 0 else pair[::-1],
        )
        first, have = keep, sums
    if me.world == 1:
        me.copy(me.output[0], me.input[0])
    while count < me.world:
        peer = me.peer(me.rank ^ count)
        me.put(peer.output[first : first + count], me.output[first : first + count])
        me.signal(peer)
        me.wait(peer)
        first, count = first & ~count, 2 * count


@algorithm("all_reduce", chunks="world")
def hierarchical_all_reduce(me: Rank) -> None:
    """Two groups of neighbours: reduce-scatter in each, a sum across, all-gather in each. For even
    numbers of ranks."""
    if me.world % 2:
        raise InvalidArgumentError(
            f"hierarchical_all_reduce among {me.world} ranks: an even number is needed"
        )
    size = me.world // 2
    base, place = me.rank // size * size, me.rank % size
    near = [me.peer(base + rank) for rank in range(size) if rank != place]
    across = me.peer((me.rank + size) % me.world)
    inbox, half, other = me.scratch(2 * size), me.scratch(2), me.scratch(2)
    mine = slice(2 * place, 2 * place + 2)
    for peer in near:
        to = 2 * (peer.rank - base)
        me.put(peer.at(inbox)[mine], me.input[to : to + 2])
        me.signal(peer)
    for peer in near:
        me.wait(peer)
    me.reduce(half[0:2], [(me.input[mine] if r == place else inbox[2 * r : 2 * r + 2]) for r in range(size)])
    me.put(across.at(other)[0:2], half[0:2])
    me.signal(across)
    me.wait(across)
    me.reduce(me.output[mine], [half[0:2], other[0:2]] if base == 0 else [other[0:2], half[0:2]])
    for peer in near:
        me.put(peer.output[mine], me.output[mine])
        me.signal(peer)
    for peer in near:
        me.wait(peer)


@algorithm("all_gather")
def direct_all_gather(me: Rank) -> None:
    """Every rank puts its input to all. The barrier says that outputs may be written to."""
    me.barrier()
    me.copy(me.output[me.rank], me.input[0])  # on devices at the same time as the first put
    for peer in me.peers():
        me.put(peer.output[me.rank], me.input[0])
        me.signal(peer)
    _wait_all(me)


@algorithm("all_gather")
def ring_all_gather(me: Rank) -> None:
    """Inputs go round the ring."""
    me.barrier()
    me.copy(me.output[me.rank], me.input[0])
    _gather_around_ring(me)


@algorithm("reduce_scatter")
def direct_reduce_scatter(me: Rank) -> None:
    """Every rank puts to each peer that peer's chunk."""
    _reduce_directly(me, me.output[0])


@algorithm("reduce_scatter")
def pull_reduce_scatter(me: Rank) -> None:
    """Every rank reduces its chunk of all inputs where they lie: windows, and no scratch."""
    me.barrier()
    _reduce_by_reads(me, me.output[0])
    me.barrier()


@algorithm("reduce_scatter")
def ring_reduce_scatter(me: Rank) -> None:
    """Partial sums go round the ring."""
    _reduce_around_ring(me, me.output[0])


@algorithm("broadcast")
def flat_broadcast(me: Rank) -> None:
    """The root puts its input to all."""
    if me.rank == 0:
        me.copy(me.output[0], me.input[0])
        for peer in me.peers():
            me.wait(peer)
            me.put(peer.output[0], me.input[0])
            me.signal(peer)
    else:
        # It has entered the call: the root may write to its output.
        me.signal(me.peer(0))
        me.wait(me.peer(0))


@algorithm("broadcast")
def binomial_broadcast(me: Rank) -> None:
    """Each rank that has the data puts it to one that has not, so that they double at each step."""
    me.barrier()
    if me.rank == 0:
        me.copy(me.output[0], me.input[0])
    distance = 1
    while distance < me.world:
        if me.rank < distance and me.rank + distance < me.world:
            peer = me.peer(me.rank + distance)
            me.put(peer.output[0], me.output[0])
            me.signal(peer)
        elif distance <= me.rank < 2 * distance:
            me.wait(me.peer(me.rank - distance))
        distance *= 2


@algorithm("all_to_all")
def direct_all_to_all(me: Rank) -> None:
    """Every rank puts to each peer what is for it."""
    me.barrier()
    me.copy(me.output[me.rank], me.input[me.rank])
    for peer in me.peers():
        me.put(peer.output[me.rank], me.input[peer.rank])
        me.signal(peer)
    _wait_all(me)


@algorithm("all_to_all")
def rotated_all_to_all(me: Rank) -> None:
    """In each step every rank puts to one peer and waits for one, so that no peer has two senders at once."""
    me.barrier()
    me.copy(me.output[me.rank], me.input[me.rank])
    for distance in range(1, me.world):
        to, of = me.peer((me.rank + distance) % me.world), me.peer((me.rank - distance) % me.world)
        me.put(to.output[me.rank], me.input[to.rank])
        me.signal(to)
        me.wait(of)


#: All of them, by name.
ALL: dict[str, Program] = {each.name: each for each in list(globals().values()) if isinstance(each, Program)}
#: Those that can be compiled with protocol="ll".
LL: tuple[str, ...] = (
    "one_shot_all_reduce",
    "two_shot_ll_all_reduce",
    "direct_reduce_scatter",
)
