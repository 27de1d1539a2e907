"""Meeting through the store that rank 0 serves: anew, and interrupted."""

import os
import signal
import threading
import time

import numpy as np
import pytest
from ranks import run, values
from test_errors import free_port

import symmpool


def made_anew(group, port, rounds):
    os.environ.update(
        RANK=str(group.rank), WORLD_SIZE=str(group.world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    for number in range(rounds):
        own = symmpool.Group.from_env(timeout=20)
        pool = symmpool.Pool(own, "cpu")
        x = np.full(4, group.rank + number, np.float32)
        symmpool.Communicator(pool).all_reduce(x)
        assert x.tolist() == [3 + 3 * number] * 4
        if group.rank == 0 and number % 3 == 0:
            # The others are faster, and come to the store of this round again.
            time.sleep(0.02)
        del own, pool
    return True


def test_groups_of_the_environment_are_made_anew_at_once():
    assert values(3, made_anew, free_port(), 40) == [True] * 3


def interrupted(make):
    """Returns the cause of the error that Ctrl-C raises in the middle of a call, and whether it came soon."""
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt) as raised:
        make()
    cause = raised.value.__cause__
    return type(cause).__name__, str(cause), time.monotonic() - started < 5


def interrupted_at_the_store(group, port):
    return interrupted(lambda: symmpool.Group(1, 2, f"127.0.0.1:{port}", timeout=300))


def test_ctrl_c_raises_while_there_is_no_store():
    ((name, text, soon),) = values(1, interrupted_at_the_store, free_port())
    assert (name, soon) == ("InvalidStateError", True)
    assert "no answer from rank 0" in text and "connecting to the store" in text


def interrupted_in_the_store(group, port):
    own = symmpool.Group(0, 3, f"127.0.0.1:{port}", timeout=300)
    return interrupted(lambda: symmpool.Pool(own, "cpu"))


def test_ctrl_c_raises_while_ranks_are_missing_and_they_are_named():
    ((name, text, soon),) = values(1, interrupted_in_the_store, free_port())
    assert (name, soon) == ("InvalidStateError", True)
    assert "no answer from ranks 1, 2" in text


def interrupted_in_a_directory(group):
    return interrupted(lambda: symmpool.Pool(group, "cpu", timeout=300)) if group.rank == 0 else None


def test_ctrl_c_raises_while_ranks_are_missing_in_a_directory():
    outcomes = run(2, interrupted_in_a_directory)
    name, text, soon = outcomes[0].value
    assert (name, soon) == ("InvalidStateError", True)
    assert "no answer from rank 1" in text
