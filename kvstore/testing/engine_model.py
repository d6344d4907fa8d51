"""Any engine against a dict: a miss is legal, a wrong value never, and what is durable stays unless it was evicted.

A test module makes a machine of its subject:

    class TestMine(EngineMachine.TestCase): ...        # see `machine_of`

The model keeps, for each key, the values that a get may bring. It grows by every put whose outcome is not known, and
shrinks to one value with each put that was acknowledged and each get that hit, to none with a delete or a drop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.engine.api import Durability, Engine, NamespaceRef, ReadHandle
from kvstore.limits import SECOND_NS
from kvstore.testing.engine_driver import Collector, Driver, Outcome
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore.types.results import Exists, MissReason, Refused, RefusedReason, Stored

KEYS = 24
LENGTHS = (0, 1, 4095, 4096, 4097, 30_000, 200_000)
_TENANTS = ("red", "blue")

Slot = tuple[int, int]
"""(namespace number, key number)."""


class Subject(Protocol):
    """What is tested, and what the machine may do to it.

    Attributes:
        can_restart, can_fail: whether `restart` and `inject` do anything.
    """

    @property
    def engine(self) -> Engine:
        """The one in use now."""

    @property
    def can_restart(self) -> bool: ...

    @property
    def can_fail(self) -> bool: ...

    def restart(self, *, crash: bool) -> None:
        """Close and open again on the same drive, or die in the middle of everything and open again."""

    def inject(self, number: int) -> None:
        """Arm one fault, chosen by a number."""

    def heal(self) -> None:
        """Disarm all faults."""

    def lost(self) -> int:
        """How many records went for a reason that is legal: evicted, quarantined, refused by the drive. Never falls."""

    def check(self) -> None:
        """What must hold of its insides at any moment."""

    def close(self) -> None:
        """End it, and check that nothing leaks."""


@dataclass(slots=True)
class Known:
    """What the model knows of one key.

    Attributes:
        values: what a get may bring.
        durable: a put of it was acknowledged, and nothing has ended it since.
        lost: `Subject.lost` before it was put.
    """

    values: set[bytes] = field(default_factory=set)
    durable: bool = False
    lost: int = 0


def payload_of(number: int, variant: int, length: int) -> bytes:
    """Bytes that tell key and writer."""
    seed = f"{number}/{variant}/".encode()
    return (seed * (length // len(seed) + 1))[:length]


def key_of(number: int) -> bytes:
    """Record key number so and so."""
    return (number + 1).to_bytes(16, "big")[::-1] + number.to_bytes(16, "little")


key_numbers = st.integers(0, KEYS - 1)
spaces = st.integers(0, len(_TENANTS) - 1)
lengths = st.sampled_from(LENGTHS)


class EngineMachine(RuleBasedStateMachine):
    """The rules. A subclass says in `make_subject` what they are played with."""

    make_subject: Callable[[], Subject]

    def __init__(self) -> None:
        super().__init__()
        self.subject = type(self).make_subject()
        self.driver = Driver(self.subject.engine, on_stall=self._let_go)
        self.refs: list[NamespaceRef] = []
        self.model: dict[Slot, Known] = {}
        self.pins: list[int] = []
        self.held: dict[int, tuple[int, set[Slot]]] = {}  # by pin: until when, and which keys
        self.faulty = False
        self.next_number = KEYS
        self.open_reads: list[tuple[Collector, list[Slot], ReadHandle]] = []

    @initialize()
    def register(self) -> None:
        """Both namespaces exist from the start."""
        self.refs = [self.driver.namespace(manifest_of(number)) for number in range(len(_TENANTS))]

    # --- writing ------------------------------------------------------------------------------------------------------
    @rule(
        space=spaces,
        first=key_numbers,
        count=st.integers(1, 8),
        length=lengths,
        variant=st.integers(0, 3),
        power=st.booleans(),
    )
    def put_run(self, space: int, first: int, count: int, length: int, variant: int, power: bool) -> None:
        """Put consecutive chunks of a chain."""
        numbers = [first + at for at in range(count) if first + at < KEYS]
        records = [(key_of(number), payload_of(number, variant, length)) for number in numbers]
        lost = self.subject.lost()  # before: the first of a batch may be evicted for the last
        outcomes = self.driver.put(
            self.refs[space],
            records,
            chain=True,
            first_position=first,
            parent=key_of(first - 1) if first else bytes(32),
            durability=Durability.POWER if power else Durability.COMMIT,
        )
        for number, (_, value), outcome in zip(numbers, records, outcomes, strict=True):
            self._note_put((space, number), value, outcome, lost)

    @rule(space=spaces, numbers=st.lists(key_numbers, min_size=1, max_size=6), length=lengths)
    def put_any(self, space: int, numbers: list[int], length: int) -> None:
        """Put keys in any order, some perhaps twice and then with other bytes."""
        records = [(key_of(number), payload_of(number, at, length)) for at, number in enumerate(numbers)]
        lost = self.subject.lost()
        outcomes = self.driver.put(self.refs[space], records)
        # Of equal keys the one that was stored counts, whichever order the outcomes have.
        pairs = list(zip(numbers, records, outcomes, strict=True))
        for number, (_, value), outcome in sorted(pairs, key=lambda pair: isinstance(pair[2], Exists)):
            self._note_put((space, number), value, outcome, lost)

    @rule(space=spaces, count=st.integers(4, 12), length=st.sampled_from([150_000, 300_000]))
    def churn(self, space: int, count: int, length: int) -> None:
        """Put many fresh keys, so that older ones have to go."""
        numbers = list(range(self.next_number, self.next_number + count))
        self.next_number += count
        records = [(key_of(number), payload_of(number, 0, length)) for number in numbers]
        lost = self.subject.lost()
        outcomes = self.driver.put(self.refs[space], records, chain=True)
        for number, (_, value), outcome in zip(numbers, records, outcomes, strict=True):
            self._note_put((space, number), value, outcome, lost)
        self.get(space, numbers[-3:] + [number % KEYS for number in numbers[:3]])

    def _note_put(self, slot: Slot, value: bytes, outcome: Outcome, lost: int) -> None:
        known = self.model.setdefault(slot, Known())
        if isinstance(outcome, Stored):
            self.model[slot] = Known(values={value}, durable=True, lost=lost)
        elif isinstance(outcome, Exists):
            assert known.values, f"Exists for {slot}, which nobody has put"
        elif outcome.reason is RefusedReason.OUTCOME_UNKNOWN:
            known.values.add(value)
        else:
            assert isinstance(outcome, Refused)

    # --- reading ------------------------------------------------------------------------------------------------------
    @rule(space=spaces, numbers=st.lists(key_numbers, max_size=10))
    def get(self, space: int, numbers: list[int]) -> None:
        """Read whole records."""
        answers = self.driver.get(self.refs[space], [key_of(number) for number in numbers])
        for number, answer in zip(numbers, answers, strict=True):
            self._check_answer((space, number), answer)

    @rule(space=spaces, numbers=st.lists(key_numbers, min_size=1, max_size=4), start=st.integers(0, 9), size=lengths)
    def get_range(self, space: int, numbers: list[int], start: int, size: int) -> None:
        """Read a range of some records; those that are shorter are a miss."""
        offset = start * 1111
        sink = Collector(len(numbers))
        spec = self.driver.read_spec(
            self.refs[space], [key_of(number) for number in numbers], ranges=[[(offset, size)]]
        )
        self.driver.engine.read(spec, sink, now_ns=self.driver.now_ns)
        self.driver.run_until(lambda: sink.done)
        for at, number in enumerate(numbers):
            known = self.model.get((space, number), Known())
            for begin, piece in sink.pieces[at]:
                fits = [value for value in known.values if value[begin : begin + len(piece)] == piece]
                assert fits, f"range of {(space, number)} at {begin} brought bytes that nobody put"
            if isinstance(sink.answers[at], bytes) and size:
                covered = sum(len(piece) for _, piece in sink.pieces[at])
                assert covered >= size
                assert min(begin for begin, _ in sink.pieces[at]) <= offset

    @rule(space=spaces, numbers=st.lists(key_numbers, min_size=1, max_size=8))
    def begin_read(self, space: int, numbers: list[int]) -> None:
        """Start a read that others of the rules run into."""
        sink = Collector(len(numbers), hold=True)
        spec = self.driver.read_spec(self.refs[space], [key_of(number) for number in numbers])
        expected = [(space, number) for number in numbers]
        handle = self.driver.engine.read(spec, sink, now_ns=self.driver.now_ns)
        self.open_reads.append((sink, expected, handle))
        self._allow_what_is_known(expected)

    def _allow_what_is_known(self, slots: list[Slot]) -> None:
        """A read that began earlier may still bring what was there then."""
        self._then = getattr(self, "_then", {})
        for slot in slots:
            self._then.setdefault(slot, set()).update(self.model.get(slot, Known()).values)

    @precondition(lambda self: self.open_reads)
    @rule()
    def end_reads(self) -> None:
        """Finish the reads that are open."""
        while self.open_reads:
            sink, slots, _ = self.open_reads.pop()
            while not sink.done:
                sink.let_go()
                self.driver.run_until(lambda sink=sink: sink.done or bool(sink.held))  # type: ignore[misc]
            sink.let_go()
            for slot, answer in zip(slots, sink.answers, strict=True):
                allowed = self.model.get(slot, Known()).values | self._then.get(slot, set())
                assert not isinstance(answer, bytes) or answer in allowed, f"{slot} brought bytes that nobody put"
        self._then = {}

    def _let_go(self) -> None:
        """Somebody waits for memory that the open reads hold."""
        for sink, _, _ in self.open_reads:
            sink.let_go()
            sink.hold = True

    def _check_answer(self, slot: Slot, answer: bytes | MissReason | None) -> None:
        known = self.model.get(slot, Known())
        if isinstance(answer, bytes):
            assert answer in known.values, f"{slot} brought bytes that nobody put: {answer[:40]!r}"
            known.values.intersection_update({answer})
        elif known.durable and not self.faulty:
            assert self.subject.lost() > known.lost, f"{slot} is durable, nothing was lost, yet it is a {answer!r}"
            assert answer is not MissReason.EVICTED or not self._is_held(slot), f"{slot} is pinned, yet it was evicted"

    def _is_held(self, slot: Slot) -> bool:
        return any(slot in slots and self.driver.now_ns < until_ns for until_ns, slots in self.held.values())

    @rule(space=spaces, first=key_numbers, count=st.integers(1, KEYS), pin=st.booleans())
    def match(self, space: int, first: int, count: int, pin: bool) -> None:
        """Look up a chain, perhaps with a pin."""
        until_ns = self.driver.now_ns + 30 * SECOND_NS
        numbers = [first + at for at in range(count) if first + at < KEYS]
        outcome = self.driver.match(
            self.refs[space], [key_of(number) for number in numbers], pin_ns=30 * SECOND_NS if pin else 0
        )
        assert len(outcome.statuses) == len(numbers)
        for number, status in zip(numbers, outcome.statuses, strict=True):
            known = self.model.get((space, number), Known())
            if status == 0:
                assert known.values, f"match says hit for {(space, number)}, which nobody has put"
            elif known.durable and not self.faulty:
                assert self.subject.lost() > known.lost
        assert outcome.pinned == bool(outcome.pin_id)
        if outcome.pin_id:
            self.pins.append(outcome.pin_id)
            hits = {(space, number) for number, status in zip(numbers, outcome.statuses, strict=True) if status == 0}
            self.held[outcome.pin_id] = until_ns, hits

    @precondition(lambda self: self.pins)
    @rule(at=st.integers(0, 100), keep=st.booleans())
    def unpin(self, at: int, keep: bool) -> None:
        """End a pin, perhaps one that was ended before."""
        pin = self.pins[at % len(self.pins)]
        self.driver.engine.unpin(pin, client_id=self.driver.client_id)
        self.held.pop(pin, None)
        if not keep:
            self.pins.remove(pin)

    @rule(space=spaces, first=key_numbers, count=st.integers(1, 6))
    def prefetch(self, space: int, first: int, count: int) -> None:
        """Ask for records ahead."""
        keys = b"".join([key_of(number) for number in range(first, min(first + count, KEYS))])
        self.driver.engine.prefetch(self.refs[space], keys, now_ns=self.driver.now_ns)

    # --- ending -------------------------------------------------------------------------------------------------------
    @rule(space=spaces, numbers=st.lists(key_numbers, min_size=1, max_size=6, unique=True))
    def delete(self, space: int, numbers: list[int]) -> None:
        """Delete keys: those that were there are gone for good."""
        statuses = self.driver.delete(self.refs[space], [key_of(number) for number in numbers])
        for number, status in zip(numbers, statuses, strict=True):
            slot = (space, number)
            known = self.model.get(slot, Known())
            if status == 0:
                assert known.values, f"deleted {slot}, which nobody has put"
                self.model.pop(slot, None)
                for _, slots in self.held.values():
                    slots.discard(slot)
            elif known.durable and not self.faulty:
                assert self.subject.lost() > known.lost

    @rule(space=spaces)
    def drop(self, space: int) -> None:
        """Drop a namespace: nothing of it is ever seen again."""
        self.refs[space] = self.driver.drop(self.refs[space])
        for slot in [slot for slot in self.model if slot[0] == space]:
            del self.model[slot]
        for _, slots in self.held.values():
            slots.difference_update([slot for slot in slots if slot[0] == space])

    # --- the world ----------------------------------------------------------------------------------------------------
    @rule(seconds=st.sampled_from([0, 1, 31]))
    def wait(self, seconds: int) -> None:
        """Time passes."""
        self.driver.advance(seconds * SECOND_NS + 1)

    @precondition(lambda self: self.subject.can_restart)
    @rule(
        crash=st.booleans(),
        space=spaces,
        first=key_numbers,
        count=st.integers(0, 6),
        length=lengths,
        turns=st.integers(0, 6),
    )
    def restart(self, crash: bool, space: int, first: int, count: int, length: int, turns: int) -> None:
        """Start again, perhaps killed in the middle of puts."""
        started: list[tuple[Slot, bytes, list[Outcome]]] = []
        lost = self.subject.lost()
        for number in range(first, min(first + count, KEYS)):
            value = payload_of(number, 9, length)
            spec = self.driver.spec(self.refs[space], key_of(number), value)
            started.append(((space, number), value, self.driver.start_put(spec, value)))
        for _ in range(turns):
            self.driver.advance(1000)
        for sink, _, handle in self.open_reads:
            sink.let_go()
            if not sink.done:
                handle.cancel()
                sink.cancelled = True
        for slot, value, outcome in started:
            if outcome:
                self._note_put(slot, value, outcome[0], lost)
            else:
                self.model.setdefault(slot, Known()).values.add(value)
        self.open_reads.clear()
        self.pins.clear()
        self.held.clear()
        before = self.subject.lost()
        self.subject.restart(crash=crash)
        self.driver.engine = self.subject.engine
        assert self.subject.lost() >= before
        refs = [self.driver.engine.namespace(ref.digest) for ref in self.refs]
        for number, ref in enumerate(refs):
            used = any(known.durable for slot, known in self.model.items() if slot[0] == number)
            assert ref is not None or self.faulty or not used, "a namespace that was in use is gone"
            self.refs[number] = ref or self.driver.namespace(manifest_of(number))

    @precondition(lambda self: self.subject.can_fail)
    @rule(number=st.integers(0, 1 << 20))
    def break_something(self, number: int) -> None:
        """From now on misses need no other excuse."""
        self.faulty = True
        self.subject.inject(number)

    @precondition(lambda self: self.faulty)
    @rule()
    def heal(self) -> None:
        """The drive works again."""
        self.subject.heal()

    @invariant()
    def holds(self) -> None:
        """The insides agree with themselves."""
        self.subject.check()

    def teardown(self) -> None:
        """Nothing may leak."""
        self.subject.heal()
        if self.open_reads:
            self.end_reads()
        self.subject.close()


def manifest_of(number: int) -> bytes:
    """Manifest of one of the machine's namespaces."""
    layout = KVLayout.opaque(chunk_bytes=1 << 20, chunk_tokens=16)
    return Namespace(tenant=_TENANTS[number], model="org/model", weights="sha256:0", layout=layout).manifest()


def machine_of(make_subject: Callable[[], Subject]) -> type[EngineMachine]:
    """A machine class that plays with what `make_subject` makes."""
    return type("Machine", (EngineMachine,), {"make_subject": staticmethod(make_subject)})
