"""Before the workers start: which of the data folders are usable, and which of the drives in them are ours.

The node notes its cluster id and which disk lies where in the node file of every data folder, so that it knows itself
when one of them is gone. Of a node on raw devices alone nothing is noted, and every drive is taken.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvstore.cluster.node_file import NodeFile
from kvstore.engine.format import UUID_BYTES
from kvstore.engine.identity import NO_CLUSTER, DriveContent
from kvstore.errors import FormatUnsupported, InvalidRequest, KVStoreError, Unavailable
from kvstore.server.drive_record import DriveVerdict, cluster_of, judge, look, unusable
from kvstore.server.places import STORE_FILE, prepare_data_dirs

log = logging.getLogger(__name__)

_CLUSTER_KEY: Final = "cluster/id"
_DRIVES_KEY: Final = "node/drives"
_BOOTS_KEY: Final = "node/boots"
_DEVICES: Final = "/dev/"


class NodeRecord:
    """The node file of every data folder as one: read from the newest, written to all. See `NodeFile`."""

    def __init__(self, files: Sequence[NodeFile]) -> None:
        """Args: files: one or more."""
        self._files = sorted(files, key=_boots_of, reverse=True)

    def get(self, key: str) -> str | None:
        """See `NodeFile.get`."""
        return self._files[0].get(key)

    def put(self, key: str, value: str) -> None:
        """See `NodeFile.put`. Raises Unavailable when no folder could keep it."""
        failures: list[Unavailable] = []
        for file in self._files:
            try:
                file.put(key, value)
            except Unavailable as error:
                failures.append(error)
        if len(failures) == len(self._files):
            raise failures[0]

    def close(self) -> None:
        """Idempotent."""
        for file in self._files:
            file.close()


def _boots_of(file: NodeFile) -> int:
    return int(file.get(_BOOTS_KEY) or 0)


def open_record(paths: Sequence[str]) -> NodeRecord | None:
    """The node's record in those data folders; None when all data lies on raw devices, or no folder can be read.

    Raises:
        FormatUnsupported: A node file is damaged, and no other folder has one.
    """
    files: list[NodeFile] = []
    failure: KVStoreError | None = None
    for path in map(Path, paths):
        if path.is_dir():
            try:
                files.append(NodeFile(path / STORE_FILE))
            except (FormatUnsupported, Unavailable) as error:
                failure = error
    if failure is not None and not any(_boots_of(file) for file in files):
        raise failure
    return NodeRecord(files) if files else None


def usable_paths(paths: Sequence[str]) -> tuple[list[str], list[DriveVerdict]]:
    """The data folders and devices that can be used, made where they are missing, and what is wrong with the others.

    Raises:
        InvalidRequest: None can be used.
    """
    good: list[str] = []
    bad: list[DriveVerdict] = []
    for path in paths:
        try:
            if path.startswith(_DEVICES) and not os.path.exists(path):
                raise InvalidRequest(f"data_dir {path}: the device is not there; plug it in, or name another")
            prepare_data_dirs([path])
            good.append(path)
        except InvalidRequest as error:
            bad.append(unusable(path, error))
    if not good:
        raise InvalidRequest("\n".join(verdict.detail for verdict in bad))
    return good, bad


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedDrives:
    """What the workers are given, and what not.

    Attributes:
        paths: drives to open.
        refused: the others, and why.
        cluster_id: whose drives these are, in hex.
    """

    paths: frozenset[str]
    refused: tuple[DriveVerdict, ...]
    cluster_id: str


def check_drives(paths: Sequence[str], bad: Sequence[DriveVerdict], record: NodeRecord | None) -> CheckedDrives:
    """Look at every drive, and decide which are opened.

    Args:
        paths: usable data folders and devices.
        bad: what is known of others already.

    Raises:
        FormatUnsupported: No drive is ours, or may become ours.
    """
    found = {path: look(path) for path in paths}
    contents = [one for one in found.values() if isinstance(one, DriveContent)]
    noted = noted_drives(record)
    kept = record.get(_CLUSTER_KEY) if record is not None else None
    fresh = os.urandom(UUID_BYTES) if record is not None else NO_CLUSTER
    cluster_id = bytes.fromhex(kept) if kept else cluster_of(contents) or fresh
    homes = {disk_id: path for path, disk_id in noted.items()}
    verdicts = [
        judge(path, one, expected_id=noted.get(_place(path), ""), cluster_id=cluster_id, homes=homes)
        if isinstance(one, DriveContent)
        else one
        for path, one in found.items()
    ]
    for verdict in verdicts:
        if not verdict.is_good:
            log.error("drive %s is not used: %s: %s", verdict.path, verdict.state, verdict.detail)
        elif verdict.detail:
            log.warning("drive %s: %s", verdict.path, verdict.detail)
    refused = (*bad, *(verdict for verdict in verdicts if not verdict.is_good))
    good = frozenset(verdict.path for verdict in verdicts if verdict.is_good)
    if not good:
        raise FormatUnsupported("\n".join(f"data_dir {verdict.path}: {verdict.detail}" for verdict in refused))
    return CheckedDrives(paths=good, refused=refused, cluster_id=cluster_id.hex())


def noted_drives(record: NodeRecord | None) -> dict[str, str]:
    """Which disk was where at the last start, by absolute path."""
    text = record.get(_DRIVES_KEY) if record is not None else None
    stored = json.loads(text) if text else {}
    return {str(path): str(disk_id) for path, disk_id in stored.items()} if isinstance(stored, dict) else {}


def note_drives(record: NodeRecord, ids: Mapping[str, str], cluster_id: str) -> None:
    """Note which disk is where now; what is not there stays noted, so that it is missed. Raises Unavailable."""
    here = {_place(path): disk_id for path, disk_id in ids.items()}
    others = {
        path: disk_id
        for path, disk_id in noted_drives(record).items()
        if path not in here and disk_id not in here.values()
    }
    record.put(_DRIVES_KEY, json.dumps(others | here, sort_keys=True))
    record.put(_CLUSTER_KEY, cluster_id)


def _place(path: str) -> str:
    return os.path.abspath(path)
