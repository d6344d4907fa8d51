"""Before the workers start: which of the data folders are usable, and which of the drives in them are ours.

The node notes which disk lies where, so that one that is gone is missed. Of a node on raw devices alone nothing is
noted, and every drive is taken.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.engine.identity import NO_CLUSTER, DriveContent
from kvstore.errors import FormatUnsupported, InvalidRequest
from kvstore.server.drive_owner import DriveOwner
from kvstore.server.drive_record import DriveVerdict, judge, look, unusable
from kvstore.server.node_record import NodeRecord
from kvstore.server.places import prepare_data_dirs

log = logging.getLogger(__name__)

_DRIVES_KEY: Final = "node/drives"
_DEVICES: Final = "/dev/"


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
        owner: whose drives these are.
        adopted: those of `paths` that are this node's from now on, whoever had them before.
    """

    paths: frozenset[str]
    refused: tuple[DriveVerdict, ...]
    owner: DriveOwner
    adopted: frozenset[str] = frozenset()


def contents_of(paths: Sequence[str]) -> dict[str, DriveContent | DriveVerdict]:
    """What lies on each drive; a verdict where it cannot be read."""
    return {path: look(path) for path in paths}


def check_drives(
    found: Mapping[str, DriveContent | DriveVerdict],
    bad: Sequence[DriveVerdict],
    record: NodeRecord | None,
    owner: DriveOwner,
) -> CheckedDrives:
    """Decide which drives are opened.

    Args:
        found: what lies on the usable ones.
        bad: what is known of others already.

    Raises:
        FormatUnsupported: No drive is ours, or may become ours.
    """
    noted = noted_drives(record)
    places = {disk_id: path for path, disk_id in noted.items()}
    verdicts = [
        judge(path, one, expected_id=noted.get(_place(path), ""), owner=owner, places=places)
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
    adopted = frozenset(path for path in good if _is_adopted(found[path], owner))
    return CheckedDrives(paths=good, refused=refused, owner=owner, adopted=adopted)


def _is_adopted(content: DriveContent | DriveVerdict, owner: DriveOwner) -> bool:
    """Whether it did not just move within a cluster, from where it may go back."""
    if not isinstance(content, DriveContent) or content.superblock is None:
        return False
    return not owner.cluster or content.superblock.cluster_id == NO_CLUSTER


def noted_drives(record: NodeRecord | None) -> dict[str, str]:
    """Which disk was where at the last start, by absolute path."""
    text = record.get(_DRIVES_KEY) if record is not None else None
    stored = json.loads(text) if text else {}
    return {str(path): str(disk_id) for path, disk_id in stored.items()} if isinstance(stored, dict) else {}


def note_drives(record: NodeRecord, ids: Mapping[str, str], paths: Sequence[str]) -> None:
    """Note which disk is where now.

    Args:
        ids: of the disks that are served, by path.
        paths: all data folders and devices of the node. What is missing in one of them stays noted, so that it is
            missed; what was noted of places that the node has no more is forgotten.

    Raises:
        Unavailable: It cannot be written.
    """
    here = {_place(path): disk_id for path, disk_id in ids.items()}
    ours = set(map(_place, paths))
    others = {
        path: disk_id
        for path, disk_id in noted_drives(record).items()
        if path in ours and path not in here and disk_id not in here.values()
    }
    record.put(_DRIVES_KEY, json.dumps(others | here, sort_keys=True))


def _place(path: str) -> str:
    return os.path.abspath(path)
