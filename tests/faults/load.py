"""Clients at work on a node: threads that put, get, wait and delete chunks of known content until told to stop.

Each thread is the only writer of its documents; every thread reads everything. What was begun and how it ended goes to
`on_event`, one event at a time.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from kvstore.errors import Unavailable
from kvstore.types.keys import KeyChain
from kvstore.types.results import Exists, Hit, Miss, Refused, Stored
from kvstore_client import KVClient
from kvstore_client.namespace_handle import BoundNamespace
from tests.faults.content import DOCUMENT_CHUNKS, chain_slice, chunk_bytes, namespace, payload
from tests.faults.ledger import Deed, Event, Outcome, delete_outcome, put_outcome
from tests.faults.node import READY_S

T = TypeVar("T")

DEADLINE_S: Final = 2.0
WRITER_TTL_S: Final = 5.0
PAUSE_S: Final = 0.05  # after a call that a dead node could not answer: not to burn the processor it starts on
_DOWN: Final = ("UNAVAILABLE", "OUTCOME_UNKNOWN", "OVERLOADED")


def patient_client(address: str) -> KVClient:
    """A client of a node that serves, but answers later than a connection waits: its processor is emulated, or busy."""
    end = time.monotonic() + READY_S
    while True:
        try:
            return KVClient.connect(address)
        except Unavailable:
            if time.monotonic() > end:
                raise


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """What the threads do.

    Attributes:
        seed: of every random choice.
        threads: writers; each also reads.
        put_bytes_max: payload bytes that may be begun in all; after them only gets and deletes.
        first_document: documents are numbered from here.
        power_share: of the puts, how many ask for durability="power".
        deadline_s: of each call.
    """

    seed: int
    threads: int = 4
    put_bytes_max: int = 8 << 20
    first_document: int = 0
    power_share: float = 0.2
    deadline_s: float = DEADLINE_S


class Load:
    """The threads, between `start` and `stop`.

    Attributes:
        counts: calls by verb and what came of their items.
        faults: what must never be: wrong bytes, exceptions.
        late_s: the longest that a call took beyond its deadline.
    """

    def __init__(self, address: str, plan: LoadPlan, on_event: Callable[[Event], None]) -> None:
        self.plan = plan
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self.late_s = 0.0
        self._address = address
        self._on_event = on_event
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._begun_bytes = 0
        self._next_document = plan.first_document
        self._threads = [
            threading.Thread(target=self._run, args=(number,), name=f"load-{number}", daemon=True)
            for number in range(plan.threads)
        ]
        # two threads share a client, as the threads of an inference worker do
        self._clients = [patient_client(address) for _ in range((plan.threads + 1) // 2)]

    @property
    def next_document(self) -> int:
        """The first document that nobody has begun."""
        return self._next_document

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def run_for(self, length_s: float) -> None:
        """Start, work for so long, stop."""
        self.start()
        self._stop.wait(length_s)
        self.stop()

    def stop(self) -> None:
        """Let every call end, then close the clients."""
        self._stop.set()
        for thread in self._threads:
            thread.join(30 + 4 * self.plan.deadline_s)
            assert not thread.is_alive(), f"{thread.name} hangs in a call"
        for client in self._clients:
            client.close()

    def _run(self, number: int) -> None:
        worker = _Worker(self, self._clients[number // 2].namespace(namespace()), f"{self.plan.seed}/{number}")
        try:
            while not self._stop.is_set():
                worker.step()
        except Exception as error:  # noqa: BLE001 -- the root of a thread: a client must never raise for a node's trouble
            with self._lock:
                self.faults.append(f"thread {number}: {type(error).__name__}: {error}")

    def record(self, event: Event) -> None:
        """Take note of an event; callers come one at a time."""
        with self._lock:
            self._on_event(event)

    def count(self, verb: str, results: Sequence[object]) -> None:
        """Take note of outcomes."""
        with self._lock:
            for result in results:
                name = type(result).__name__
                reason = getattr(result, "reason", None)
                self.counts[f"{verb} {name}" + (f" {reason.name}" if reason is not None else "")] += 1

    def fault(self, what: str) -> None:
        """Take note of what must never be."""
        with self._lock:
            self.faults.append(what)

    def took(self, elapsed_s: float) -> None:
        """Take note of a call's length."""
        with self._lock:
            self.late_s = max(self.late_s, elapsed_s - self.plan.deadline_s)

    def new_document(self) -> int | None:
        """A document that nobody has begun, or None when enough was put."""
        with self._lock:
            if self._begun_bytes >= self.plan.put_bytes_max:
                return None
            self._next_document += 1
            return self._next_document - 1

    def begins(self, length_bytes: int) -> None:
        with self._lock:
            self._begun_bytes += length_bytes

    def any_document(self, choice: random.Random) -> int:
        """One that may have been begun, by any thread."""
        return choice.randint(self.plan.first_document, max(self.plan.first_document, self._next_document))


