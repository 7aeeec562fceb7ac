"""Certificates for tests, good ones and bad ones; made once a test run."""

from __future__ import annotations

from pathlib import Path

from logyard.protocol.tls import TlsConfig
from logyard.service.certificates import Authority
from logyard.service.tls import Door

CLUSTER = "fake"


class Yard:
    """A CA of the cluster, one that nobody trusts, and one that signs for another cluster by the same key."""

    def __init__(self, directory: Path) -> None:
        self.good = Authority(directory / "good", CLUSTER)
        self.stranger = Authority(directory / "stranger", CLUSTER)
        self.late = directory / "late"

    def _files(self, certificate: Path, ca: Path | None = None) -> TlsConfig:
        key = certificate.with_name(f"{certificate.stem}-key.pem")
        return TlsConfig(ca=ca or self.good.ca, certificate=certificate, key=key)

    def node(self, node: int) -> TlsConfig:
        return self._files(self.good.node(node))

    def client(self, name: str = "alice") -> TlsConfig:
        return self._files(self.good.client(name))

    def unknown_ca(self) -> TlsConfig:
        """A client's certificate of a CA that the nodes do not know."""
        return self._files(self.stranger.client("mallory"))

    def distrusting(self) -> TlsConfig:
        """A good certificate, but the nodes' CA is not the one this client trusts."""
        return self._files(self.good.client("alice"), self.stranger.ca)

    def expired(self) -> TlsConfig:
        return self._files(self.good.client("late", days=-1))

    def expired_node(self, node: int) -> TlsConfig:
        return self._files(self.good.node(node, days=-1))

    def other_cluster(self, node: int = 0) -> TlsConfig:
        """Signed by the same CA, for another cluster."""
        other = Authority(self.good.directory, "other")
        return self._files(other.node(90 + node) if node else other.client("other"))

    def door(self, node: int) -> Door:
        return Door("client_tls", self.node(node))
