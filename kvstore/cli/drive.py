"""`kvstore drive`: let a node have a drive that is not its own, or make one empty, while no node has it open."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvstore.engine.drive import data_file
from kvstore.engine.identity import ContentKind, DriveContent, erase_drive, look_at, release_drive
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.server.summary import words_of_bytes

Ask = Callable[[str], bool]


def adopt(path: Path, *, ask: Ask) -> dict[str, object]:
    """Lets the next node that is started with the drive serve what is on it.

    Raises:
        InvalidRequest: There is no store, or it was not confirmed.
        Unavailable: A node has the drive open, or it fails.
    """
    content = _content(path)
    if content.superblock is None:
        raise InvalidRequest(f"{path} holds no store ({_words(content)}); `kvstore drive format {path}` makes it empty")
    _confirm(ask, f"{path} holds {_words(content)}. Let the next node that is started with it serve that?")
    released = release_drive(data_file(path))
    return {"path": str(path), "disk_id": released.disk_id.hex(), "adopted": True}


def erase(path: Path, *, ask: Ask) -> dict[str, object]:
    """Makes the drive empty; the next node that is started with it formats it.

    Raises:
        InvalidRequest: It is no data folder, file or block device, may not be read, or it was not confirmed.
        Unavailable: A node has the drive open, or it fails.
    """
    content = _content(path)
    _confirm(ask, f"{path} holds {_words(content)}. Erase it?")
    erase_drive(data_file(path))
    return {"path": str(path), "formatted": True}


def _content(path: Path) -> DriveContent:
    try:
        if not path.exists():
            raise InvalidRequest(f"{path} does not exist; name a data_dir of a node, or its device")
        return look_at(data_file(path))
    except PermissionError as error:
        raise InvalidRequest(f"{path} cannot be read ({error.strerror}); run this as the node's user or root") from None
    except OSError as error:
        raise Unavailable(f"{path} cannot be read ({error.strerror}); check the drive") from None


def _words(content: DriveContent) -> str:
    superblock = content.superblock
    if superblock is not None:
        return f"disk {superblock.disk_id.hex()}, a store of {words_of_bytes(superblock.capacity_bytes)}"
    if content.kind is ContentKind.FOREIGN:
        return "something that is no store of kvstore"
    return "nothing"


def _confirm(ask: Ask, question: str) -> None:
    if not ask(question):
        raise InvalidRequest("not confirmed, nothing was changed; pass --yes to go on without being asked")
