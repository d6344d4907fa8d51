"""`BoundNamespace`: the verbs of one namespace for threads; each blocks until its deadline at most."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvstore.errors import InvalidRequest
from kvstore.limits import COPIES_MAX, UNPIN_NS_MAX
from kvstore.types.keys import KeyChain
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore.types.results import Exists, Hit, Miss, Refused, Stored
from kvstore.types.tokens import Tokens
from kvstore.wire.messages import Manifest
from kvstore_client import read_verbs, write_verbs
from kvstore_client.copies import StoreRequest
from kvstore_client.core import ClientCore
from kvstore_client.incoming import IncomingRecord
from kvstore_client.lane import Lanes
from kvstore_client.loads import Begun
from kvstore_client.match import Match
from kvstore_client.options import DURABILITIES, WAITS, choice, deadline_after, group_of, pin_ttl_ns
from kvstore_client.pins import PinHold
from kvstore_client.placed_lane import PlacedLane
from kvstore_client.planner import Keys, all_record_keys, chain_in
from kvstore_client.ranges import Ranges
from kvstore_client.rdma_places import goes_by_rdma
from kvstore_client.read_shape import ReadShape, incoming_records, shape_of
from kvstore_client.regions import Item, refuse_repeated
from kvstore_client.rounds import Verb
from kvstore_client.shm_places import lies_in_shared_memory
from kvstore_client.shm_ways import Transport
from kvstore_client.straight import handing_over, plain_views, read_straight
from kvstore_client.writer import Session, Writer
from kvstore_client.writer_verbs import OpenRequest

if TYPE_CHECKING:
    from kvstore_client.client import KVClient


class NamespaceKeys:
    """What a namespace knows without asking anybody."""

    def __init__(self, namespace: Namespace, *, copies: int | None) -> None:
        """
        Args:
            namespace: Which.
            copies: Of each of its records; None is what the cluster says.

        Raises:
            InvalidRequest: `copies` is not 1 to COPIES_MAX, or the namespace is something else.
        """
        if copies is not None and not (isinstance(copies, int) and 1 <= copies <= COPIES_MAX):
            raise InvalidRequest(f"copies is {copies!r:.80}; use 1 to {COPIES_MAX}, or None for what the cluster says")
        if not isinstance(namespace, Namespace):
            raise InvalidRequest(
                f"namespace is a {type(namespace).__name__}; pass a Namespace(tenant=..., model=..., ...)"
            )
        self.namespace = namespace
        self._copies = copies
        self._manifest = Manifest(manifest=namespace.manifest(), copies=copies or 0)
        self._whole_shape = shape_of(namespace.layout, key_count=0, shards=None, part=None, layers=None, ranges=None)

    def _shape(
        self,
        key_count: int,
        *,
        shards: int | Sequence[int] | None,
        part: str | None,
        layers: Sequence[int] | None,
        ranges: Ranges | None,
    ) -> ReadShape:
        """The shape of a read. That of whole records of all shards, which most are, is kept."""
        if shards is None and part is None and layers is None and ranges is None:
            return self._whole_shape
        return shape_of(self.layout, key_count=key_count, shards=shards, part=part, layers=layers, ranges=ranges)

    def _load(
        self,
        core: ClientCore,
        shape: ReadShape,
        chain: KeyChain,
        rows: list[list[IncomingRecord]],
        *,
        accept_pending: bool,
        until_ns: int,
        begun: Begun | None = None,
    ) -> Verb[list[Hit | Miss]]:
        """The verb that reads records; see `read_verbs.load`."""
        return read_verbs.load(
            core,
            self.namespace,
            shape,
            chain,
            rows,
            copies=self._copies,
            accept_pending=accept_pending,
            deadline_ns=until_ns,
            begun=begun,
        )

    def _look_up(
        self,
        core: ClientCore,
        keys: Keys,
        *,
        shards: int | Sequence[int] | None,
        part: str | None,
        until_ns: int,
        waits: bool,
    ) -> Verb[list[Hit | Miss]]:
        """The verb that says of each key whether it is stored; see `read_verbs.lookup`."""
        return read_verbs.lookup(
            core,
            self.namespace,
            keys,
            shards=shards,
            part=part,
            copies=self._copies,
            deadline_ns=until_ns,
            waits=waits,
        )

    def _request_of_put(
        self,
        keys: Keys,
        buffers: Sequence[Item],
        *,
        wait: str,
        durability: str,
        shards: int | Sequence[int] | None,
        part: str | None,
    ) -> StoreRequest:
        """The arguments of a put, checked. Raises InvalidRequest."""
        return StoreRequest(
            keys=keys,
            buffers=buffers,
            shards=shards,
            part=part,
            durability=choice("durability", durability, DURABILITIES),
            wait=choice("wait", wait, WAITS),
            copies=self._copies,
        )

    @property
    def layout(self) -> KVLayout:
        """The shape of the chunks."""
        return self.namespace.layout

    @property
    def digest(self) -> bytes:
        """The namespace's digest, 32 bytes."""
        return self.namespace.digest

    def keys(
        self, token_ids: Tokens, extra: Sequence[bytes] | None = None, *, after: KeyChain | None = None
    ) -> KeyChain:
        """Keys of the full chunks of `token_ids`; see `kvstore.types.keys.KeyChain.from_tokens`."""
        return self.namespace.keys(token_ids, extra, after=after)

    def keys_from_hashes(
        self,
        hashes: Sequence[bytes],
        *,
        algorithm: str,
        first_position: int | None = None,
        parent: bytes | None = None,
        run_head: bytes | None = None,
    ) -> KeyChain:
        """Keys for blocks that an engine hashed itself; see `kvstore.types.keys.KeyChain.from_hashes`."""
        return self.namespace.keys_from_hashes(
            hashes, algorithm=algorithm, first_position=first_position, parent=parent, run_head=run_head
        )


