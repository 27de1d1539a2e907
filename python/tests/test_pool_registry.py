"""Which pools there are on a group, where threads make and drop pools meanwhile."""

import sys
import threading

from symmpool.groups import pool_registry


class Pool:
    device = "cpu"

    def holds(self, tensor):
        return False


def test_pools_are_looked_for_while_other_threads_make_and_drop_them():
    over, wrong, before = threading.Event(), [], sys.getswitchinterval()
    kept = [Pool() for _ in range(300)]
    for each in kept:
        pool_registry.register(each, (object(), 0, 1))

    def make():
        while not over.is_set():
            made = [Pool() for _ in range(20)]
            for each in made:
                pool_registry.register(each, (object(), 0, 1))

    threads = [threading.Thread(target=make) for _ in range(3)]
    for thread in threads:
        thread.start()
    mine = Pool()
    pool_registry.register(mine, (object(), 0, 1))
    # Threads take turns in the middle of everything.
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(400):
            pool_registry.all_pools()
            pool_registry.place_of(mine)
            if pool_registry.key_holding(mine) is not mine:
                wrong.append("not found")
    except RuntimeError as error:
        wrong.append(repr(error))
    finally:
        sys.setswitchinterval(before)
        over.set()
        for thread in threads:
            thread.join()
    assert not wrong


def test_what_cannot_be_a_key_has_no_pools():
    assert pool_registry.pools_of(5) == [] and pool_registry.pools_of([]) == []
