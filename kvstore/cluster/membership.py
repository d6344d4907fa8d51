"""A node's or relay's place in a cluster: registers it, keeps the lease, follows the view, and does to it what is due.

What is due is decided by `kvstore.cluster.settling`; here is when, and against which store. Everything runs on one
event loop. Nothing here waits for the store longer than its calls take, and nothing that the node serves waits for
this: without the store the last view stays, and when the lease's time is over by our own clock the node is fenced,
which is before anybody else may take its targets for dead.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Final

from kvstore.cluster import transitions
from kvstore.cluster.catalog import (
    USES,
    VIEW_NAME,
    node_name,
    notes_of,
    registrations_of,
    relay_name,
    relays_of,
    replicas_of,
    target_name,
    target_of,
    view_of,
)
from kvstore.cluster.changes import has_died, words_of_changes
from kvstore.cluster.charter import CLUSTER_ID_NAME, PEER_TOKEN_NAME, cluster_id_of, new_peer_token, peer_token_of
from kvstore.cluster.registration import NodeNote, Registration, RelayRegistration, encode_registration
from kvstore.cluster.settling import Attendance, Overdue, Periods, settle
from kvstore.cluster.store import ABSENT, NO_LEASE, Change, ClusterStore, Entry, Image, Lease
from kvstore.cluster.view import TargetId, TargetState, View, encode_view
from kvstore.errors import Closed, KVStoreError, LeaseExpired, StaleView
from kvstore.limits import (
    LEASE_TTL_NS_DEFAULT,
    MS_NS,
    REJOIN_NS_MIN,
    SECOND_NS,
    STORE_ATTEMPT_NS,
    STORE_RETRY_NS_MAX,
    STORE_RETRY_NS_MIN,
)

log = logging.getLogger(__name__)

_RENEWALS_PER_TTL: Final = 3


class Membership:
    """See the module. `run` is its one task; `close` ends it and gives the lease back.

    Args:
        store: Owned from now on.
        cluster: Name of the cluster.
        known: The newest view that this node has ever seen, from its last life; None at its first start.
        on_change: Called when `view`, `fenced` or `peer_token` changes, and when the lease is renewed.
        clock: Monotonic nanoseconds.
    """

    def __init__(
        self,
        store: ClusterStore,
        *,
        cluster: str,
        known: View | None = None,
        on_change: Callable[[], None] = lambda: None,
        ttl_ns: int = LEASE_TTL_NS_DEFAULT,
        periods: Periods | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._store = store
        self._cluster = cluster
        self._view = known if known is not None and known.cluster == cluster else None
        self._on_change = on_change
        self._ttl_ns = ttl_ns
        self._periods = periods or Periods()
        self._clock = clock
        self._attendance = Attendance(periods=self._periods)
        self._wanted: dict[TargetId, Registration] = {}
        self._relay: RelayRegistration | None = None
        self._note: NodeNote | None = None
        self._session = secrets.token_hex(8)
        self._lease: Lease | None = None
        self._held_until_ns = clock()
        self._was_held = False
        self._registered: set[TargetId] = set()  # in this session
        self._taken_over: set[TargetId] = set()
        self._entries: dict[str, Entry] = {}
        self._peer_token = b""
        self._cluster_id = ""
        self._was_registered = False
        self._is_stranger = False
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._rejoin_ns = clock()  # two nodes with one address fence each other: not more often than now and then
        self._fence_timer: asyncio.TimerHandle | None = None
        self._was_fenced = True
        self._told_fence = False  # in the log, and not yet taken back
        self._failure = "not asked yet"

    @property
    def view(self) -> View | None:
        """The newest view; None before the first."""
        return self._view

    @property
    def fenced(self) -> bool:
        """Whether this node must refuse puts, deletes and changes of policy: nobody vouches for it. Gets go on."""
        return self._clock() >= self._held_until_ns or not self._is_vouched_for()

    @property
    def fence(self) -> str:
        """Why `fenced`, in words; "" while it is not, and while nothing is registered that could be."""
        if not self.fenced or not (self._wanted or self._relay):
            return ""
        if self._taken_over:
            return f"another node registered {', '.join(sorted(self._taken_over))}: was the drive moved or copied?"
        over_ns = self._clock() - self._held_until_ns
        if over_ns < 0:
            return "the view of the cluster does not have its targets as they are registered now"
        since = f"lease lost {over_ns / SECOND_NS:.0f} s ago" if self._was_held else "no lease yet"
        if self._failure:
            return f"{since}, cluster store unreachable: {self._failure}"
        return f"{since}; it registers anew"

    @property
    def writes_ns(self) -> int:
        """For how long from now on writes may be taken without asking again: 0 when fenced."""
        return 0 if self.fenced else max(0, self._held_until_ns - self._clock())

    @property
    def failure(self) -> str:
        """Why the store cannot be asked, in words; "" when it can."""
        return self._failure

    @property
    def peer_token(self) -> bytes:
        """By which the nodes of the cluster know each other: a secret. Kept while the store is away; empty is none."""
        return self._peer_token

    def serve_drives_of(self, cluster_id: str) -> None:
        """The cluster whose id the drives of this node bear, in hex; a cluster of another id is not joined."""
        self._cluster_id = cluster_id

    def register(self, targets: Sequence[Registration]) -> None:
        """These are the targets of this node from now on; their `session` is chosen here. Returns at once."""
        wanted = {target.id: target for target in targets}
        if wanted != self._wanted:
            self._taken_over &= {name for name in wanted if wanted[name] == self._wanted.get(name)}
            self._wanted = wanted
            self._wake.set()

    def register_relay(self, relay: RelayRegistration) -> None:
        """This is a relay, or another one than it was; its `session` is chosen here. Returns at once."""
        if relay != self._relay:
            self._relay = relay
            self._wake.set()

    def announce(self, note: NodeNote) -> None:
        """Where tools find this node. Returns at once."""
        if note != self._note:
            self._note = note
            self._wake.set()

    @property
    def notes(self) -> dict[str, NodeNote]:
        """Where tools find each node, by its id, as known last."""
        return notes_of(self._entries)

    @property
    def entries(self) -> Mapping[str, Entry]:
        """All that stands in the store, as known last: not to be changed."""
        return self._entries

    def drain(self) -> None:
        """No new keys for the targets of this node, which leave the view for good at `close`; nor for a relay."""
        if self._relay is not None:
            self.register_relay(replace(self._relay, wants_drain=True))
        self.register([replace(target, wants_drain=True) for target in self._wanted.values()])

    async def run(self) -> None:
        """Until `close`, or cancelled."""
        try:
            async with asyncio.TaskGroup() as both:
                self._tasks = [both.create_task(self._follow()), both.create_task(self._keep_lease())]
        finally:
            if self._fence_timer is not None:
                self._fence_timer.cancel()

    async def close(self) -> None:
        """Gives the lease back, says in the view that the targets are gone, closes the store. A drained one leaves."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._registered.clear()
        wait_ns = STORE_ATTEMPT_NS if self._failure else None  # a store that is away anyway is given one more attempt
        try:
            if self._lease is not None:
                async with asyncio.timeout(wait_ns / SECOND_NS if wait_ns else None):
                    await self._store.revoke(self._lease.id)
                    await self._say_goodbye()
        except (KVStoreError, TimeoutError) as error:
            log.warning("the cluster learns of our end when the lease runs out: %s", str(error) or self._failure)
        self._lease = None
        await self._store.close()
        self._tell()

    async def _follow(self) -> None:
        """Load, register, watch; and again after each failure."""
        pause_ns = STORE_RETRY_NS_MIN
        while True:
            self._wake.clear()
            try:
                image = await self._store.load()
                self._failure = ""
                await self._attend(image)
                pause_ns = STORE_RETRY_NS_MIN
                await self._watch(image)
            except Closed:
                return
            except KVStoreError as error:
                if not isinstance(error, StaleView | LeaseExpired):
                    self._failure = str(error)
                # of several nodes that write one entry at one moment all but one come too late, and load it again
                is_usual = isinstance(error, StaleView) or pause_ns > STORE_RETRY_NS_MIN
                log.log(logging.DEBUG if is_usual else logging.WARNING, "cluster store: %s", error)
            await asyncio.sleep(pause_ns * random.uniform(0.5, 1) / SECOND_NS)
            pause_ns = min(2 * pause_ns, STORE_RETRY_NS_MAX)

    async def _watch(self, image: Image) -> None:
        """Follows the changes after `image`. Raises when it must be loaded again."""
        async with aclosing(self._store.watch(image)) as changes:  # type: ignore[type-var]
            following = asyncio.ensure_future(anext(changes))
            try:
                while True:
                    await self._something_due(following)
                    changed: Sequence[Change] = ()
                    if following.done():
                        changed = following.result()
                        self._apply(changed)
                        following = asyncio.ensure_future(anext(changes))
                    if not changed or not all(change.name.startswith(USES) for change in changed):
                        await self._do_what_is_due()  # what tenants use changes often, and no view by it
            finally:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)

    async def _something_due(self, following: asyncio.Future[tuple[Change, ...]]) -> None:
        """Until there are changes, somebody wakes us, or time has passed."""
        due_ns = self._attendance.next_due_ns(self._view, self._clock()) if self._view is not None else None
        if self._fenced_targets():
            due_ns = min(self._rejoin_ns, due_ns or self._rejoin_ns)
        timeout_s = None if due_ns is None else max(0, due_ns - self._clock()) / SECOND_NS
        woken = asyncio.ensure_future(self._wake.wait())
        try:
            await asyncio.wait((following, woken), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            woken.cancel()

    async def _attend(self, image: Image) -> None:
        """Take everything as it is in the store, and be in it."""
        self._entries = dict(image.entries)
        self._notice_take_over()
        await self._found_or_outlive()
        self._observe()
        await self._do_what_is_due()

    async def _found_or_outlive(self) -> None:
        """Make sure that there is a view, and that its epoch is above none that we have seen."""
        stored = view_of(self._entries)
        known = self._view
        if stored is None:
            view = transitions.outlive(known, known.epoch) if known is not None else transitions.found(self._cluster)
            log.info("the cluster store holds no view: cluster %s begins with epoch %d", self._cluster, view.epoch)
            await self._put_view(replace(view, cluster=self._cluster))
        elif known is not None and stored.epoch < known.epoch:
            log.warning("the cluster store has epoch %d, older than %d which was seen", stored.epoch, known.epoch)
            await self._put_view(transitions.outlive(stored, known.epoch))
        else:
            self._show(stored)

    async def _do_what_is_due(self) -> None:
        self._wake.clear()
        await self._check_cluster_id()
        await self._draw_peer_token()
        await self._register_wanted()
        view = self._view
        assert view is not None, "loaded before anything is done"
        overdue = self._attendance.overdue(view, self._clock())
        settled = settle(
            view,
            registrations_of(self._entries),
            overdue,
            self._periods,
            replicas_of(self._entries),
            relays_of(self._entries),
        )
        if settled != view:
            try:
                await self._put_view(settled)
            except StaleView:
                pass  # somebody was faster; the watch brings what they did
        self._observe()
        self._tell()

    async def _check_cluster_id(self) -> None:
        """A store that came back empty takes our id again. One with another id is not joined: it is another cluster's,
        unless we were in it before, when it came back empty and a newcomer was faster than all who knew the id."""
        if not self._cluster_id:
            return
        if CLUSTER_ID_NAME not in self._entries:
            revision = await self._store.put(CLUSTER_ID_NAME, self._cluster_id, expected=ABSENT)
            self._entries[CLUSTER_ID_NAME] = Entry(value=self._cluster_id, revision=revision)
        differs = cluster_id_of(self._entries) != self._cluster_id
        if differs and not self._is_stranger:
            log.error(
                "the drives of this node are of cluster %s, %s of cluster %s says %s: write the former there, or adopt "
                "the drives (kvstore drive adopt) and start the node again",
                self._cluster_id,
                CLUSTER_ID_NAME,
                self._cluster,
                self._entries[CLUSTER_ID_NAME].value,
            )
        self._is_stranger = differs

    async def _draw_peer_token(self) -> None:
        if PEER_TOKEN_NAME not in self._entries:
            token = new_peer_token()
            revision = await self._store.put(PEER_TOKEN_NAME, token, expected=ABSENT)
            self._entries[PEER_TOKEN_NAME] = Entry(value=token, revision=revision)
        token_now = peer_token_of(self._entries)
        if token_now != self._peer_token:
            self._peer_token = token_now
            self._on_change()

    async def _register_wanted(self) -> None:
        """Write what is not in the store as we want it, under our lease; in a new session after one that was fenced."""
        fenced = self._fenced_targets()
        if fenced and self._clock() >= self._rejoin_ns:
            log.warning("targets %s were fenced; they register anew", ", ".join(fenced))
            self._session = secrets.token_hex(8)
            self._rejoin_ns = self._clock() + REJOIN_NS_MIN
        wanted = self._values()
        if self._is_stranger and not self._was_registered:
            self._failure = f"cluster {self._cluster} has another id than the drives of this node"
            wanted = {}
        for name, value in wanted.items():
            entry = self._entries.get(name)
            lease = self._lease or await self._grant()
            if entry is None or entry.lease != lease.id or entry.value != value:
                await self._put_registration(name, value, lease)
            target_id = target_of(name)
            if target_id is not None:
                self._registered.add(target_id)
            self._was_registered = True
        lease_id = self._lease.id if self._lease is not None else NO_LEASE
        for name in [name for name, entry in self._entries.items() if entry.lease == lease_id != NO_LEASE]:
            if name not in wanted:
                await self._store.delete(name, expected=self._entries[name].revision)
                del self._entries[name]

    def _values(self) -> dict[str, str]:
        """The entries that are to live under our lease, by name."""
        wanted = {
            target_name(name): encode_registration(replace(registration, session=self._session))
            for name, registration in self._wanted.items()
            if name not in self._taken_over
        }
        if self._relay is not None:
            wanted[relay_name(self._relay.id)] = encode_registration(replace(self._relay, session=self._session))
        if self._note is not None and wanted:
            wanted[node_name(self._note.node_id)] = encode_registration(self._note)
        return wanted

    async def _grant(self) -> Lease:
        asked_ns = self._clock()
        lease = await self._store.grant(ttl_ns=self._ttl_ns)
        self._hold(lease, asked_ns)
        return lease

    async def _put_registration(self, name: str, value: str, lease: Lease) -> None:
        try:
            revision = await self._store.put(name, value, lease=lease.id)
        except LeaseExpired:
            self._let_go()
            raise
        self._entries[name] = Entry(value=value, revision=revision, lease=lease.id)

    async def _put_view(self, view: View) -> None:
        entry = self._entries.get(VIEW_NAME)
        expected = entry.revision if entry is not None else ABSENT
        value = encode_view(view)
        revision = await self._store.put(VIEW_NAME, value, expected=expected)
        self._entries[VIEW_NAME] = Entry(value=value, revision=revision)
        self._show(view)

    def _apply(self, changes: Sequence[Change]) -> None:
        """Take what the store tells; what is older than what we wrote ourselves is passed over."""
        ended: list[TargetId] = []
        for change in changes:
            known = self._entries.get(change.name)
            if change.entry is None:
                self._entries.pop(change.name, None)
                ended += [name for name in (target_of(change.name),) if name is not None]
            elif known is None or known.revision < change.entry.revision:
                self._entries[change.name] = change.entry
        stored = view_of(self._entries)
        if stored is None:
            raise StaleView("the view was removed from the cluster store; it is written again")
        if self._view is not None and stored.epoch < self._view.epoch:
            raise StaleView(f"the cluster store went back to epoch {stored.epoch}; it is raised again")
        self._show(stored)
        self._notice_take_over()
        self._observe()
        for name in ended:
            if target_name(name) not in self._entries:
                self._attendance.lease_ended(name, self._clock())

    def _notice_take_over(self) -> None:
        """A target that we had registered and another has now is not ours any more: its drive was moved, or copied."""
        lease_id = self._lease.id if self._lease is not None else NO_LEASE
        for name in self._registered - self._taken_over:
            entry = self._entries.get(target_name(name))
            if entry is not None and entry.lease != lease_id:
                log.error("target %s is registered by another node: was its drive moved or copied?", name)
                self._taken_over.add(name)

    def _fenced_targets(self) -> list[TargetId]:
        """Our targets that the view cuts off in the session that they are registered in."""
        if self._view is None:
            return []
        return [
            target.id
            for target in self._view.targets
            if target.state is TargetState.DOWN and target.session == self._session and target.id in self._wanted
        ]

    def _is_vouched_for(self) -> bool:
        """Whether the view has every target of ours, and us if we are a relay, as it is registered now."""
        if self._view is None or self._taken_over or not (self._wanted or self._relay):
            return False
        relays = {relay.id for relay in self._view.relays if relay.session == self._session}
        if self._relay is not None and self._relay.id not in relays:
            return False
        here = {
            target.id
            for target in self._view.targets
            if target.session == self._session and target.state is not TargetState.DOWN
        }
        return here.issuperset(self._wanted)

    def _observe(self) -> None:
        if self._view is not None:
            registered = {name for entry in self._entries if (name := target_of(entry)) is not None}
            self._attendance.observe(self._view, registered, self._clock())

    async def _keep_lease(self) -> None:
        """Renews the lease, as long as there is one."""
        while True:
            await asyncio.sleep(self._ttl_ns / _RENEWALS_PER_TTL / SECOND_NS)
            while self._lease is not None:
                asked_ns = self._clock()
                try:
                    self._hold(await self._store.renew(self._lease.id), asked_ns)
                    break
                except Closed:
                    return
                except LeaseExpired as error:
                    self._say_fenced(str(error))
                    self._let_go()
                except KVStoreError as error:
                    log.debug("lease not renewed: %s", error)
                    self._failure = str(error)
                    await asyncio.sleep(STORE_RETRY_NS_MIN / SECOND_NS)

    def _hold(self, lease: Lease, asked_ns: int) -> None:
        """The lease is ours for its time since we asked: the store began to count later."""
        self._lease = lease
        self._held_until_ns = asked_ns + lease.ttl_ns
        self._was_held = True
        if self._fence_timer is not None:
            self._fence_timer.cancel()
        left_s = max(0, self._held_until_ns + MS_NS - self._clock()) / SECOND_NS  # timers may be early by a little
        self._fence_timer = asyncio.get_running_loop().call_later(left_s, self._run_out)
        self._was_fenced = self.fenced
        if self._told_fence and not self._was_fenced:
            self._told_fence = False
            log.info("this node is not fenced any more: it takes puts, deletes and drops again")
        self._on_change()

    def _run_out(self) -> None:
        """The lease's time is over by our clock, and nobody has renewed it."""
        if reason := self.fence:
            self._say_fenced(reason)
        self._tell()

    def _say_fenced(self, reason: str) -> None:
        self._told_fence = True
        log.warning("this node is fenced, it refuses puts, deletes and drops and serves reads: %s", reason)

    def _let_go(self) -> None:
        """The lease has ended: nothing that was written under it stands. Register in a new session."""
        self._lease = None
        self._registered.clear()
        self._held_until_ns = self._clock()
        self._session = secrets.token_hex(8)
        self._wake.set()
        self._tell()

    def _show(self, view: View) -> None:
        if view != self._view:
            before, self._view = self._view, view
            self._on_change()
            words = words_of_changes(before, view) if before is not None else ""
            if words and before is not None:
                level = logging.WARNING if has_died(before, view) else logging.INFO
                log.log(level, "epoch %d of cluster %s: %s", view.epoch, view.cluster, words)

    def _tell(self) -> None:
        fenced = self.fenced
        if fenced != self._was_fenced:
            self._was_fenced = fenced
            self._on_change()

    async def _say_goodbye(self) -> None:
        """The last one out cannot leave it to others to see that its targets are gone."""
        image = await self._store.load()
        stored = view_of(image.entries)
        if stored is None:
            return
        registered = registrations_of(image.entries)
        gone = Overdue(gone=[name for name in self._wanted if name not in registered])
        settled = settle(stored, registered, gone, self._periods, relays=relays_of(image.entries))
        if settled != stored:
            try:
                await self._store.put(VIEW_NAME, encode_view(settled), expected=image.entries[VIEW_NAME].revision)
            except StaleView:
                pass  # somebody else did it
