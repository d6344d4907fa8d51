"""Readers and writers that go on while something happens to the cluster, and remember how each call went."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from kvstore.types.keys import KeyChain
from kvstore.types.results import Exists, Hit, Miss, Refused, Stored
from kvstore_bench.chains import Chains, ChainShape, WrongBytes, content_of
from kvstore_client.client import KVClient

_READ_CHUNKS: Final = 32
_WRITE_CHUNKS: Final = 8
_READ_PAUSE_SECONDS: Final = 0.005
_WRITE_PAUSE_SECONDS: Final = 0.05
_MATCH_EVERY: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call. Times are of the monotonic clock; `reasons` are those of items that did not succeed."""

    verb: str
    began_s: float
    seconds: float
    succeeded: int
    reasons: tuple[str, ...]


class Traffic:
    """One reader and one writer, each a thread with calls through one client. A context manager.

    Attributes:
        calls: All that have ended, in the order of their ends.
    """

    def __init__(self, client: KVClient, chains: Chains, *, seed: int, deadline_s: float = 2.0) -> None:
        """`chains` are stored, and only read here; what is written has chains of its own."""
        self.deadline_s = deadline_s
        self.calls: list[Call] = []
        self._client = client
        self._chains = chains
        self._seed = seed
        self._written: list[tuple[KeyChain, list[bool]]] = []
        self._fresh_shape = ChainShape(tokens=4_096, runs=8)
        self._end = threading.Event()
        self._failure: BaseException | None = None
        self._threads = [threading.Thread(target=self._guard, args=(loop,)) for loop in (self._read, self._write)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()
        if self._failure is not None and error is None:
            raise self._failure

    def check(self) -> None:
        """Raise what a thread has met: WrongBytes, or an exception that no call may raise."""
        if self._failure is not None:
            raise self._failure

    def longest_s(self, *, since_s: float = 0.0) -> float:
        """Of the calls that began after `since_s`."""
        return max((call.seconds for call in self.calls if call.began_s >= since_s), default=0.0)

    def ended_since(self, since_s: float, *verbs: str) -> list[Call]:
        """Calls of these verbs that began after `since_s`, and have ended."""
        return [call for call in list(self.calls) if call.began_s >= since_s and call.verb in verbs]

    def check_written(self, client: KVClient) -> float:
        """Read back what was acknowledged. A miss is legal; the share that is there is returned."""
        size = self._fresh_shape.chunk_bytes
        namespace = client.namespace(self._fresh_shape.namespace("traffic"))
        hits = stored = 0
        for keys, was_stored in self._written:
            buffers = [bytearray(size) for _ in keys]
            outcomes = namespace.get_into(keys, buffers)
            for key, buffer, outcome, wanted in zip(keys, buffers, outcomes, was_stored, strict=True):
                is_hit = isinstance(outcome, Hit)
                if is_hit and buffer != content_of(key.digest, size):
                    raise WrongBytes(f"seed {self._seed}: {key} is a hit with other bytes than were put")
                hits += is_hit and wanted
                stored += wanted
        return hits / stored if stored else 1.0

    def _guard(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except BaseException as error:  # noqa: BLE001 -- a thread's root: whoever leaves the block, or asks, gets it
            self._failure = error

    def _read(self) -> None:
        draw = random.Random(self._seed)
        bound = self._client.namespace(self._chains.namespace)
        turn = 0
        while not self._end.wait(_READ_PAUSE_SECONDS):
            turn += 1
            chain = draw.choice(self._chains.keys)
            began_s = time.monotonic()
            if turn % _MATCH_EVERY == 0:
                with bound.match(chain, deadline=self.deadline_s, pin_ttl=0) as match:
                    reasons = () if match.reason is None else (str(match.reason),)
                    self._ended("match", began_s, match.chunks, reasons)
                continue
            first = draw.randrange(len(chain) - _READ_CHUNKS)
            outcomes = self._chains.read_chain(bound, chain[first : first + _READ_CHUNKS], deadline=self.deadline_s)
            self._ended("get", began_s, *_counted(outcomes))

    def _write(self) -> None:
        bound = self._client.namespace(self._fresh_shape.namespace("traffic"))
        size = self._fresh_shape.chunk_bytes
        for keys in self._fresh_keys():
            if self._end.wait(_WRITE_PAUSE_SECONDS):
                return
            began_s = time.monotonic()
            outcomes = bound.put(keys, [content_of(key.digest, size) for key in keys], deadline=self.deadline_s)
            self._ended("put", began_s, *_counted(outcomes))
            self._written.append((keys, [isinstance(outcome, Stored | Exists) for outcome in outcomes]))

    def _fresh_keys(self) -> Iterator[KeyChain]:
        seed = self._seed
        while True:
            seed += 1
            (chain,) = Chains(count=1, seed=seed, shape=self._fresh_shape, model="traffic").keys
            for at in range(0, len(chain), _WRITE_CHUNKS):
                yield chain[at : at + _WRITE_CHUNKS]

    def _ended(self, verb: str, began_s: float, succeeded: int, reasons: tuple[str, ...]) -> None:
        seconds = time.monotonic() - began_s
        self.calls.append(Call(verb=verb, began_s=began_s, seconds=seconds, succeeded=succeeded, reasons=reasons))


def _counted(outcomes: Sequence[Hit | Miss | Stored | Exists | Refused]) -> tuple[int, tuple[str, ...]]:
    reasons = tuple(str(one.reason) for one in outcomes if isinstance(one, Miss | Refused))
    return len(outcomes) - len(reasons), reasons
