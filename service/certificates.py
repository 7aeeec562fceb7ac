"""Certificates to start with: a CA, one certificate for each node and one for each client, as PEM files.

Elliptic keys (P-256), good for `DAYS`; each names its holder as `client.tls` reads it. The CA's key stays in the
directory, for `logyard tls init` to add nodes and clients later: move it to a safe place. Nothing that is there is ever
written again. Needs the extra `tls` (cryptography). Called by `cli_tls` and `local_cluster`.
"""

from __future__ import annotations

import datetime
import os
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from logyard.protocol.errors import BadRequest

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

DAYS = 825
CA_DAYS = 3650
CA_NAME = "logyard CA of "
SOON_DAYS = 30
"""Before its end a certificate is to be renewed."""
BACKDATED = datetime.timedelta(minutes=5)
"""Clocks of other machines may be a little behind."""
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}", re.ASCII)


class Authority:
    """A CA in `directory`: ca.pem and ca-key.pem, made if they are not there. Raises `BadRequest`."""

    __slots__ = ("directory", "cluster", "certificate", "_key")

    def __init__(self, directory: Path, cluster: str) -> None:
        if not _NAME.fullmatch(cluster):
            raise BadRequest(f"{cluster!r} is no cluster's name: letters, digits, dots, dashes, underscores")
        try:
            from cryptography import x509
            from cryptography.hazmat.primitives import serialization
        except ModuleNotFoundError:
            raise BadRequest("making certificates needs the extra: pip install 'logyard[tls]'") from None
        self.directory = directory
        self.cluster = cluster
        self._key: ec.EllipticCurvePrivateKey
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self.ca.exists():
            try:
                self.certificate = x509.load_pem_x509_certificate(self.ca.read_bytes())
                key = serialization.load_pem_private_key((directory / "ca-key.pem").read_bytes(), None)
            except (OSError, ValueError, TypeError) as error:
                raise BadRequest(f"{directory}: can't use the CA that is there: {error}") from None
            self._key = key  # type: ignore[assignment]  # what `_issue` once wrote
            return
        self._key = kept_key(directory / "ca-key.pem")
        self.certificate = self._issue(f"{CA_NAME}{cluster}", None, self._key, CA_DAYS)
        write(self.ca, certificate_pem(self.certificate))

    @property
    def ca(self) -> Path:
        """The CA's certificate, which everyone needs."""
        return self.directory / "ca.pem"

    def node(self, node: int, *, days: int = DAYS) -> Path:
        """Return the path of a node's certificate, made if it is not there; its key lies beside it."""
        return self._holder(f"node-{node}", f"logyard://{self.cluster}/node/{node}", days)

    def client(self, name: str, *, days: int = DAYS) -> Path:
        """Return the path of a client's certificate, made if it is not there; its key lies beside it."""
        if not _NAME.fullmatch(name):
            raise BadRequest(f"{name!r} is no client's name: letters, digits, dots, dashes, underscores")
        return self._holder(f"client-{name}", f"logyard://{self.cluster}/client/{name}", days)

    def _holder(self, stem: str, uri: str, days: int) -> Path:
        path = self.directory / f"{stem}.pem"
        if not path.exists():
            key = kept_key(key_path(path))
            write(path, certificate_pem(self._issue(stem, uri, key, days)))
        elif not {uri, f"{stem}.{self.cluster}"} & {*(found := names_of(path))}:
            raise BadRequest(f"{path}: is for {' and '.join(found) or 'nobody of ours'}, not for {uri}")
        return path

    def _issue(self, name: str, uri: str | None, key: ec.EllipticCurvePrivateKey, days: int) -> x509.Certificate:
        """Sign one certificate; without `uri` the CA's own."""
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes
        from cryptography.x509.oid import ExtendedKeyUsageOID

        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name[:64])])
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(subject if uri is None else self.certificate.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - BACKDATED + min(datetime.timedelta(0), datetime.timedelta(days=days)))
            .not_valid_after(now + datetime.timedelta(days=days))
            .add_extension(x509.BasicConstraints(ca=uri is None, path_length=0 if uri is None else None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )
        usage = dict.fromkeys(
            ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "crl_sign",
             "encipher_only", "decipher_only"), False
        )  # fmt: skip
        usage |= {"digital_signature": uri is not None, "key_cert_sign": uri is None}
        builder = builder.add_extension(x509.KeyUsage(**usage), critical=True)
        if uri is not None:
            both = [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
            names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)])
            builder = builder.add_extension(x509.ExtendedKeyUsage(both), critical=False)
            builder = builder.add_extension(names, critical=False)
        return builder.sign(self._key, hashes.SHA256())


def read_certificate(path: Path) -> x509.Certificate:
    """Return the certificate in a file. Raises `BadRequest`."""
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BadRequest(f"{path}: can't use the certificate that is there: {error}") from None


def names_of(path: Path) -> list[str]:
    """Return the URIs and DNS names that a certificate is for. Raises `BadRequest`."""
    from cryptography import x509

    try:
        found = read_certificate(path).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [name for kind in (x509.UniformResourceIdentifier, x509.DNSName) for name in found.get_values_for_type(kind)]


def days_left(path: Path) -> int:
    """Return for how many days a certificate is still good; below 0 it has expired. Raises `BadRequest`."""
    return (read_certificate(path).not_valid_after_utc - datetime.datetime.now(datetime.UTC)).days


def key_path(certificate: Path) -> Path:
    """Return the path of the key to a certificate of ours."""
    return certificate.with_name(f"{certificate.stem}-key.pem")


def new_key() -> ec.EllipticCurvePrivateKey:
    """Return a fresh P-256 key."""
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def kept_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Return a new key, written to `path`; or the one that is there of a command that was cut off before it had its
    certificate. Raises `BadRequest` for a file that is no key."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    if not path.exists():
        key = new_key()
        write(path, key_pem(key), secret=True)
        return key
    try:
        found = serialization.load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise BadRequest(f"{path}: can't use the key that is there, and has no certificate: {error}") from None
    if not isinstance(found, ec.EllipticCurvePrivateKey):
        raise BadRequest(f"{path}: can't use the key that is there, and has no certificate: it is of another kind")
    return found


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return the key as PKCS 8, not encrypted."""
    from cryptography.hazmat.primitives import serialization

    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def certificate_pem(certificate: x509.Certificate) -> bytes:
    """Return one certificate as PEM."""
    from cryptography.hazmat.primitives import serialization

    return certificate.public_bytes(serialization.Encoding.PEM)


def write(path: Path, data: bytes, *, secret: bool = False) -> None:
    """Write a new file, whole or not at all; a secret one is its owner's alone from its first byte on."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            if not secret:
                os.fchmod(file.fileno(), 0o644)
        os.link(temporary, path)
    finally:
        os.unlink(temporary)


def issue(directory: Path, cluster: str, nodes: Iterable[int], clients: Iterable[str]) -> list[Path]:
    """Issue a CA and these certificates, as far as they are not there; return all certificates' paths, the CA's
    first. Raises `BadRequest` where what is there is another cluster's, or somebody else's."""
    authority = Authority(directory, cluster)
    for common in authority.certificate.subject:
        made = str(common.value)
        if made.startswith(CA_NAME) and made != f"{CA_NAME}{cluster}"[:64]:
            raise BadRequest(f"{authority.ca}: is the CA of cluster {made.removeprefix(CA_NAME)!r}, not of {cluster!r}")
    return [authority.ca, *(authority.node(node) for node in nodes), *(authority.client(name) for name in clients)]
