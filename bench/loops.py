"""A load process from its specification to its exit code, under the library that the specification names.

Invariant: what loads is the same code under each library (`client.runtime`), and ends with the process that started it,
also when that is killed. Used by the load processes.
"""

from __future__ import annotations

import gc
import os
import select
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

S = TypeVar("S")
RUNTIMES = ("trio", "asyncio")


def end_with_parent() -> None:
    """End this process when nobody has the writing end of its standard input any more: whoever started it is gone."""
    ends = select.poll()
    ends.register(sys.stdin, 0)

    def wait_for_end() -> None:
        ends.poll()
        os._exit(1)

    threading.Thread(target=wait_for_end, name="logyard-parent", daemon=True).start()


def run_process(work: Callable[[S], Coroutine[Any, Any, None]], spec: S, runtime: str, name: str) -> None:
    """Run `work` to its end; an error ends the process with one line on standard error, which begins with `name`."""
    # Nothing of the load forms cycles; a collection in the middle would be measured as the cluster's latency.
    gc.freeze()
    gc.disable()
    sys.setswitchinterval(5e-5)
    end_with_parent()
    try:
        if runtime == "asyncio":
            import asyncio

            asyncio.run(work(spec))
        else:
            import trio

            trio.run(work, spec)
    except BaseException as error:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if os.environ.get("LOGYARD_DEBUG"):
            raise
        print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
        raise SystemExit(1) from None
