"""Who may ask the supervisor what: the tenants file as read last, and what a token allows by it."""

from __future__ import annotations

import logging
from pathlib import Path

from kvstore.server.tenants import Permit, TenantBook, authenticate
from kvstore.server.tenants_file import load_tenants

log = logging.getLogger(__name__)


class NodeAccess:
    """The tenants of the node; without a file it is open to everybody who reaches it."""

    def __init__(self, path: Path | None) -> None:
        """Raises InvalidRequest as `load_tenants`."""
        self._path = path
        self._book = load_tenants(path) if path is not None else None

    @property
    def book(self) -> TenantBook | None:
        """The tenants now; None on an open node."""
        return self._book

    def permit_of(self, token: bytes) -> Permit | None:
        """What a token allows; None is everything. Raises Denied."""
        return None if self._book is None else authenticate(self._book, token)

    def reload(self) -> TenantBook | None:
        """Read the file again. Raises InvalidRequest, and goes on with the tenants as they were."""
        if self._path is not None:
            self._book = load_tenants(self._path)
            log.info("tenants file %s was read: %d tenants", self._path, len(self._book))
        return self._book
