"""Ctrl-C at every place of a function where Python handles one."""

import dis
import gc
import sys

# Instructions behind which Python looks whether a signal has come.
LOOKS = ("CALL", "RESUME", "JUMP_BACKWARD", "JUMP_ABSOLUTE")


class _Interrupter:
    """Raises KeyboardInterrupt in the code of some modules, at the place of a number."""

    def __init__(self, modules, place):
        self.modules, self.left, self.raised = modules, place, None
        # Whether the instruction before the next one is of these modules, by frame.
        self.looks = {}
        self.at = {}

    def __call__(self, frame, event, _):
        if frame.f_globals.get("__name__") not in self.modules or self.raised is not None:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            if self.looks.get(frame):
                if self.left == 0:
                    self.raised = f"{frame.f_code.co_qualname}, line {frame.f_lineno}"
                    raise KeyboardInterrupt
                self.left -= 1
            self.looks[frame] = self._names(frame.f_code)[frame.f_lasti].startswith(LOOKS)
        return self

    def _names(self, code):
        if code not in self.at:
            self.at[code] = {each.offset: each.opname for each in dis.get_instructions(code)}
        return self.at[code]


def interrupted_everywhere(prepare, act, modules):
    """Calls `act(prepare())` again and again, with Ctrl-C at the first place, the second, and so on, in this
    thread. Gives what was prepared, what was returned (None where Ctrl-C came), and the place. It ends where
    the function does without one."""
    place = 0
    while True:
        given, found = prepare(), None
        interrupter = _Interrupter(modules, place)
        # A collection ends objects of earlier rounds, whose finalizers would get the exception.
        gc.collect()
        gc.disable()
        sys.settrace(interrupter)
        try:
            found = act(given)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
            gc.enable()
        yield given, found, interrupter.raised
        if interrupter.raised is None:
            return
        place += 1
