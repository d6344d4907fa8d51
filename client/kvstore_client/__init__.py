"""The client of kvstore, which needs neither gRPC nor torch. `errors` and the reasons complete the vocabulary."""

from __future__ import annotations

from kvstore import errors
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore.types.part import Part
from kvstore.types.results import Exists, Hit, Miss, MissReason, Refused, RefusedReason, Stored
from kvstore_client.aio import AsyncKVClient
from kvstore_client.client import KVClient

__all__ = [
    "AsyncKVClient",
    "Exists",
    "Hit",
    "KVClient",
    "KVLayout",
    "Miss",
    "MissReason",
    "Namespace",
    "Part",
    "Refused",
    "RefusedReason",
    "Stored",
    "errors",
]
