"""Proof between nodes without TLS: both know one secret, which neither sends.

The dialler's CHALLENGE brings a random number, the listener's answer another one and the first proof; each frame after
it, of either side, is PROVED: under an HMAC-SHA256 of its direction, of both challenges (numbers, node ids, cluster,
lane) and of itself. So a recorded word fits no other connection, and none fits the other direction or another pair.
It proves who opens a connection, not each frame after it: who can take over a connection needs TLS to be kept out.
Pure functions and values; called by `link`, `listener` and `peers`. docs/wire.md has the tables.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from typing import NamedTuple

from logyard.protocol.errors import BadRequest, WrongIdentity

from ..types import Buffer
from .frame import CHALLENGE, HELLO, PROVED, REFUSED, VERSION, Hello, encode_header

SECRET_BYTES_MIN = 16
NONCE_BYTES = 32
PROOF_BYTES = 32
CHALLENGE_STRUCT = struct.Struct(f"<HBBII{NONCE_BYTES}s{PROOF_BYTES}s")
"""protocol version, lane, bytes of the cluster's name, node, node expected, random number, proof (the dialler's:
zeros); then the name."""
NO_PROOF = bytes(PROOF_BYTES)
ANSWER, FROM_DIALLER, FROM_LISTENER = b"logyard answers\0", b"logyard dialler\0", b"logyard listener\0"
"""What a proof is for: the listener's challenge, and frames of the one and of the other side."""


class Secret(NamedTuple):
    """What the nodes of a cluster without TLS share. `required` False: who does not prove itself may join as well, but
    nothing that it says of itself is stored."""

    key: bytes
    required: bool = True


class Challenge(NamedTuple):
    """Who asks for proof, whom it believes to talk to, and a number used once."""

    cluster: str
    node: int
    expected: int
    lane: int
    nonce: bytes
    proof: bytes = NO_PROOF


class Exchange:
    """One handshake: what both sides said so far. `first` and `second` are the sections of the two challenges."""

    __slots__ = ("second", "_key", "_dialler", "_said", "_own", "_other")

    def __init__(self, key: bytes, first: bytes, second: bytes, *, dialled: bool) -> None:
        self.second = second
        self._key = key
        self._dialler = decode_challenge(first)
        self._said = first + second
        self._own, self._other = (FROM_DIALLER, FROM_LISTENER) if dialled else (FROM_LISTENER, FROM_DIALLER)

    def require(self, hello: Hello) -> None:
        """Raise `WrongIdentity` unless this hello is of who asked."""
        asked = self._dialler
        if (hello.cluster, hello.node, hello.expected, hello.lane) != asked[:4]:
            raise WrongIdentity(f"node {asked.node} proved itself, and the hello is node {hello.node}'s")

    def seal(self, kind: int, section: Buffer) -> bytes:
        """Return a whole PROVED frame around one of type `kind`."""
        inner = bytes((kind,)) + section
        section = prove(self._key, self._own, self._said + inner) + inner
        return encode_header(PROVED, 0, section, 0) + section

    def open(self, section: Buffer) -> tuple[int, bytes]:
        """Return the type and section inside the other side's PROVED frame. Raises `WrongIdentity`, `BadRequest`."""
        proof, inner = bytes(section[:PROOF_BYTES]), bytes(section[PROOF_BYTES:])
        require(self._key, self._other, self._said + inner, proof)
        if not inner or inner[0] not in (HELLO, REFUSED):
            raise BadRequest("a proof around something else than a hello or a refusal")
        return inner[0], inner[1:]


def prove(key: bytes, purpose: bytes, said: bytes) -> bytes:
    """Return the proof that this was said for that purpose by somebody who knows the secret."""
    return hmac.digest(key, purpose + said, "sha256")


def require(key: bytes, purpose: bytes, said: bytes, proof: bytes) -> None:
    """Raise `WrongIdentity` unless `proof` is that of these words; takes the same time whichever byte is wrong."""
    if not hmac.compare_digest(prove(key, purpose, said), proof):
        raise WrongIdentity("the peer's proof is wrong: its peer_secret_file has another secret")


def ask(cluster: str, node: int, expected: int, lane: int) -> bytes:
    """Return the section of a dialler's challenge."""
    return _encode(Challenge(cluster, node, expected, lane, secrets.token_bytes(NONCE_BYTES)))


def answer(key: bytes, first: bytes, theirs: Challenge) -> bytes:
    """Return the section of the listener's challenge, with its proof, to the dialler's."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    ours = Challenge(theirs.cluster, theirs.expected, theirs.node, theirs.lane, nonce)
    return _encode(ours._replace(proof=prove(key, ANSWER, first + _encode(ours))))


def check_answer(key: bytes, first: bytes, second: bytes) -> None:
    """Raise `WrongIdentity` unless the listener is the node that was asked for and proves it, `BadRequest`."""
    asked, got = decode_challenge(first), decode_challenge(second)
    if (got.cluster, got.node, got.expected, got.lane) != (asked.cluster, asked.expected, asked.node, asked.lane):
        raise WrongIdentity(
            f"node {got.node} of cluster {got.cluster!r} answers, not node {asked.expected} of {asked.cluster!r}"
        )
    require(key, ANSWER, first + _encode(got._replace(proof=NO_PROOF)), got.proof)


def encode_challenge(section: bytes) -> bytes:
    """Return a whole CHALLENGE frame."""
    return encode_header(CHALLENGE, 0, section, 0) + section


def decode_challenge(section: Buffer) -> Challenge:
    """Return a CHALLENGE frame's section; raise `BadRequest`, or `WrongIdentity` for another protocol version."""
    if len(section) < CHALLENGE_STRUCT.size:
        raise BadRequest(f"a challenge of {len(section)} bytes is too short")
    version, lane, length, node, expected, nonce, proof = CHALLENGE_STRUCT.unpack_from(section)
    if version != VERSION:
        raise WrongIdentity(f"the peer speaks protocol {version}, this node {VERSION}")
    name = bytes(section[CHALLENGE_STRUCT.size :])
    if lane > 1 or not length or len(name) != length or not node:
        raise BadRequest("a challenge does not add up")
    try:
        return Challenge(name.decode(), node, expected, lane, nonce, proof)
    except UnicodeDecodeError:
        raise BadRequest("a challenge's cluster name is not UTF-8") from None


def _encode(challenge: Challenge) -> bytes:
    name = challenge.cluster.encode()
    head = CHALLENGE_STRUCT.pack(
        VERSION, challenge.lane, len(name), challenge.node, challenge.expected, challenge.nonce, challenge.proof
    )
    return head + name
