"""What a node keeps of itself between two starts: in every data folder, since any of them may be gone by then."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvstore.cluster.node_file import NodeFile
from kvstore.errors import FormatUnsupported, KVStoreError, Unavailable
from kvstore.server.places import STORE_FILE

NODE_ID_KEY: Final = "node/id"
_BOOTS_KEY: Final = "node/boots"

log = logging.getLogger(__name__)


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


def open_record(paths: Sequence[str], node_id: str = "") -> NodeRecord | None:
    """The node's record in those data folders; None when all data lies on raw devices, or no folder can be read.

    A folder with the record of another node, whose drive was plugged in here, keeps that: it would not know its own
    drive any more. Ours is the one of `node_id`, else that of most folders, else the first.

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
    return NodeRecord(_of_one_node(files, node_id)) if files else None


def _of_one_node(files: Sequence[NodeFile], node_id: str) -> list[NodeFile]:
    names = Counter(name for file in files if (name := file.get(NODE_ID_KEY)))
    ours = node_id if node_id in names else next((name for name, _ in names.most_common(1)), None)
    kept: list[NodeFile] = []
    for file in files:
        name = file.get(NODE_ID_KEY)
        if name in (None, ours):
            kept.append(file)
        else:
            log.warning("%s is left as it is: it is of node %s, and this one is %s", file.path, name, ours)
            file.close()
    return kept
