"""One small question to another worker: a message, and what is done with its answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvstore.errors import InvalidRequest, KVStoreError, Unavailable
from kvstore.wire.frames import Frame
from kvstore.wire.messages import End
from kvstore.wire.schema import Message


class Errand:
    """A `peer.PeerCall` that is answered by one frame of a known kind.

    Args:
        answer: The kind; END in its place is an answer of another kind, and refused.
        on_answer: Told the decoded answer.
        on_failed: Told instead why there is none.
    """

    def __init__(
        self,
        message: Message,
        answer: type[Message],
        on_answer: Callable[[Message], None],
        on_failed: Callable[[KVStoreError], None],
    ) -> None:
        self.message = message
        self._answer = answer
        self._on_answer = on_answer
        self.failed = on_failed

    def place(self, frame: Frame) -> Sequence[memoryview]:
        """Raises InvalidRequest: there is no payload in the answer."""
        raise InvalidRequest(f"{frame.type.name} in the answer to {self.message.TYPE.name}")

    def arrived(self, frame: Frame) -> bool:
        """See `PeerCall.arrived`."""
        if frame.type is not self._answer.TYPE:
            raise Unavailable(f"{self.message.TYPE.name} was answered with {frame.type.name}")
        self._on_answer(self._answer.decode(frame.body))
        return True


def end_of(answer: Message) -> End:
    """The answer as the END that it is."""
    assert isinstance(answer, End), "an errand decodes what it was told to expect"
    return answer
