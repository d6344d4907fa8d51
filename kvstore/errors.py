"""The one tree of errors, shaped by what the caller does next.

A message names the thing, the value, the limit and the fix. Foreign exceptions (OSError, grpc.RpcError, ...) are mapped
to these in one place per room, and never cross a room's border.
"""

from __future__ import annotations


class KVStoreError(Exception):
    """Root of every error that kvstore raises on purpose."""


class InvalidRequest(KVStoreError):
    """The caller must change the request; sending it again cannot help."""


class Denied(InvalidRequest):
    """The caller's token does not allow this."""


class UnknownNamespace(InvalidRequest):
    """The node has not seen the namespace's manifest; send it, then ask again."""


class Retryable(KVStoreError):
    """Try again inside the retry budget, or treat the read as a miss."""


class Overloaded(Retryable):
    """A bounded queue or pool is full."""


class Unavailable(Retryable):
    """The peer or the drive cannot serve now."""


class DeadlineExceeded(Retryable):
    """The time given for the call has run out."""


class StaleView(KVStoreError):
    """The caller planned with an old view; refresh it and plan again."""


class LeaseExpired(KVStoreError):
    """A pin, a writer or a membership lease ran out; take a new one and plan again."""


class OutcomeUnknown(KVStoreError):
    """The request may or may not have been carried out; only idempotent requests may be retried."""


class ChecksumMismatch(KVStoreError):
    """Stored or received bytes do not match their checksum: a miss, quarantined and counted."""


class FormatUnsupported(KVStoreError):
    """Bytes on disk or wire of a version or with features that this program does not know."""


class NoSpace(KVStoreError):
    """No room even after eviction: drop the write."""


class QuotaExceeded(NoSpace):
    """The tenant's share is used up: drop the write."""


class Closed(KVStoreError):
    """The object was closed before the call."""


class ForkedClient(Closed):
    """The object belongs to the parent process; make a new one after fork."""


class Internal(KVStoreError):
    """A defect of ours; please report it with the message."""
