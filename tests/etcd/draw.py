"""Requests drawn from a seed: good ones with every option, bad ones of every kind; each is text, as a client sends it.

Not drawn, because it panics a real etcd: `sort_target` and `alarm.action` beyond their names. Not drawn, because etcd
answers by chance: two fields of one oneof where one is null, a lease that may end meanwhile. `NOT_DRAWN` has the rest,
which docs/guides/etcd.md lists as differences.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

NOT_DRAWN = (
    "sort_target and alarm.action beyond their names: they panic a real etcd",
    "keys above 16 KiB; large values compared for order",
    "more than 8 transactions in one another",
    "a key put in one nested transaction and deleted in a later one; a range without end deleted beside a put",
    "a compaction to revision 0 or 1 before the first one; a watch from exactly the compacted revision",
    "a filter of a watch below zero: etcd fails to pass it on (code 13), here it is none",
    "a lease or a lock that ends by its time",
    "more than six keys in an order in which some are equal",
    "leases with numbers below zero; a read in a transaction as of the newest revision, or a negative one",
    "maintenance, cluster, users and roles but for a few refusals",
)

KEYS = (b"a", b"b", b"c", b"a/1", b"a/2", b"ab", b"\0", b"\xff", b"\xff\xff", b"a b", bytes(range(250, 256)))
KEYS_MAX = 6
ENDS = (b"\0", b"b", b"c", b"a0", b"a/", b"\xff", b"a", b"\0\0")
VALUES = (b"", b"1", b"2", b"one", b"\xff" * 40, b"v" * 1023, b"v" * 1024, b"w" * 1100, b"x" * 70_000)
TARGETS = ("KEY", "VERSION", "CREATE", "MOD", "VALUE")
ORDERS = ("NONE", "ASCEND", "DESCEND")
COMPARED = (("VERSION", "version"), ("CREATE", "create_revision"), ("MOD", "mod_revision"), ("VALUE", "value"),
            ("LEASE", "lease"))  # fmt: skip
RESULTS = ("EQUAL", "GREATER", "LESS", "NOT_EQUAL")
LEASE_IDS = (7, 8, 77, 1 << 40, (1 << 62) + 5)
TTLS = (600, 1000, 3600)


class Raw(str):
    """JSON as it stands."""


class Step(NamedTuple):
    """One request. `stream`: its answer goes on, and `watches` of them are to be told of what follows."""

    path: str
    body: bytes
    stream: bool = False
    method: str = "POST"


def text(value: Any) -> str:
    """JSON; `Raw` as it stands, in whatever order."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        return "{" + ",".join([f"{json.dumps(key)}:{text(one)}" for key, one in value.items()]) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(text, value)) + "]"
    return json.dumps(value)


