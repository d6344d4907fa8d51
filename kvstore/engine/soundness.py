"""Is a record on the drive what its index entry says? Eviction, scrub and check ask, who know no caller's key."""

from __future__ import annotations

from kvstore.engine.api import NamespaceRef
from kvstore.engine.format import INDEX_KEY_BYTES, Entries, decode_record_header, page_count
from kvstore.engine.namespaces import index_key
from kvstore.limits import PAGE_BYTES
from kvstore.types.checksum import crcs_match


def why_unsound(
    data: memoryview, entry: Entries, *, segment: int, generation: int, ref: NamespaceRef | None
) -> str | None:
    """What is wrong with a record, in words; None if all checksums, names and places agree.

    Args:
        data: the whole record as read.
        entry: its index entry, shape [1].
        segment, generation: where it was read from.
        ref: the entry's namespace; None leaves the key unchecked.
    """
    header = decode_record_header(data)
    if header is None:
        return "its header is damaged"
    if (header.segment, header.page, header.segment_generation) != (segment, int(entry["page"][0]), generation):
        return "its header was written for another place"
    if header.header_pages != int(entry["header_pages"][0]) or header.payload_bytes != int(entry["payload_bytes"][0]):
        return "its header has another length than the index"
    if page_count(header.header_pages * PAGE_BYTES + header.payload_bytes) != int(entry["pages"][0]):
        return "its header has another length than the index"
    if ref is not None and (
        header.namespace != ref.digest or index_key(ref, header.key) != entry.tobytes()[:INDEX_KEY_BYTES]
    ):
        return "its header has another key than the index"
    start = header.header_pages * PAGE_BYTES
    payload = data[start : start + header.payload_bytes]
    if len(payload) != header.payload_bytes:
        return "it was read short"
    if not crcs_match(payload, block_bytes=header.block_bytes, crcs=header.crc_table):
        return "its payload does not match its checksums"
    return None