class _Worker:
    """One thread's choices: documents that it owns, grown chunk by chunk as a conversation grows."""

    def __init__(self, load: Load, store: BoundNamespace, seed: str) -> None:
        self._load = load
        self._store = store
        self._choice = random.Random(seed)
        self._grown: dict[int, int] = {}  # document -> chunks put so far
        self._deleted: list[list[int]] = []
        self._is_down = False

    def step(self) -> None:
        """One call."""
        roll = self._choice.random()
        if self._is_down:
            self._get()  # nobody answers: no use in beginning more
        elif roll < 0.5:
            self._put()
        elif roll < 0.6 and self._grown:
            self._delete()
        else:
            self._get()

    def _put(self) -> None:
        keys = self._keys_to_put()
        if not keys:
            self._get()
            return
        power = self._choice.random() < self._load.plan.power_share
        received = not power and self._choice.random() < 0.15
        deed = Deed.POWER_PUT if power else Deed.PUT
        self._load.begins(sum(map(chunk_bytes, keys)))
        self._load.record(Event.begin(deed, keys))
        chain = chain_slice(self._store.namespace, keys)
        durability = "power" if power else "commit"
        if self._choice.random() < 0.15:
            received = False
            results = self._write_layers(keys, chain, durability)
            self._load.count("writer", results)
        else:
            results = self._timed(
                lambda: self._store.put(
                    chain,
                    [payload(key) for key in keys],
                    wait="received" if received else "durable",
                    durability=durability,
                    deadline=self._load.plan.deadline_s,
                )
            )
            self._load.count("put", results)
        outcomes = tuple(map(put_outcome, results))
        if received and Outcome.UNKNOWN in outcomes:
            waited = self._timed(lambda: self._store.wait(chain, self._load.plan.deadline_s))
            self._load.count("wait", waited)
            outcomes = tuple(
                Outcome.DONE if isinstance(one, Hit) else outcome for one, outcome in zip(waited, outcomes, strict=True)
            )
        self._load.record(Event(deed=deed, keys=tuple(keys), outcomes=outcomes))
        self._rest(results)

    def _write_layers(self, keys: Sequence[int], chain: KeyChain, durability: str) -> list[Stored | Exists | Refused]:
        """The same by a layer-wise writer, two pieces a chunk."""
        deadline_s = self._load.plan.deadline_s
        lengths = [chunk_bytes(key) for key in keys]
        writer = self._timed(lambda: self._store.writer(chain, lengths=lengths, ttl=WRITER_TTL_S, deadline=deadline_s))
        with writer:
            for index, key in enumerate(keys):
                half = lengths[index] // 2
                for offset, piece in ((0, payload(key)[:half]), (half, payload(key)[half:])):
                    if piece:
                        writer.write(index, piece, offset=offset, deadline=deadline_s)
            return self._timed(lambda: writer.commit(durability=durability, deadline=deadline_s))

    def _keys_to_put(self) -> list[int]:
        roll = self._choice.random()
        if roll < 0.1 and self._deleted:
            return self._deleted.pop()
        growing = [document for document, chunks in self._grown.items() if chunks < DOCUMENT_CHUNKS]
        document = self._choice.choice(growing) if growing and roll < 0.6 else self._load.new_document()
        if document is None:
            return []
        start = self._grown.get(document, 0)
        stop = min(DOCUMENT_CHUNKS, start + self._choice.randint(1, 8))
        self._grown[document] = stop
        return list(range(document * DOCUMENT_CHUNKS + start, document * DOCUMENT_CHUNKS + stop))

    def _delete(self) -> None:
        document = self._choice.choice(list(self._grown))
        start = self._choice.randrange(self._grown[document])
        stop = min(self._grown[document], start + self._choice.randint(1, 4))
        keys = list(range(document * DOCUMENT_CHUNKS + start, document * DOCUMENT_CHUNKS + stop))
        self._load.record(Event.begin(Deed.DELETE, keys))
        chain = chain_slice(self._store.namespace, keys)
        results = self._timed(lambda: self._store.delete(chain, deadline=self._load.plan.deadline_s))
        self._load.count("delete", results)
        self._load.record(Event(deed=Deed.DELETE, keys=tuple(keys), outcomes=tuple(map(delete_outcome, results))))
        self._deleted.append(keys)
        self._rest(results)

    def _get(self) -> None:
        document = self._load.any_document(self._choice)
        start = self._choice.randrange(DOCUMENT_CHUNKS)
        stop = min(DOCUMENT_CHUNKS, start + self._choice.randint(1, DOCUMENT_CHUNKS))
        keys = list(range(document * DOCUMENT_CHUNKS + start, document * DOCUMENT_CHUNKS + stop))
        results, wrong = self._timed(
            lambda: read(
                self._store,
                keys,
                deadline_s=self._load.plan.deadline_s,
                accept_pending=self._choice.random() < 0.3,
            )
        )
        self._load.count("get", results)
        for what in wrong:
            self._load.fault(what)
        self._rest(results)

    def _timed(self, call: Callable[[], T]) -> T:
        began = time.monotonic()
        answer = call()
        self._load.took(time.monotonic() - began)
        return answer

    def _rest(self, results: Sequence[Stored | Exists | Refused | Hit | Miss]) -> None:
        self._is_down = bool(results) and all(
            isinstance(one, Miss | Refused) and one.reason.name in _DOWN for one in results
        )
        if self._is_down:
            time.sleep(PAUSE_S)


def read(
    store: BoundNamespace, keys: Sequence[int], *, deadline_s: float, accept_pending: bool = False
) -> tuple[list[Hit | Miss], list[str]]:
    """Gets consecutive chunks of a document: the results, and what is wrong with the bytes of hits."""
    buffers = [bytearray(b"\xaa" * chunk_bytes(key)) for key in keys]
    chain = chain_slice(store.namespace, keys)
    results = store.get_into(chain, buffers, deadline=deadline_s, accept_pending=accept_pending)
    wrong = [
        f"key {key}: a hit of {result.length_bytes} bytes, {len(buffer)} expected, first difference at "
        f"{next((at for at, pair in enumerate(zip(buffer, payload(key), strict=False)) if pair[0] != pair[1]), None)}"
        for key, buffer, result in zip(keys, buffers, results, strict=True)
        if isinstance(result, Hit) and (result.length_bytes != len(buffer) or buffer != payload(key))
    ]
    return results, wrong
