"""Who may connect: the one place that looks at a HELLO's token and versions."""

from __future__ import annotations

from typing import Protocol

from kvstore.errors import FormatUnsupported
from kvstore.wire.header import VERSION
from kvstore.wire.messages import Hello


class Admission(Protocol):
    """Decides about a HELLO."""

    def admit(self, hello: Hello) -> None:
        """Returns for a welcome peer. Raises Denied for the others."""


class OpenAdmission:
    """Admits every peer: for nodes that listen on loopback only, or were told to be open."""

    def admit(self, hello: Hello) -> None:
        """Every token is good."""


def agreed_version(hello: Hello) -> int:
    """The newest protocol version that both sides speak.

    Raises:
        FormatUnsupported: There is none.
    """
    if not hello.version_min <= VERSION <= hello.version_max:
        raise FormatUnsupported(
            f"client speaks protocol versions {hello.version_min} to {hello.version_max}, this node {VERSION}: "
            "upgrade the older side"
        )
    return VERSION