class BoundNamespace(NamespaceKeys):
    """A namespace of a client. Thread-safe; lives as long as the client.

    `deadline` and `soft_deadline` are seconds from now; None is the client's default deadline. No verb raises for a
    node's trouble: what cannot be served is a Miss or Refused with a reason. InvalidRequest is the caller's mistake,
    Closed says that the client was closed.
    """

    def __init__(self, client: KVClient, namespace: Namespace, *, copies: int | None = None) -> None:
        """See `KVClient.namespace`."""
        super().__init__(namespace, copies=client.options.copies if copies is None else copies)
        self._client = client
        self._block_bytes = namespace.layout.checksum_bytes()
        self._may_share = client.options.transport is not Transport.TCP
        self._lanes = None
        shape = self._whole_shape
        if shape.is_plain and namespace.layout.shards == 1 and shape.sections[0].part is None:
            self._lanes = Lanes(
                client,
                namespace=namespace.digest,
                block_bytes=self._block_bytes,
                record_bytes=shape.sizes[0] if shape.is_exact else None,
            )

    def match(
        self,
        keys: Keys,
        *,
        shards: int | Sequence[int] | None = None,
        need: Sequence[str] = (),
        pin_ttl: float | None = None,
        group: bytes = b"",
        deadline: float | None = None,
    ) -> Match:
        """The longest usable prefix of `keys`, held against eviction until the match ends.

        Args:
            keys: In order from the start of the sequence.
            shards: The shards that this worker will read; the answer is the least over them. None is all.
            need: Names of the parts that the worker cannot do without; dense ones are always included.
            pin_ttl: Seconds that the pin lives at most; 0 takes none. None is 30 s.
            group: 16 bytes that name a request whose ranks look up the same keys: every node tells all of them what it
                told the first. b"" asks alone.
            deadline: Seconds from now.

        Returns:
            Use it in a `with` block, or call its `release`.
        """
        session = self._client.session()
        ttl_ns = pin_ttl_ns(pin_ttl)
        answer = session.driver.run(
            read_verbs.match(
                session.core,
                self.namespace,
                keys,
                shards=shards,
                need=need,
                copies=self._copies,
                group=group_of(group),
                pin_ttl_ns=ttl_ns,
                deadline_ns=self._deadline_ns(deadline),
            )
        )

        def give_back(pins: tuple[PinHold, ...]) -> None:
            if session.is_usable:
                until_ns = time.monotonic_ns() + UNPIN_NS_MAX
                session.driver.run(read_verbs.unpin(session.core, pins, until_ns))

        return Match(session.core, answer, self.layout, give_back)

    def _placed(self, core: ClientCore, buffers: Sequence[Item]) -> tuple[bool, bool]:
        """Whether the node itself puts records into such memory, as far as a glance tells: shared, or by RDMA."""
        is_shared = lies_in_shared_memory(core.memory, buffers)
        return is_shared, not is_shared and goes_by_rdma(core.rdma, buffers)

    def get_into(
        self,
        keys: Keys,
        buffers: Sequence[Item],
        *,
        ranges: Ranges | None = None,
        layers: Sequence[int] | None = None,
        shards: int | Sequence[int] | None = None,
        part: str | None = None,
        content_ids: Sequence[bytes] | None = None,
        deadline: float | None = None,
        soft_deadline: float | None = None,
        accept_pending: bool = False,
    ) -> list[Hit | Miss]:
        """Reads chunks straight into the caller's memory.

        A Hit says that every byte asked for arrived and matched its checksum. After anything else the item's memory is
        undefined. No memory is touched after the return.

        Args:
            keys: One item each.
            buffers: For each key writable memory: a buffer, an (address, length) pair, or a sequence of fragments of
                these. It receives the shards asked for one after the other; of each, the bytes asked for. Its length
                must be exactly that; for an opaque layout read as a whole any length will do, and a record that does
                not fit is Miss(LAYOUT).
            ranges: (offset, length) pairs or ByteRanges of each record, ascending: one sequence for all keys, or one
                per key.
            layers: Model layers instead of ranges, ascending; of each dense part (or `part`) what it holds of them.
            shards: Which shards; None is all.
            part: A sparse part's records, or only a dense part's bytes.
            content_ids: `Hit.content_id` of an earlier read of each key: take no other copy.
            deadline: Seconds from now.
            soft_deadline: Seconds from now at which to return what has arrived; the rest is Miss(DEADLINE).
            accept_pending: Also take chunks that were received by a node and are not durable yet.

        Returns:
            One Hit or Miss per key, in order.

        Raises:
            InvalidRequest: Keys of another namespace; memory that is read-only, given twice or of the wrong length (the
                item is named); ranges outside the record, unknown shards or parts. Nothing was sent then.
        """
        quick: Begun | int = 0
        session = self._client.session()
        lanes = self._lanes
        if (
            ranges is not None
            or layers is not None
            or shards is not None
            or part is not None
            or content_ids is not None
            or soft_deadline is not None
            or accept_pending
        ):
            lanes = None
        if lanes is not None and self._may_share and session.core.memory.numbers:
            done = lanes.read(keys, buffers, deadline, PlacedLane)
            if isinstance(done, list):
                return done
            quick = done
        is_shared, by_rdma = self._placed(session.core, buffers) if self._may_share else (False, False)
        if lanes is not None and not quick and not is_shared and not by_rdma:
            done = lanes.read(keys, buffers, deadline)
            if isinstance(done, list):
                return done
            quick = done
        begun = quick if isinstance(quick, Begun) else None
        with handing_over(session.driver, begun) as held:
            chain = chain_in(self.namespace, keys)
            refuse_repeated(buffers)
            shape = self._shape(len(chain), shards=shards, part=part, layers=layers, ranges=ranges)
            until_ns = (quick.deadline_ns if isinstance(quick, Begun) else quick) or self._deadline_ns(deadline)
            is_soft = False
            if soft_deadline is not None:
                soft_ns = self._deadline_ns(soft_deadline, name="soft_deadline")
                is_soft, until_ns = soft_ns < until_ns, min(soft_ns, until_ns)
            is_usual = shape is self._whole_shape and content_ids is None and not accept_pending
            if begun is None and is_usual and not by_rdma:
                outcome = self._read_straight(session, chain, buffers, until_ns, is_placed=is_shared)
                if isinstance(outcome, list):
                    return outcome
                begun = outcome
                held += [outcome] if outcome is not None else []
            rows = incoming_records(shape, buffers, content_ids, key_count=len(chain))
            core = session.core
            results = session.driver.run(
                self._load(core, shape, chain, rows, accept_pending=accept_pending, until_ns=until_ns, begun=begun)
            )
        if is_soft and time.monotonic_ns() >= until_ns:
            session.core.counters.soft_deadlines += 1
        return results

    def put(
        self,
        keys: Keys,
        buffers: Sequence[Item],
        *,
        wait: str = "durable",
        durability: str = "commit",
        shards: int | Sequence[int] | None = None,
        part: str | None = None,
        deadline: float | None = None,
    ) -> list[Stored | Exists | Refused]:
        """Writes chunks from the caller's memory, which must not change until the return.

        Args:
            keys: One item each. A key that stands twice is written once; the second is Exists.
            buffers: As for `get_into`, readable. An item of the wrong length is Refused(INVALID), the others are
                written.
            wait: "durable": the bytes and their record are on the device. "received": the memory is free again, the
                chunk is readable by those who accept pending.
            durability: "commit" survives a kill of the node; "power" also a power cut.
            shards: The shards that this worker writes; None is all.
            part: A sparse part instead of the dense record.
            deadline: Seconds from now.

        Returns:
            One Stored, Exists or Refused per key, in order. Refused(OUTCOME_UNKNOWN): the connection broke and the
            outcome could not be learned; putting it again is harmless.
        """
        session = self._client.session()
        request = self._request_of_put(keys, buffers, wait=wait, durability=durability, shards=shards, part=part)
        return session.driver.run(
            write_verbs.store(session.core, self.namespace, self._manifest, request, self._deadline_ns(deadline))
        )

    def contains(
        self,
        keys: Keys,
        *,
        shards: int | Sequence[int] | None = None,
        part: str | None = None,
        deadline: float | None = None,
    ) -> list[bool]:
        """Whether each key is stored, for every shard asked. Not counted as use, nor in the hit rate."""
        session = self._client.session()
        found = session.driver.run(
            self._look_up(
                session.core, keys, shards=shards, part=part, until_ns=self._deadline_ns(deadline), waits=False
            )
        )
        return [isinstance(one, Hit) for one in found]

    def wait(
        self,
        keys: Keys,
        deadline: float | None = None,
        *,
        shards: int | Sequence[int] | None = None,
        part: str | None = None,
    ) -> list[Hit | Miss]:
        """Waits until no key is pending any more, or for `deadline` seconds. A Hit here carries no bytes."""
        session = self._client.session()
        return session.driver.run(
            self._look_up(
                session.core, keys, shards=shards, part=part, until_ns=self._deadline_ns(deadline), waits=True
            )
        )

    def prefetch(
        self,
        keys: Keys,
        *,
        shards: int | Sequence[int] | None = None,
        part: str | None = None,
        deadline: float | None = None,
    ) -> int:
        """Asks for keys to be brought into node memory. Returns how many records are on their way."""
        session = self._client.session()
        return session.driver.run(
            read_verbs.prefetch(
                session.core,
                self.namespace,
                keys,
                shards=shards,
                part=part,
                copies=self._copies,
                deadline_ns=self._deadline_ns(deadline),
            )
        )

    def delete(
        self, keys: Keys, *, shards: int | Sequence[int] | None = None, deadline: float | None = None
    ) -> list[Hit | Miss]:
        """Deletes keys with all their parts. Hit: it was there and is gone, durably. Miss(ABSENT): it was not there."""
        session = self._client.session()
        return session.driver.run(
            write_verbs.delete(
                session.core, self.namespace, keys, shards=shards, deadline_ns=self._deadline_ns(deadline)
            )
        )

    def drop(self, *, deadline: float | None = None) -> bool:
        """Hides everything that is stored in the namespace, at once. False when a node could not be told."""
        session = self._client.session()
        failure = session.driver.run(
            write_verbs.drop(session.core, self.namespace, self._manifest, self._deadline_ns(deadline))
        )
        if isinstance(failure, InvalidRequest):
            raise failure
        return failure is None

    def writer(
        self,
        keys: Keys,
        *,
        shards: int | Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        part: str | None = None,
        ttl: float | None = None,
        deadline: float | None = None,
    ) -> Writer:
        """Opens a layer-wise writer: room is reserved now, slices follow as they come, and commit makes all visible.

        Args:
            keys: One chunk each.
            shards: The shards that this worker writes; None is all.
            lengths: Bytes of each chunk (all shards together), for opaque layouts; typed layouts know them.
            part: A sparse part instead of the dense record.
            ttl: Seconds after which the node forgets a writer that was neither committed nor written to. None is 30 s.
            deadline: Seconds from now, for opening.
        """
        session = self._client.session()
        return Writer.open(
            session,
            self.namespace,
            self._manifest,
            OpenRequest(keys=keys, shards=shards, lengths=lengths, part=part, ttl=ttl, copies=self._copies),
            self._deadline_ns(deadline),
        )

    def _read_straight(
        self, session: Session, chain: KeyChain, buffers: Sequence[Item], until_ns: int, *, is_placed: bool
    ) -> list[Hit | Miss] | Begun | None:
        """Small reads of whole records, quicker; see `straight.read_straight`."""
        shape = self._whole_shape
        views = plain_views(buffers, len(chain)) if shape.is_plain else None
        if views is None or (shape.is_exact and len(views[0]) != shape.sizes[0]):
            return None
        return read_straight(
            session.core,
            session.driver,
            namespace=self.namespace.digest,
            keys=all_record_keys(chain, shape.sections, self.layout),
            views=views,
            block_bytes=self._block_bytes,
            deadline_ns=until_ns,
            is_placed=is_placed,
        )

    def _deadline_ns(self, seconds: float | None, *, name: str = "deadline") -> int:
        return deadline_after(time.monotonic_ns(), seconds, self._client.options.deadline_ns, name=name)
