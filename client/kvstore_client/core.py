"""What all calls of one client in one process share: the view, the links to targets, the retry budget, the counters."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Collection

from kvstore.cluster.view import TargetId, View
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.limits import PULL_PAUSE_NS, TARGETS_MAX, VIEW_OLDER_NS, VIEW_RETRY_NS
from kvstore_client.address import split_address
from kvstore_client.found_places import FoundPlaces
from kvstore_client.options import ClientOptions
from kvstore_client.rdma import RdmaPorts, RdmaWay
from kvstore_client.retry import RetryBudget
from kvstore_client.shm import SharedMemory
from kvstore_client.shm_ways import LocalWay, Transport
from kvstore_client.stats import Counters
from kvstore_client.target import TargetLink
from kvstore_client.topology import Placement, WorkerRoute, only_reader, placement_of, routes_of

CLIENT_ID_BYTES = 16
LINKS_MAX = 2 * TARGETS_MAX
_ASK = "@"  # before an address that is only asked for the view


class ClientCore:
    """State of a client in one process; a forked child makes its own.

    Attributes:
        addresses: Where the view can be asked for, as the caller gave them.
        memory: What nodes on this host can reach of this process.
        rdma: Local ports by which other nodes reach memory of this process.
        pid: Of the process that owns the sockets.
        placement: The only worker's id, or where runs lie over several; None when nobody can be asked. One a view.
        reader: The only worker that answers reads by the view, also where others are down; None where several do.
            It is asked the short ways, and for what it lacks the others are asked as the placement says.
        newest_epoch: The highest that any node has named.
        found: Where lookups have found keys that are not where they belong.
    """

    def __init__(self, addresses: tuple[str, ...], options: ClientOptions, counters: Counters) -> None:
        if not addresses:
            raise InvalidRequest("no address is given; pass host:port of a node")
        for address in addresses:
            split_address(address)
        self.addresses = addresses
        self.options = options
        self.counters = counters
        self.pid = os.getpid()
        self.client_id = os.urandom(CLIENT_ID_BYTES)
        self.memory = SharedMemory()
        self.rdma = RdmaPorts(counters)
        self.budget = RetryBudget(time.monotonic_ns())
        self.view: View | None = None
        self.placement: Placement | TargetId | None = None
        self.reader: TargetId | None = None
        self.newest_epoch = 0
        self.found = FoundPlaces()
        self._asked_epoch = -1
        self._asked_ns = -VIEW_RETRY_NS
        self._older_since_ns = 0
        self._is_doubted = False
        self._pulled_ns = -PULL_PAUSE_NS
        self._links: dict[TargetId, TargetLink] = {}
        self._routes: tuple[WorkerRoute, ...] = ()
        self._has_readable = False
        self._adopting = threading.Lock()  # or the slower of two threads would put the older view over the newer one

    def wants_view(self, now_ns: int) -> bool:
        """Whether to ask for the view before the next call.

        True when a node has named a newer epoch since the view was last asked for. Not more often than each
        VIEW_RETRY_NS also when there is no view with a target, or a target did not answer, which may have moved.
        """
        if self.newest_epoch > self._asked_epoch:
            return True
        is_good = self._has_readable and not self._is_doubted
        return not is_good and now_ns - self._asked_ns >= VIEW_RETRY_NS

    @property
    def has_heard_of_newer_view(self) -> bool:
        """Whether a node of the cluster has named a newer epoch than that of the view."""
        return self.view is not None and bool(self.view.cluster) and self.newest_epoch > self.view.epoch

    def asks_for_view(self, now_ns: int) -> int:
        """The view is being asked for; the newest epoch that was named before."""
        self._asked_ns = now_ns
        return self.newest_epoch

    def doubt_view(self) -> None:
        """A target did not answer: it may have moved."""
        self._is_doubted = True

    def view_sources(self, now_ns: int) -> list[TargetId]:
        """Whom to ask for the view, best first: targets that serve, in any order, then the addresses that were given.

        Those that did not answer lately come last. Targets are asked on the connections that calls use.
        """
        named = [route.id for route in self._routes if route.is_readable]
        random.shuffle(named)  # many clients of one view ask at the same time
        found = [*named, *(_ASK + address for address in self.addresses)]
        found += [_ASK + address for route in self._routes if not route.is_readable for address in route.addresses]
        return sorted(dict.fromkeys(found), key=lambda source: self._is_broken(source, now_ns))

    def _is_broken(self, source: TargetId, now_ns: int) -> bool:
        link = self._links.get(source)
        return link is not None and link.breaker.reopens_in_ns(now_ns) > 0

    def link(self, target: TargetId) -> TargetLink:
        """The link of a target in the view, or of a view source. Raises Unavailable when the view has lost it."""
        found = self._links.get(target)
        if found is None:
            if not target.startswith(_ASK):
                raise Unavailable(f"target {target!r} is no longer in the view")
            found = self._add_link(target, (target[len(_ASK) :],))
        return found

    def doubts_some(self, now_ns: int) -> bool:
        """Whether somebody is silent, and may yet be only slow."""
        return any(link.breaker.is_doubted(now_ns) for link in self.links())

    def links(self) -> list[TargetLink]:
        """Every link there is."""
        return list(self._links.values())

    def target_ids(self) -> list[TargetId]:
        """The workers of the view."""
        return [route.id for route in self._routes]

    def is_known_down(self, target: TargetId) -> bool:
        """Whether the view has places beside a worker, and says that no target of it answers."""
        if self.placement is None or isinstance(self.placement, str):
            return False
        return any(route.id == target and not route.is_readable for route in self._routes)

    def unanswered(self, workers: Collection[TargetId]) -> list[TargetId]:
        """Those of these, which the view calls down, that were asked all the same lately and did not answer."""
        now_ns = time.monotonic_ns() if workers else 0
        links = [self._links[worker] for worker in workers if worker in self._links]
        return [link.id for link in links if link.is_unanswered(now_ns)]

    def words_of_no_target(self) -> str:
        """Why `placement` is None, for people."""
        where = ", ".join(self.addresses)
        if self.view is None:
            return f"no node answers at {where}"
        if self.placement is not None:
            return f"no target of the view takes new records, by node {self.view.node_id} at {where}; try again later"
        return f"node {self.view.node_id} at {where} is recovering: it serves no drive yet; try again later"

    def may_hint(self, now_ns: int) -> bool:
        """Whether a target may be told now what it lacks; not more often than each PULL_PAUSE_NS."""
        if now_ns - self._pulled_ns < PULL_PAUSE_NS:
            return False
        self._pulled_ns = now_ns
        return True

    def saw_epoch(self, epoch: int) -> None:
        """A node named its view's epoch."""
        if epoch > self.newest_epoch:
            self.newest_epoch = epoch

    def adopt(self, view: View, *, source: TargetId, now_ns: int, named_epoch: int = 0) -> bool:
        """Takes a view that `source` gave, unless it is older than the known one.

        A node alone may be another one than before, and begin anew. A cluster's view is the same on every node, and one
        that lags behind is not believed, unless all that has been heard for VIEW_OLDER_NS was older: then its store
        was lost, and the cluster has begun anew.

        Args:
            view: The answer.
            source: Whose.
            now_ns: When it came.
            named_epoch: From `asks_for_view`: one that was named while it was asked for is asked for again.

        Returns:
            Whether it is as new as any that was heard of. If not, another node may know more.
        """
        with self._adopting:
            return not self._is_older(view, now_ns) and self._take_over(view, source, named_epoch)

    def _take_over(self, view: View, source: TargetId, named_epoch: int) -> bool:
        self._older_since_ns = 0
        is_newest = view.epoch >= self.newest_epoch or not view.cluster
        if is_newest:
            self._asked_epoch = max(self._asked_epoch, named_epoch, view.epoch)
        self._is_doubted = False
        host, _ = split_address(self.link(source).addresses[0])
        routes = routes_of(view, asked_host=host)
        if view == self.view and routes == self._routes:
            return is_newest
        for route in routes:
            link = self._links.get(route.id) or self._add_link(route.id, route.addresses)
            link.move(route.addresses, route.node_id)
            link.view_epoch = view.epoch
        self._routes = routes
        self.placement = placement_of(view, routes)
        self.reader = only_reader(self.placement, routes)
        self.found.forget()
        self._has_readable = isinstance(self.placement, str) or any(route.is_readable for route in routes)
        self.view = view
        self._forget_gone()
        return is_newest

    def has_asked_all(self, named_epoch: int) -> None:
        """Nobody who could be asked knows the view that was heard of before: calls go on with this one."""
        self._asked_epoch = max(self._asked_epoch, named_epoch)

    def _is_older(self, view: View, now_ns: int) -> bool:
        known = self.view
        if known is None or view.epoch >= known.epoch or (view.cluster, view.node_id) != (known.cluster, known.node_id):
            return False
        if view.cluster:
            self._older_since_ns = self._older_since_ns or now_ns
            if now_ns - self._older_since_ns >= VIEW_OLDER_NS:
                self.newest_epoch = self._asked_epoch = view.epoch
                return False
        return True

    def _forget_gone(self) -> None:
        """Lets go of targets that are in the view no more.

        Their links are kept, up to a bound: a target that is only being restarted comes back, and its boot id tells
        that pins and writers are gone.
        """
        here = {route.id for route in self._routes}
        for target, link in list(self._links.items()):
            if target not in here and not target.startswith(_ASK):
                link.drop_idle_soon()
                if len(self._links) > LINKS_MAX:
                    self._links.pop(target, None)

    def _add_link(self, target: TargetId, addresses: tuple[str, ...]) -> TargetLink:
        wish = Transport.TCP if target.startswith(_ASK) else self.options.transport
        link = TargetLink(
            target,
            addresses,
            client_id=self.client_id,
            options=self.options,
            counters=self.counters,
            on_epoch=self.saw_epoch,
            local=LocalWay(wish, self.memory, self.counters),
            rdma=RdmaWay(
                self.rdma, is_wanted=wish in (Transport.AUTO, Transport.RDMA), is_required=wish is Transport.RDMA
            ),
        )
        return self._links.setdefault(target, link)
