"""Which drive belongs where: what lies in each data folder (`look`) against what the node has noted (`judge`, pure)."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvstore.engine.drive import data_file
from kvstore.engine.identity import NO_CLUSTER, ContentKind, DriveContent, check_cluster, look_at
from kvstore.errors import FormatUnsupported, InvalidRequest
from kvstore.server.report import DriveState


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveVerdict:
    """Whether a drive is opened.

    Attributes:
        path: as the setting names it.
        disk_id: of the store on it, "" if there is none.
        state: SERVING when it is opened.
        detail: why it is not, and the fix; or what is worth a line though it is opened.
    """

    path: str
    disk_id: str
    state: DriveState
    detail: str = ""

    @property
    def is_good(self) -> bool:
        """It is opened."""
        return self.state is DriveState.SERVING


class Bearing(Protocol):
    """By which ids a node knows its drives: see `kvstore.server.drive_owner.DriveOwner`."""

    @property
    def id(self) -> bytes:
        """Of the cluster; zeros accept the drives of any."""

    @property
    def own_id(self) -> bytes:
        """That the node drew while it was on its own."""


def look(path: str) -> DriveContent | DriveVerdict:
    """What lies in a data folder or on a device; a verdict where it cannot be read."""
    try:
        return look_at(data_file(path))
    except OSError as error:
        failed = DriveState.FAILED if error.errno == errno.EIO else DriveState.UNUSABLE
        detail = f"it cannot be read ({error.strerror}); check the drive and its rights, or replace it"
        return DriveVerdict(path=path, disk_id="", state=failed, detail=detail)


def unusable(path: str, error: InvalidRequest) -> DriveVerdict:
    """A folder that could not be made, or not written."""
    state = DriveState.READ_ONLY if "not writable" in str(error) else DriveState.UNUSABLE
    return DriveVerdict(path=path, disk_id="", state=state, detail=str(error))


def cluster_of(contents: Sequence[DriveContent]) -> bytes | None:
    """The cluster that all stores with a cluster agree on; None where they do not, or none has one."""
    found = {
        content.superblock.cluster_id
        for content in contents
        if content.superblock is not None and content.superblock.cluster_id != NO_CLUSTER
    }
    return found.pop() if len(found) == 1 else None


def judge(
    path: str, content: DriveContent, *, expected_id: str, owner: Bearing, places: Mapping[str, str]
) -> DriveVerdict:
    """Whether the drive in a folder is opened.

    Args:
        expected_id: the disk that was there at the last start, "" if the folder is new.
        owner: whose drives the node serves.
        places: where each disk was at the last start.
    """
    if content.kind is ContentKind.FOREIGN:
        return DriveVerdict(
            path=path,
            disk_id="",
            state=DriveState.FOREIGN,
            detail=f"something else than a store is on it; `kvstore drive format {path} --yes` erases it",
        )
    if content.kind is ContentKind.EMPTY and expected_id:
        return DriveVerdict(
            path=path,
            disk_id="",
            state=DriveState.EMPTY,
            detail=f"disk {expected_id} was here and nothing is: mount it again, or begin anew with "
            f"`kvstore drive format {path} --yes`",
        )
    superblock = content.superblock
    if superblock is None:
        return DriveVerdict(path=path, disk_id="", state=DriveState.SERVING)
    try:
        check_cluster(superblock, owner.id, path, own_id=owner.own_id)
    except FormatUnsupported as error:
        return DriveVerdict(path=path, disk_id=content.disk_id, state=DriveState.FOREIGN, detail=str(error))
    place = places.get(content.disk_id, "")
    moved = f"it was at {place} before; a drive is known by its own id, so nothing has to be done" if place else ""
    return DriveVerdict(
        path=path,
        disk_id=content.disk_id,
        state=DriveState.SERVING,
        detail=moved if place and data_file(place) != data_file(os.path.abspath(path)) else "",
    )
