"""What a process of the demo tells its parent: lines of JSON on its standard output."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields

from kvstore.errors import InvalidRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleReport:
    """The result of one part of the demo.

    Attributes:
        model: What was run, for a person.
        prompt_tokens: Tokens of the prompt.
        matched_tokens: Tokens that came from the store.
        chunks: Chunks written or restored.
        length_bytes: Payload bytes written or restored.
        store_ns: Time in the store's calls and in moving bytes to or from the cache.
        first_token_ns: From the prompt being there to its first generated token; 0 when nothing was generated.
        text: What was generated.
        trouble: Why it was less than it should be; else empty.
    """

    model: str
    prompt_tokens: int
    matched_tokens: int = 0
    chunks: int = 0
    length_bytes: int = 0
    store_ns: int = 0
    first_token_ns: int = 0
    text: str = ""
    trouble: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleNote:
    """Something to show while a part runs."""

    note: str


def to_line(message: RoleReport | RoleNote) -> str:
    """One line of JSON, without the end of line."""
    return json.dumps(asdict(message))


def from_line(line: str) -> RoleReport | RoleNote:
    """The message of a line. Raises InvalidRequest when it is none."""
    try:
        given = json.loads(line)
        return RoleNote(note=given["note"]) if set(given) == {"note"} else RoleReport(**given)
    except (ValueError, TypeError) as error:
        known = ", ".join(declared.name for declared in fields(RoleReport))
        raise InvalidRequest(f"a demo process printed {line[:200]!r}; expected JSON with {known}") from error
