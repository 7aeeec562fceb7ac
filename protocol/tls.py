"""TLS 1.3 without sockets: contexts, who a certificate speaks for, and the two directions of a record stream.

A certificate names its holder in its subject's alternative names: `logyard://CLUSTER/node/ID` (or the DNS name
`node-ID.CLUSTER`) and `logyard://CLUSTER/client/NAME`. Host names play no part: whoever dials knows a cluster and a
node, not a name. Every failure becomes a `TlsError` of one clear line. Used by `tls_stream`, `sync` and `service.tls`.
"""

from __future__ import annotations

import ipaddress
import re
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from .errors import BadRequest
from .frame import Buffer
from .wire import Hello

NODE = "node"
CLIENT = "client"
CHUNK = 256 << 10
"""Plaintext that is encrypted at a time: what waits as ciphertext in a connection never exceeds this by much."""
CALL_BYTES = 1 << 20
"""One `Cipher.write` takes at most this much, so that a large frame does not hold the loop for milliseconds."""
READ_BYTES = 64 << 10
"""Ciphertext received at a time."""
HANDSHAKE_RECORD = 0x16
"""First byte of every TLS connection; neither protocol of ours begins with it."""

_URI = re.compile(r"logyard://([A-Za-z0-9._-]{1,128})/(node|client)/([A-Za-z0-9._-]{1,128})", re.ASCII)
_DNS = re.compile(r"node-([0-9]{1,10})\.([A-Za-z0-9._-]{1,128})", re.ASCII)


class TlsError(OSError):
    """No TLS connection, or no longer one; the text says why, in one line."""


class Identity(NamedTuple):
    """One thing a certificate allows: to be `role` ("node" or "client") `name` of `cluster`."""

    cluster: str
    role: str
    name: str

    def __str__(self) -> str:
        return f"{self.role} {self.name} of cluster {self.cluster!r}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """Three PEM files: the CA that the other side's certificate must be signed by, one's own certificate (with its
    chain) and the key to it."""

    ca: str | Path
    certificate: str | Path
    key: str | Path


def make_context(config: TlsConfig, *, server: bool) -> ssl.SSLContext:
    """Return a context that shows the certificate and demands one. Raises `TlsError` naming the file that is at
    fault."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    if server:
        # Tickets are sent after the handshake, on lanes whose server never sends, and nothing here resumes a session.
        context.num_tickets = 0
    try:
        context.load_verify_locations(cafile=str(config.ca))
    except OSError as error:
        raise TlsError(f"ca: can't use {config.ca}: {_file_reason(error)}") from None
    for name, path in (("certificate", config.certificate), ("key", config.key)):
        try:
            Path(path).read_bytes()
        except OSError as error:
            raise TlsError(f"{name}: can't read {path}: {error.strerror}") from None
    try:
        # An encrypted key would make OpenSSL ask at the terminal, which a service does not have.
        context.load_cert_chain(str(config.certificate), str(config.key), password=_no_password)
    except (OSError, ValueError) as error:
        raise TlsError(f"certificate {config.certificate} and key {config.key}: {_file_reason(error)}") from None
    return context


def client_context(config: TlsConfig | None) -> ssl.SSLContext | None:
    """Return the context of a client, or none; raise `BadRequest`."""
    if config is None:
        return None
    try:
        return make_context(config, server=False)
    except TlsError as error:
        raise BadRequest(f"tls {error}") from None


def _no_password() -> str:
    raise ValueError("the key is encrypted; give one without a password, readable by its owner alone")


def _file_reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return "they do not belong together" if error.reason == "KEY_VALUES_MISMATCH" else "not in PEM form"
    return getattr(error, "strerror", None) or str(error)


def identities(certificate: Mapping[str, Any] | None) -> tuple[Identity, ...]:
    """Return what a checked certificate (`getpeercert()`) allows its holder to be."""
    found = []
    for kind, value in (certificate or {}).get("subjectAltName", ()):
        if kind == "URI" and (match := _URI.fullmatch(value)):
            found.append(Identity(match[1], match[2], match[3]))
        elif kind == "DNS" and (match := _DNS.fullmatch(value)):
            found.append(Identity(match[2], NODE, match[1]))
    return tuple(found)


def read_identities(link: ssl.SSLObject | ssl.SSLSocket) -> tuple[Identity, ...]:
    """Return what the other side's certificate allows it to be, after the handshake. Raises `TlsError` for one that a
    CA signed and Python can't read: it takes names in UTF-8 alone."""
    try:
        return identities(link.getpeercert())
    except ValueError as error:
        raise TlsError(f"the other side's certificate can't be read: {error}") from None


def require(found: Sequence[Identity], cluster: object, role: str, name: str = "") -> None:
    """Raise `TlsError` unless one of the identities is this one (any `name` when it is empty)."""
    for each in found:
        if each.cluster == cluster and each.role == role and name in ("", each.name):
            return
    wanted = f"{role} {name}".strip()
    shown = " and ".join(map(str, found)) or "nobody of ours"
    raise TlsError(f"the certificate is for {shown}, not for {wanted} of cluster {str(cluster)!r}")


