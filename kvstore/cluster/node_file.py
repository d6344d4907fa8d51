"""What a node keeps of itself between two starts: its name, how often it was started. Never per-chunk data."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from kvstore.errors import Closed, FormatUnsupported, InvalidRequest, Unavailable
from kvstore.limits import CLUSTER_VALUE_BYTES_MAX

_VERSION: Final = 1
_KEY: Final = re.compile(r"[a-z0-9_]+(/[a-z0-9_.:-]+)*")


class NodeFile:
    """Small values by name in one JSON file, replaced by rename and synced. For one process at a time.

    Names are paths such as "node/id"; values at most CLUSTER_VALUE_BYTES_MAX.

    Raises, from the constructor too:
        Unavailable: the file cannot be read or written.
        FormatUnsupported: the file is not ours, or of a newer version.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._values = _read(path)
        self._closed = False

    @property
    def path(self) -> Path:
        """The file."""
        return self._path

    def get(self, key: str) -> str | None:
        self._check_open()
        return self._values.get(_checked(key))

    def put(self, key: str, value: str) -> None:
        self._check_open()
        if len(value.encode()) > CLUSTER_VALUE_BYTES_MAX:
            raise InvalidRequest(f"value of {key!r} is larger than {CLUSTER_VALUE_BYTES_MAX} bytes; store less")
        if self._values.get(_checked(key)) == value:
            return
        values = self._values | {key: value}
        _write(self._path, values)
        self._values = values

    def all(self) -> dict[str, str]:
        """Everything it holds, as a copy."""
        self._check_open()
        return dict(self._values)

    def replace(self, values: Mapping[str, str]) -> None:
        """Hold these and nothing else: what another file's `all` gave."""
        self._check_open()
        _write(self._path, dict(values))
        self._values = dict(values)

    def close(self) -> None:
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"node file {self._path} is closed")


def replace_file(path: Path, content: bytes, *, mode: int = 0o666) -> None:
    """Make `path` hold `content`: a reader sees the old file or the new one, also after a power cut.

    For one process at a time: what an earlier one left when it was killed is written over. In a container that one had
    the same process id.

    Args:
        mode: of the new file, within the umask.

    Raises:
        OSError: as the file system says; `path` is unchanged.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.unlink(missing_ok=True)  # it would keep its mode
        with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _checked(key: str) -> str:
    if not _KEY.fullmatch(key):
        raise InvalidRequest(f"node file key {key!r} is not a path of lower case names")
    return key


def _read(path: Path) -> dict[str, str]:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise Unavailable(f"node file {path} cannot be read: {error.strerror}") from error
    try:
        stored = json.loads(content)
        version, values = stored["version"], stored["values"]
        sound = isinstance(values, dict) and all(isinstance(value, str) for value in values.values())
    except (ValueError, TypeError, KeyError) as error:
        raise FormatUnsupported(f"node file {path} is damaged ({error}); move it away to start anew") from error
    if version != _VERSION or not sound:
        raise FormatUnsupported(f"node file {path} has version {version!r}, this program reads {_VERSION}")
    return dict(values)


def _write(path: Path, values: dict[str, str]) -> None:
    content = json.dumps({"version": _VERSION, "values": values}, indent=1, sort_keys=True).encode()
    try:
        replace_file(path, content)
    except OSError as error:
        raise Unavailable(f"node file {path} cannot be written: {error.strerror}") from error
