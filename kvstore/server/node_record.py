"""What a node keeps of itself between two starts: in every data folder, since any of them may be gone by then."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

from kvstore.cluster.node_file import NodeFile
from kvstore.errors import FormatUnsupported, KVStoreError, Unavailable
from kvstore.server.places import STORE_FILE

NODE_ID_KEY: Final = "node/id"
DROPS_KEY: Final = "drops"
_BOOTS_KEY: Final = "node/boots"

log = logging.getLogger(__name__)


class NodeRecord:
    """The node file of every data folder as one: read from the newest, written to all. See `NodeFile`.

    Args:
        files: one or more.
        strangers: the records of other nodes, neither read nor written until they are taken over.
    """

    def __init__(self, files: Sequence[NodeFile], strangers: Sequence[NodeFile] = ()) -> None:
        self._files = sorted(files, key=_boots_of, reverse=True)
        self._strangers = list(strangers)

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

    def take_over(self, folders: Collection[str]) -> None:
        """Put this record in the place of another node's, in folders whose drives are this node's from now on.

        One that still has drops to make up for, which nobody else would remember, stays as it is.

        Raises:
            Unavailable: It cannot be written.
        """
        mine = max(self._files, key=_boots_of).all()  # the first is not the newest when it could not be written
        own_name = mine.get(NODE_ID_KEY)
        places = {Path(folder) for folder in folders}
        for file in tuple(self._strangers):
            name = file.get(NODE_ID_KEY)
            if file.path.parent not in places or json.loads(file.get(DROPS_KEY) or "[]"):
                log.warning("%s is left as it is: it is of node %s, and this one is %s", file.path, name, own_name)
                continue
            file.replace(mine)
            self._strangers.remove(file)
            self._files.append(file)
            log.info("%s was of node %s, and is of node %s now", file.path, name, own_name)

    def close(self) -> None:
        """Idempotent."""
        for file in (*self._files, *self._strangers):
            file.close()


def _boots_of(file: NodeFile) -> int:
    return int(file.get(_BOOTS_KEY) or 0)


def open_record(paths: Sequence[str], node_id: str = "") -> NodeRecord | None:
    """The node's record in those data folders; None when all data lies on raw devices, or no folder can be read.

    A folder with the record of another node, whose drive was plugged in here, keeps that until it is taken over: it
    would not know its own drive any more. Ours is the one of `node_id`, else that of most folders, else the first.

    Args:
        paths: data folders and raw devices, in the order of the settings.
        node_id: as it is set; "" when it is not.

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
    return _of_one_node(files, node_id) if files else None


def _of_one_node(files: Sequence[NodeFile], node_id: str) -> NodeRecord:
    names = Counter(name for file in files if (name := file.get(NODE_ID_KEY)))
    ours = node_id if node_id in names else next((name for name, _ in names.most_common(1)), None)
    kept = [file for file in files if file.get(NODE_ID_KEY) in (None, ours)]
    return NodeRecord(kept, [file for file in files if file not in kept])