class World:
    """What requests refer to: the revision there is, what was compacted, leases, keys that a lock may use."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.revision = 1
        self.compacted = 0
        self.leases: list[int] = []
        self.aliases = 0
        self.watch_from = 2
        # A sort of a few rows keeps those that are equal in order, also etcd's.
        self.keys = self.random.sample(KEYS, KEYS_MAX)

    # Pieces

    def chance(self, of: float) -> bool:
        return self.random.random() < of

    def bytes_(self, data: bytes) -> Any:
        """Base64, in one of the forms that encoders make; seldom none."""
        plain = b64encode(data).decode()
        random = self.random.random()
        if random < 0.9 or not plain:
            return plain
        if random < 0.93:
            at = self.random.randrange(len(plain) + 1)
            return plain[:at] + self.random.choice(("\n", "\r\n", "\n\n")) + plain[at:]
        if random < 0.95 and len(data) < 100:
            return list(data)
        if random < 0.96 and plain.endswith("=="):
            return plain[:-3] + chr(ord(plain[-3]) + 1) + "==" if plain[-3] in "AQgw" else plain
        bad: list[Any] = [
            plain[:-1], plain + "=", plain.replace("=", ""), "_-==", "Y Q==", 97, True, {}, [256], [-1], ["a"], [1.5],
            "=", "YQ==YQ==", "é", Raw('"\\ud800"'), [None],
        ]  # fmt: skip
        return self.random.choice(bad)

    def number(self, value: int) -> Any:
        """A 64-bit number, in one of its forms; seldom none."""
        random = self.random.random()
        if random < 0.6:
            return str(value)
        if random < 0.93:
            return value
        if random < 0.95:
            return self.random.choice((f" {value}", f"{value} ", f"  {value} "))
        bad: list[Any] = [
            f"+{value}", "", " ", "x", f"{value}.0", f"0{value}", "1_0", "null", "0x1", Raw(f"{value}.0"), Raw("1e2"),
            1 << 63, str(1 << 63), -(1 << 63) - 1, True, [], {}, None, "\u0661", Raw("-0"), "-0", Raw("NaN"), "--1",
        ]  # fmt: skip
        return self.random.choice(bad)

    def flag(self) -> Any:
        random = self.random.random()
        return True if random < 0.7 else False if random < 0.96 else self.random.choice(("true", 1, 0, None, [], ""))

    def choice(self, names: tuple[str, ...], unknown: bool = True) -> Any:
        """An enum: a name or a number, seldom one that nobody knows."""
        at = self.random.randrange(len(names))
        random = self.random.random()
        if random < 0.6:
            return names[at]
        if random < 0.95:
            return at
        bad: list[Any] = ["NOPE", str(at), names[at].lower(), "", 1.5, True, [], {}, None, 1 << 40]
        return self.random.choice(bad + ([17, -1] if unknown else []))

    def some_revision(self) -> int:
        random = self.random
        if random.random() < 0.8:
            return random.randint(max(1, self.compacted - 1), self.revision + 1)
        return random.choice((-5, -1, 0, 1, self.revision + 1000, self.compacted))

    def lease(self) -> int:
        if self.leases and self.chance(0.8):
            return self.random.choice(self.leases)
        return self.random.choice((*LEASE_IDS, -7))

    def fields(self, **wanted: tuple[float, Callable[[], Any]]) -> dict[str, Any]:
        """Some of the fields, in any order and in either spelling."""
        found: list[tuple[str, Any]] = []
        for name, (chance, make) in wanted.items():
            if self.chance(chance):
                found.append((name, make()))
        if self.chance(0.1):
            self.random.shuffle(found)
        if self.chance(0.02):
            found.append((self.random.choice(("unknown", "Key", "limit ", "sort-order")), {"a": [1, None]}))
        if found and self.chance(0.02):
            found.append(found[0])
        spelled: list[str] = []
        for name, value in found:
            if "_" in name and self.chance(0.15):
                first, *rest = name.split("_")
                name = first + "".join(part.capitalize() for part in rest)
            spelled.append(f"{json.dumps(name)}:{text(value)}")
        return Raw("{" + ",".join(spelled) + "}")  # type: ignore[return-value]  # what `text` takes for a message

    def key(self) -> Any:
        return self.bytes_(self.random.choice(self.keys)) if not self.chance(0.02) else self.random.choice(("", None))

    def end(self) -> Any:
        return self.bytes_(self.random.choice(ENDS))

    def value(self) -> Any:
        return self.bytes_(self.random.choice(VALUES[:8] if self.chance(0.97) else VALUES))

    # Messages

    def range_(self, least: int = -5) -> Any:
        number = self.number

        def revision() -> int:
            found = max(least, self.some_revision())
            return 0 if found == self.revision and not least else found

        simple = self.chance(0.4)
        rare = 0.0 if simple else 0.12
        return self.fields(
            key=(0.99, self.key),
            range_end=(0.7, self.end),
            limit=(0.0 if simple else 0.3, lambda: number(self.random.choice((0, 1, 2, 3, 5, 100, -1)))),
            revision=(0.2, lambda: number(revision())),
            sort_order=(0.0 if simple else 0.5, lambda: self.choice(ORDERS)),
            sort_target=(0.0 if simple else 0.5, lambda: self.choice(TARGETS, unknown=False)),
            serializable=(0.1, self.flag),
            keys_only=(rare, self.flag),
            count_only=(rare, self.flag),
            min_mod_revision=(rare, lambda: number(revision())),
            max_mod_revision=(rare, lambda: number(revision())),
            min_create_revision=(rare, lambda: number(revision())),
            max_create_revision=(rare, lambda: number(revision())),
        )

    def put(self) -> Any:
        keeps = self.chance(0.1)
        return self.fields(
            key=(0.99, self.key),
            value=(0.4 if keeps else 0.85, self.value),
            lease=(0.03 if keeps else 0.15, lambda: self.number(self.random.choice(self.leases or LEASE_IDS))),
            prev_kv=(0.3, self.flag),
            ignore_value=(0.5 * keeps, self.flag),
            ignore_lease=(0.5 * keeps, self.flag),
        )

    def delete(self) -> Any:
        def end() -> Any:
            return self.bytes_(self.random.choice([one for one in ENDS if one != b"\0"]))

        return self.fields(key=(0.99, self.key), range_end=(0.4, end), prev_kv=(0.5, self.flag))

    def compare(self) -> Any:
        target, operand = self.random.choice(COMPARED)
        if self.chance(0.05):
            operand = self.random.choice(COMPARED)[1]

        def value() -> Any:
            if operand == "value":
                # Only small ones are compared for order.
                return self.bytes_(self.random.choice(VALUES[:5]))
            if operand == "lease":
                return self.number(self.lease())
            if operand == "version":
                return self.number(self.random.choice((0, 0, 1, 2, 3, -1)))
            return self.number(self.some_revision())

        def named() -> Any:
            at = [name for name, _ in COMPARED].index(target)
            if self.chance(0.03):
                return self.random.choice(("NOPE", 17, -1, None, "mod"))
            return self.random.choice((target, at))

        def result() -> Any:
            # Large values have no order here.
            return self.choice(RESULTS) if target != "VALUE" else self.random.choice(("EQUAL", "NOT_EQUAL", 0, 3))

        return self.fields(
            result=(0.7, result),
            target=(0.97, named),
            key=(0.99, self.key),
            range_end=(0.2, self.end),
            **{operand: (0.95, value)},
        )

    def operation(self, depth: int) -> Any:
        random = self.random.random()
        if random < 0.02:
            return self.random.choice(({}, None, [], 3, {"request_put": None}, {"request_range": {}}, "x"))
        if random < 0.45:
            return {"request_put": self.put()}
        if random < 0.75:
            return {"request_range": self.range_(0)}
        if random < 0.9:
            return {"request_delete_range": self.delete()}
        if random < 0.92:
            return {"request_range": self.range_(0), "request_put": self.put()}
        return {self.random.choice(("request_txn", "requestTxn")): self.txn(depth + 1)} if depth < 3 else {}

    def txn(self, depth: int = 0) -> Any:
        def some(make: Callable[[], Any]) -> Callable[[], Any]:
            return lambda: [make() for _ in range(self.random.choice((0, 1, 1, 2, 3)))]

        def operations() -> Any:
            if self.chance(0.01):
                return [{"request_range": {"key": "YQ=="}}] * self.random.choice((127, 128, 129))
            return some(lambda: self.operation(depth))()

        return self.fields(compare=(0.6, some(self.compare)), success=(0.95, operations), failure=(0.7, operations))

    # Steps

    def step(self) -> Step:
        """The next request."""
        makers: list[tuple[int, Callable[[], Step]]] = [
            (25, lambda: Step("/v3/kv/put", self.body(self.put()))),
            (25, lambda: Step("/v3/kv/range", self.body(self.range_()))),
            (8, lambda: Step("/v3/kv/deleterange", self.body(self.delete()))),
            (20, lambda: Step("/v3/kv/txn", self.body(self.txn()))),
            (2, self._compaction),
            (9, self._lease),
            (4, self._watch),
            (2, self._keepalive),
            (3, self._broken),
            (3, self._lock),
        ]
        weights = [weight for weight, _ in makers]
        return self.random.choices([make for _, make in makers], weights)[0]()

    def body(self, found: Any) -> bytes:
        """Bytes of a body; seldom with something around it."""
        whole = text(found).encode("utf-8", "surrogatepass")
        if self.chance(0.98):
            return whole
        bad = (b" \r\n\t" + whole, whole + b" x", whole + b"}{", b"\xef\xbb\xbf" + whole, whole[:-1])
        return self.random.choice(bad)

    def _compaction(self) -> Step:
        if self.compacted < 2 or self.chance(0.8):
            revision = self.random.randint(max(2, self.compacted), max(2, self.revision))
        else:
            revision = self.random.choice((-1, self.compacted, self.revision + 5, 1 << 62))
        fields = self.fields(revision=(1.0, lambda: revision), physical=(0.5, self.flag))
        return Step("/v3/kv/compaction", self.body(fields))

    def _lease(self) -> Step:
        verb = self.random.choice(("grant", "grant", "revoke", "timetolive", "timetolive", "leases"))
        prefix = self.random.choice(("/v3/lease/", "/v3/kv/lease/")) if verb != "grant" else "/v3/lease/"
        if verb == "grant":
            # Always with a time that is long: a lease that ends meanwhile ends at other moments here and there.
            ttl = self.random.choice((*TTLS, 9_000_000_000, 9_000_000_001))
            fields = self.fields(
                TTL=(1.0, lambda: self.random.choice((ttl, ttl, str(ttl), f" {ttl}", f"+{ttl}", True, "x", 1.5))),
                ID=(0.8, lambda: self.number(self.random.choice((*LEASE_IDS, 0)))),
            )
        elif verb == "leases":
            fields = self.fields()
        else:
            fields = self.fields(ID=(0.98, lambda: self.number(self.lease())), keys=(0.5, self.flag))
        return Step(prefix + verb, self.body(fields))

    def _keepalive(self) -> Step:
        messages = [self.fields(ID=(0.95, lambda: self.number(self.lease()))) for _ in range(self.random.randint(0, 3))]
        return Step("/v3/lease/keepalive", b"\n".join([self.body(one) for one in messages]))

    def _create(self) -> Any:
        def start() -> Any:
            found = self.random.randint(max(self.watch_from, self.compacted + 1), self.revision + 2)
            return self.number(found if self.chance(0.9) else self.random.choice((1, -4, 0)))

        def filters() -> Any:
            names = ("NOPUT", "NODELETE")
            return [self.choice(names, unknown=False) for _ in range(self.random.randint(0, 2))]

        return {
            "create_request": self.fields(
                key=(0.97, self.key),
                range_end=(0.6, self.end),
                start_revision=(0.4, start),
                watch_id=(0.3, lambda: self.number(self.random.choice((0, 1, 2, 70, -4, 1 << 40)))),
                filters=(0.2, filters),
                prev_kv=(0.4, self.flag),
                fragment=(0.2, self.flag),
                progress_notify=(0.1, self.flag),
            )
        }

    def _watch(self) -> Step:
        messages = [self._create() for _ in range(self.random.randint(1, 4))]
        if self.chance(0.2):
            messages.append({"cancel_request": {"watch_id": self.random.choice((71, -3, "5"))}})
        # The answer to it says that all others were answered.
        messages.append({"progress_request": {}})
        if self.chance(0.1):
            messages.append(Raw(self.random.choice(("x", "[]", "{", "3", '{"create_request":3}'))))
        if self.chance(0.05):
            messages[0] = Raw(self.random.choice(("x", "[]", '"a"', '{"create_request":{"key":3}}', "{")))
        return Step("/v3/watch", "\n".join(map(text, messages)).encode("utf-8", "surrogatepass"), True)

    def _lock(self) -> Step:
        chosen = [lease for lease in self.leases if lease in LEASE_IDS]
        if not chosen:
            return self._lease()
        # Each lease has a name of its own: nobody waits.
        lease = self.random.choice(chosen)
        name = b"lock %d" % lease
        key = name + b"/%x" % lease
        verb = self.random.choice(
            ("election/leader", "election/proclaim", "election/resign", "lock/unlock", "lock/lock", "election/campaign")
        )
        if verb == "lock/unlock":
            fields = self.fields(key=(0.95, lambda: self.bytes_(key)))
        elif verb in ("election/proclaim", "election/resign"):
            held = self.fields(
                name=(0.9, lambda: self.bytes_(name)),
                key=(1.0, lambda: self.bytes_(key)),
                rev=(0.9, lambda: self.number(self.random.randint(1, self.revision))),
                lease=(1.0, lambda: lease),
            )
            fields = self.fields(leader=(0.95, lambda: held), value=(0.8, self.value))
        else:
            fields = self.fields(
                name=(1.0, lambda: b64encode(name).decode()), lease=(1.0, lambda: lease), value=(0.8, self.value)
            )
        return Step("/v3/" + verb, self.body(fields))

    def _broken(self) -> Step:
        bodies = (
            b"", b"   ", b"null", b"[]", b"3", b'"x"', b"{", b"}", b"{]", b'{"key"}', b"true", b'{"key":"YQ=="}}',
            b"\xff", b'{"key":"\xff"}', b'{"key":NaN}',
            b'{"limit":Infinity,"key":"YQ=="}', b"{'key':1}", b'{"key":"YQ==",}',
            b"[" * 500, b'{"a":' * 500, b"\0", b'{"key":"a\nb"}', b"nul", b"{}" * 3,
            b'{"key":"YQ==","limit":' + b"9" * 5000,
        )  # fmt: skip
        paths = ("/v3/kv/range", "/v3/kv/put", "/v3/kv/txn", "/v3/kv/deleterange", "/v3/lease/grant",
                 "/v3/lease/keepalive", "/v3/lease/revoke", "/v3beta/kv/range", "/v3/nothing", "/v3/kv/put/",
                 "/v3/auth/authenticate",
                 "/v3/auth/status", "/nothing")  # fmt: skip
        if self.chance(0.1):
            return Step(self.random.choice(paths[:4]), b"", method=self.random.choice(("GET", "PUT", "DELETE")))
        if self.chance(0.1):
            large = self.random.choice((1_600_000, 1_900_000, 2_500_000, 4_000_000))
            return Step("/v3/kv/put", text({"key": "YQ==", "value": b64encode(bytes(large)).decode()}).encode())
        return Step(self.random.choice(paths), self.random.choice(bodies))