def is_loopback(host: str) -> bool:
    """Return whether a numeric address (or "localhost") never leaves this machine."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def require_safe(host: str, secured: bool) -> None:
    """Raise `TlsError` for a numeric address off this machine that would be spoken to in the clear."""
    if not secured and not is_loopback(host):
        raise TlsError(
            f"{host} is not a loopback address and needs TLS: give a CA, a certificate and its key "
            "(tls=TlsConfig(...), --tls-ca --tls-cert --tls-key, LOGYARD_TLS_CA/_CERT/_KEY)"
        )


def require_server(found: Sequence[Identity], hello: Hello) -> None:
    """Raise `TlsError` unless a server's certificate is that of the cluster and node that its HELLO claims."""
    require(found, hello.cluster, NODE, str(hello.node))


def explain(error: Exception) -> str:
    """Return one clear line for what went wrong in a handshake or after it."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the other side's certificate is not accepted: {error.verify_message}"
    if isinstance(error, ssl.SSLEOFError):
        return "the connection was closed within the TLS handshake"
    reason = (getattr(error, "reason", None) or "") if isinstance(error, ssl.SSLError) else ""
    if reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "UNEXPECTED_MESSAGE"):
        return "the other side does not speak TLS on this port"
    if "UNSUPPORTED_PROTOCOL" in reason or "PROTOCOL_VERSION" in reason:
        return "the other side does not speak TLS 1.3"
    if "ALERT_UNKNOWN_CA" in reason:
        return "the other side refused our certificate: it is signed by a CA unknown there"
    if "CERTIFICATE_REQUIRED" in reason:
        return "the other side asks for a certificate"
    if "ALERT_CERTIFICATE_EXPIRED" in reason:
        return "the other side refused our certificate: it has expired"
    if "ALERT_BAD_CERTIFICATE" in reason or "ALERT_UNSUPPORTED_CERTIFICATE" in reason:
        return "the other side refused our certificate"
    return f"TLS failed: {reason.replace('_', ' ').lower()}" if reason else str(error)


def gathered(buffers: Sequence[Buffer], skip: int = 0) -> memoryview:
    """Return up to CHUNK bytes of `buffers` after their first `skip`, in one piece: a copy, unless they are one
    piece."""
    parts: list[Buffer] = []
    size = 0
    for buffer in buffers:
        length = len(buffer)
        if skip >= length:
            skip -= length
            continue
        part = memoryview(buffer)[skip : skip + CHUNK - size]
        skip = 0
        parts.append(part)
        size += len(part)
        if size >= CHUNK:
            break
    return memoryview(parts[0] if len(parts) == 1 else b"".join(parts))


class Cipher:
    """Both directions of one connection, between plaintext and ciphertext; whoever owns the socket moves the latter.

    Ciphertext on its way out is bounded: `write` takes no more while some of the last chunk has not left.
    """

    __slots__ = ("object", "_incoming", "_outgoing", "_cipher", "_held")

    def __init__(self, context: ssl.SSLContext, *, server: bool) -> None:
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self.object = context.wrap_bio(self._incoming, self._outgoing, server_side=server)
        self._cipher: memoryview = memoryview(b"")
        self._held = 0

    def handshake(self) -> bool:
        """Go on with the handshake; return True when it is done. Raises `TlsError`. What is to be sent: `outgoing`."""
        try:
            self.object.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLError as error:
            raise TlsError(explain(error)) from None
        return True

    def received(self, data: Buffer) -> None:
        """Take ciphertext that arrived; empty: the connection ended."""
        if len(data):
            self._incoming.write(data)
        else:
            self._incoming.write_eof()

    def read_into(self, view: memoryview) -> int | None:
        """Put plaintext bytes into `view` and return how many: 0 at the end, None when more ciphertext is needed.
        Raises `TlsError`."""
        at = 0
        read = self.object.read
        try:
            while at < len(view):
                got = read(len(view) - at, view[at:] if at else view)
                if not got:
                    break
                at += int(got)
        except ssl.SSLWantReadError:
            return at or None
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            # An end without a goodbye is what a killed process leaves; the frames above know whether one was cut.
            return at
        except ssl.SSLError as error:
            if not at:
                raise TlsError(explain(error)) from None
            # What came before the damage is good; the next call meets the damage again.
        return at

    def outgoing(self) -> memoryview:
        """Return ciphertext to send now; tell `sent` how much of it went."""
        if not self._cipher and self._outgoing.pending:
            self._cipher = memoryview(self._outgoing.read())
        return self._cipher

    def sent(self, count: int) -> None:
        """Drop what the socket took of `outgoing`."""
        self._cipher = self._cipher[count:]

    def settle(self) -> int:
        """Return the plaintext bytes that were held back and whose ciphertext has left meanwhile."""
        held, self._held = self._held, 0
        return held

    def encrypt(self, buffers: Sequence[Buffer], skip: int) -> int:
        """Encrypt up to CHUNK bytes of `buffers` after their first `skip`; return how many, 0 when nothing is left."""
        assert not self._held
        plain = gathered(buffers, skip)
        at = 0
        while at < len(plain):
            at += self.object.write(plain[at:])
        return at

    def hold(self, count: int) -> None:
        """Hold back the last chunk, which has not left whole: its plaintext counts as unsent until it has."""
        self._held = count
