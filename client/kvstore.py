"""One small key-value interface over several stores: read, exists, list, write, watch; and the same under the names
`kvread`, `kvwrite`, `kvwatch`, which never raise.

Drivers: ``memory`` (this process), ``native`` (a KV group of logyard), ``etcd`` (any etcd v3 server, over its JSON
gateway: `kvstore_etcd`). A missing key is None, an empty value is b"". Writing None deletes. A watch goes on over lost
connections, from the revision after the last one it has seen; its callback runs in a thread of the watch's own.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, Literal, Protocol, TypeAlias

from logyard.protocol.errors import BadRequest, LogyardError
from logyard.protocol.kv import Compacted, prefix_end

from .sync import connect_sync

Key: TypeAlias = str | bytes
Callback: TypeAlias = Callable[[bytes, bytes | None], object]
"""Called with key and value; value None: the key was deleted."""
Seen: TypeAlias = "tuple[bytes, bytes | None] | None"
"""What a driver follows: a change, or None now and then, so that whoever listens can stop."""

log = logging.getLogger(__name__)

RETRY_S = 0.2
WAIT_S = 1.0
"""A thread that watches looks so often whether it shall stop."""
CLOSE_S = 10.0


class Driver(Protocol):
    """What a store has to do. Raises whatever its connection raises."""

    def read(self, key: bytes) -> bytes | None:
        """Return a value, None if the key is not there."""

    def list(self, prefix: bytes) -> list[bytes]:
        """Return the keys that begin with `prefix`, in order."""

    def write(self, key: bytes, value: bytes | None) -> None:
        """Set a key, or delete it."""

    def follow(self, key: bytes, prefix: bool, stop: threading.Event) -> Iterator[Seen]:
        """Yield changes from the call on (not from the first `next`), for ever, until `stop` is set."""

    def close(self) -> None:
        """Let go of connections."""


class Watch:
    """A watch and its thread; `close` ends it. `last_error`: what it had to get over last."""

    def __init__(self, changes: Iterator[Seen], callback: Callback, stop: threading.Event) -> None:
        self.last_error: BaseException | None = None
        self._changes = changes
        self._callback = callback
        self.stop = stop
        self._thread = threading.Thread(target=self._run, name="logyard watch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for seen in self._changes:
                if self.stop.is_set():
                    return
                if seen is not None:
                    try:
                        self._callback(*seen)
                    except Exception:
                        log.exception("the callback of a watch failed")
        except Exception as error:
            self.last_error = error
            log.warning("a watch ended: %s", error)

    @property
    def alive(self) -> bool:
        """It goes on."""
        return self._thread.is_alive() and not self.stop.is_set()

    def close(self) -> None:
        """End the watch: no callback begins after this, unless it is called from one."""
        self.stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_S)


class MemoryDriver:
    """A dictionary; stores that are given the same one share it."""

    def __init__(self, shared: dict[bytes, bytes] | None = None) -> None:
        self._values = {} if shared is None else shared
        self._lock = threading.Lock()
        self._watches: list[tuple[bytes, bool, queue.SimpleQueue[Seen]]] = []

    def read(self, key: bytes) -> bytes | None:
        """See `Driver`."""
        with self._lock:
            return self._values.get(key)

    def list(self, prefix: bytes) -> list[bytes]:
        """See `Driver`."""
        with self._lock:
            return sorted(key for key in self._values if key.startswith(prefix))

    def write(self, key: bytes, value: bytes | None) -> None:
        """See `Driver`."""
        with self._lock:
            if value is None:
                if self._values.pop(key, None) is None:
                    return
            else:
                self._values[key] = value
            for watched, prefix, changes in self._watches:
                if key == watched or (prefix and key.startswith(watched)):
                    changes.put((key, value))

    def follow(self, key: bytes, prefix: bool, stop: threading.Event) -> Iterator[Seen]:
        """See `Driver`."""
        changes: queue.SimpleQueue[Seen] = queue.SimpleQueue()
        entry = (key, prefix, changes)
        with self._lock:
            self._watches.append(entry)

        def walk() -> Iterator[Seen]:
            try:
                while not stop.is_set():
                    try:
                        yield changes.get(timeout=RETRY_S)
                    except queue.Empty:
                        yield None
            finally:
                with self._lock:
                    self._watches.remove(entry)

        return walk()

    def close(self) -> None:
        """Do nothing: there is nothing to let go of."""


class NativeDriver:
    """A KV group: `servers` ("host:port", ...), `group`; the rest as in `sync.connect_sync`."""

    def __init__(self, servers: list[str], group: str, **options: Any) -> None:
        self._yard = connect_sync(servers, **options)
        self._kv = self._yard.kv(group)

    def read(self, key: bytes) -> bytes | None:
        """See `Driver`."""
        found = self._kv.get(key)
        return None if found is None else found.value

    def list(self, prefix: bytes) -> list[bytes]:
        """See `Driver`."""
        return [one.key for one in self._kv.range(prefix, prefix=True, keys_only=True).kvs]

    def write(self, key: bytes, value: bytes | None) -> None:
        """See `Driver`."""
        if value is None:
            self._kv.delete(key)
        else:
            self._kv.put(key, value)

    def follow(self, key: bytes, prefix: bool, stop: threading.Event) -> Iterator[Seen]:
        """See `Driver`."""
        return self._walk(key, prefix, self._kv.status()["revision"] + 1, stop)

    def _walk(self, key: bytes, prefix: bool, following: int, stop: threading.Event) -> Iterator[Seen]:
        known: set[bytes] = set()
        behind = False
        while not stop.is_set():
            try:
                if behind:
                    # Away for too long: what changed of what there is now stands for what was missed.
                    found = self._kv.range(key, prefix=prefix)
                    since, following, behind = following, found.revision + 1, False
                    there = {one.key for one in found.kvs}
                    yield from ((gone, None) for gone in sorted(known - there))
                    yield from ((one.key, one.value) for one in found.kvs if one.mod_revision >= since)
                    known = there
                for changes in self._kv.watch(key, prefix=prefix, start=following, progress=True, wait=WAIT_S):
                    following = changes.revision + 1
                    for event in changes.events:
                        (known.discard if event.kv is None else known.add)(event.key)
                        yield event.key, None if event.kv is None else event.kv.value
                    yield None
            except Compacted:
                behind = True
            except LogyardError as error:
                if error.details.get("anew"):
                    # Nothing that was seen is of the group that there is.
                    behind, following = True, 0
                    continue
                if error.retry == "never":
                    raise
                yield None
                stop.wait(RETRY_S)

    def close(self) -> None:
        """See `Driver`."""
        self._yard.close()


class KVStore:
    """See the module. `last_error`: why the last `kv...` call returned False."""

    def __init__(self, driver: Driver | None = None) -> None:
        self.last_error: BaseException | None = None
        self._driver = driver
        self._watches: list[Watch] = []

    @property
    def driver(self) -> Driver:
        """The store behind it. Raises `BadRequest` before `kvconnect`."""
        if self._driver is None:
            raise BadRequest("not connected: call kvconnect first")
        return self._driver

    def read(self, key: Key) -> bytes | None:
        """Return a value, None if the key is not there."""
        return self.driver.read(bytes_of(key))

    def exists(self, key: Key) -> bool:
        """Return whether the key is there."""
        return self.read(key) is not None

    def list(self, prefix: Key = b"") -> list[bytes]:
        """Return the keys that begin with `prefix`, in order."""
        return self.driver.list(prefix.encode() if isinstance(prefix, str) else prefix)

    def write(self, key: Key, value: Key | None) -> None:
        """Set a key; None deletes it."""
        self.driver.write(bytes_of(key), value.encode() if isinstance(value, str) else value)

    def watch(self, key: Key, callback: Callback, *, prefix: bool = False) -> Watch:
        """Call back with every change from now on; `prefix`: of all keys that begin so."""
        stop = threading.Event()
        name = key.encode() if isinstance(key, str) else key
        changes = self.driver.follow(name if prefix else bytes_of(key), prefix, stop)
        watch = Watch(changes, callback, stop)
        self._watches.append(watch)
        return watch

    def close(self) -> None:
        """End watches and connections."""
        watches, self._watches = self._watches, []
        for watch in watches:
            watch.stop.set()
        for watch in watches:
            watch.close()
        if self._driver is not None:
            self._driver.close()

    # The same, without exceptions.

    def kvconnect(self, driver: str, **options: Any) -> bool:
        """Connect: ``memory``, ``native`` (servers, group), ``etcd`` (url). False: see `last_error`."""
        return self._try(lambda: self._connect(driver, options)) is not False

    def _connect(self, driver: str, options: dict[str, Any]) -> None:
        if driver == "memory":
            self._driver = MemoryDriver(**options)
        elif driver == "native":
            self._driver = NativeDriver(**options)
        elif driver == "etcd":
            from .kvstore_etcd import EtcdDriver

            self._driver = EtcdDriver(**options)
        else:
            raise BadRequest(f"no driver {driver!r}; there are: memory, native, etcd")

    def kvread(self, key: Key, callback: Callback | None = None) -> bytes | Literal[False] | None:
        """Return the value, None if the key is not there, False on failure; `callback` is called with it before."""
        value: bytes | Literal[False] | None = self._try(lambda: self.read(key))
        if value is not False and callback is not None:
            callback(bytes_of(key), value)
        return value

    def kvwrite(self, key: Key, value: Key | None, callback: Callback | None = None) -> bool:
        """Return whether it was written; `callback` is called before."""
        if self._try(lambda: self.write(key, value)) is False:
            return False
        if callback is not None:
            callback(bytes_of(key), value.encode() if isinstance(value, str) else value)
        return True

    def kvwatch(self, key: Key, callback: Callback, *, prefix: bool = False) -> Watch | Literal[False]:
        """Return the watch, False on failure."""
        found: Watch | Literal[False] = self._try(lambda: self.watch(key, callback, prefix=prefix))
        return found

    def _try(self, work: Callable[[], Any]) -> Any:
        try:
            found = work()
        except Exception as error:
            self.last_error = error
            return False
        self.last_error = None
        return found


def bytes_of(key: Key) -> bytes:
    """Return a key's bytes; raise `BadRequest` for an empty one."""
    if not key:
        raise BadRequest("a key is not empty")
    return key.encode() if isinstance(key, str) else key


__all__ = ["KVStore", "MemoryDriver", "NativeDriver", "Watch", "prefix_end"]
