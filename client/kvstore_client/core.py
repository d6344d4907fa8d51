"""What all calls of one client in one process share: the view, the links to targets, the retry budget, the counters."""

from __future__ import annotations

import os
import time

from kvstore.cluster.view import View
from kvstore.errors import InvalidRequest, Unavailable
from kvstore_client.connection import split_address
from kvstore_client.options import ClientOptions
from kvstore_client.planner import TargetId, TargetOf
from kvstore_client.retry import RetryBudget
from kvstore_client.stats import Counters
from kvstore_client.target import TargetLink
from kvstore_client.topology import WorkerRoute, placement_of, routes_of

CLIENT_ID_BYTES = 16
_ASK = "@"  # before an address that is only asked for the view


class ClientCore:
    """State of a client in one process; a forked child makes its own.

    Attributes:
        addresses: Where the view can be asked for, as the caller gave them.
        pid: Of the process that owns the sockets.
        placement: Where a run's head belongs; None before the first view.
        newest_epoch: The highest that any node has named.
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
        self.budget = RetryBudget(time.monotonic_ns())
        self.view: View | None = None
        self.placement: TargetOf | TargetId | None = None
        self.newest_epoch = 0
        self._asked_epoch = -1
        self._links: dict[TargetId, TargetLink] = {}
        self._routes: tuple[WorkerRoute, ...] = ()

    @property
    def wants_view(self) -> bool:
        """True when there is no view, or a node has named a newer epoch since it was last asked for."""
        return self.view is None or self.newest_epoch > max(self.view.epoch, self._asked_epoch)

    def view_sources(self) -> list[TargetId]:
        """Pseudo targets to ask for the view, best first."""
        known = [address for route in self._routes for address in route.addresses]
        return [_ASK + address for address in dict.fromkeys((*self.addresses, *known))]

    def link(self, target: TargetId) -> TargetLink:
        """The link of a target in the view, or of a view source. Raises Unavailable when the view has lost it."""
        found = self._links.get(target)
        if found is None:
            if not target.startswith(_ASK):
                raise Unavailable(f"target {target!r} is no longer in the view")
            found = self._add_link(target, (target[len(_ASK) :],))
        return found

    def links(self) -> list[TargetLink]:
        """Every link there is."""
        return list(self._links.values())

    def target_ids(self) -> list[TargetId]:
        """The workers of the view."""
        return [route.id for route in self._routes]

    def saw_epoch(self, epoch: int) -> None:
        """A node named its view's epoch."""
        if epoch > self.newest_epoch:
            self.newest_epoch = epoch

    def adopt(self, view: View, *, source: TargetId) -> None:
        """Takes a view that `source` gave, unless that node has given a newer one."""
        self._asked_epoch = self.newest_epoch
        if self.view is not None and view.epoch < self.view.epoch and view.node_id == self.view.node_id:
            return
        host, _ = split_address(source.removeprefix(_ASK))
        routes = routes_of(view, asked_host=host)
        for route in routes:
            link = self._links.get(route.id) or self._add_link(route.id, route.addresses)
            link.move(route.addresses)
            link.view_epoch = view.epoch
        gone = {route.id for route in self._routes} - {route.id for route in routes}
        self._routes = routes
        self.placement = placement_of(routes)
        self.view = view
        for target in gone:
            self._links.pop(target).drop_idle()

    def _add_link(self, target: TargetId, addresses: tuple[str, ...]) -> TargetLink:
        link = TargetLink(
            target,
            addresses,
            client_id=self.client_id,
            options=self.options,
            counters=self.counters,
            on_epoch=self.saw_epoch,
        )
        return self._links.setdefault(target, link)
