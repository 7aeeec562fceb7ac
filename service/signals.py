"""Which signals stop a command, and the wait for one. Used by `cli.root` and `etcd.launcher`; a node has its own rules
(`daemon`).
"""

from __future__ import annotations

import queue
import signal


def stop_signals() -> list[signal.Signals]:
    """Return the signals that stop a command: also a terminal's that goes away, but under nohup."""
    more = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGTERM, signal.SIGINT, *more]


class StopSignal:
    """Wait on the main thread for one of these signals. Not a `threading.Event`: a handler that finds the main thread
    inside the event's lock waits for itself for ever, and `SimpleQueue.put` may be entered again.
    """

    def __init__(self, *numbers: signal.Signals) -> None:
        self._came: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in numbers:
            signal.signal(number, lambda number, _: self._came.put(number))

    def wait(self, timeout_s: float) -> bool:
        """Return True as soon as one came, False after `timeout_s`."""
        try:
            self._came.get(timeout=timeout_s)
        except queue.Empty:
            return False
        return True
