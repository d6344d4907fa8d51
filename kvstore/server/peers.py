"""The connections of this worker to others: opened when something is to be asked, bounded, closed when idle."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from kvstore.cluster.view import Target
from kvstore.errors import Closed, KVStoreError, Overloaded, Unavailable
from kvstore.limits import PEER_LOOKUPS_MAX, PEERS_MAX
from kvstore.server.loop import Loop
from kvstore.server.peer import Greeting, Peer, PeerCall, SocketAddress
from kvstore.wire.messages import ID_BYTES

Found: TypeAlias = tuple[int, SocketAddress]
"""Family and address."""

_SIGNAL_BYTES: Final = 8
_PORT_MAX: Final = 0xFFFF
_PORT_DIGITS: Final = 5


@dataclass(slots=True)
class _Waiting:
    """Calls to a worker whose name is being looked up."""

    target: Target
    calls: list[PeerCall] = field(default_factory=list)


class Peers:
    """One connection to each worker that is asked something, at most PEERS_MAX.

    Args:
        greeting: Who we are, asked for each connection: the token may change.
        clock: The time of this turn of the loop.
    """

    def __init__(self, loop: Loop, *, greeting: Callable[[], Greeting], clock: Callable[[], int]) -> None:
        self._loop = loop
        self._clock = clock
        self._greeting = greeting
        self._peers: dict[tuple[str, ...], Peer] = {}
        self._rails: dict[tuple[str, ...], int] = {}  # which address of a worker is tried, where the first failed
        self._names = Names(loop, self._looked_up)
        self._waiting: dict[str, _Waiting] = {}

    def ask(self, target: Target, call: PeerCall) -> None:
        """Carry out a call at the worker of a target. It ends now or later, by the call's own methods."""
        if not target.data:
            call.failed(Unavailable(f"target {target.id} has no address"))
            return
        peer = self._connected(target)
        if peer is not None:
            peer.ask(call)
            return
        if len(self._peers) >= PEERS_MAX and not self._close_an_idle_one():
            call.failed(Overloaded(f"{PEERS_MAX} connections to other workers are in use"))
            return
        address = target.data[self._rails.get(target.data, 0) % len(target.data)]
        found = numeric(address)
        if found is not None:
            self._connect(target, found, [call])
            return
        waiting = self._waiting.get(address)
        if waiting is not None:
            waiting.calls.append(call)
        elif self._names.look_up(address):
            self._waiting[address] = _Waiting(target, [call])
        else:
            call.failed(Overloaded(f"{PEER_LOOKUPS_MAX} names are being looked up"))

    def hang_up(self, target: Target, error: KVStoreError) -> None:
        """End the connection to a target's worker, and every call on it with this error."""
        peer = self._peers.get(target.data)
        if peer is not None:
            peer.close(error)

    def expire(self, now_ns: int) -> None:
        """End what has taken too long, and what nobody needs."""
        for peer in list(self._peers.values()):
            peer.expire(now_ns)

    def next_timer_ns(self) -> int | None:
        """When `expire` has something to do."""
        return min((peer.due_ns for peer in self._peers.values()), default=None)

    def close(self) -> None:
        """Close all connections."""
        for peer in list(self._peers.values()):
            peer.close(Closed("this worker ends"))
        for waiting in self._waiting.values():
            for call in waiting.calls:
                call.failed(Closed("this worker ends"))
        self._waiting.clear()
        self._names.close()

    def __len__(self) -> int:
        return len(self._peers)

    def _connected(self, target: Target) -> Peer | None:
        """The connection that there is to the worker of a target."""
        peer = self._peers.get(target.data)
        if peer is not None and peer.boot_id != boot_id_of(target):
            peer.close(Closed(f"the worker of target {target.id} was started again"))
            return None
        return peer

    def _connect(self, target: Target, found: Found, calls: list[PeerCall]) -> None:
        peer = self._connected(target)  # by another rail, while the name of this one was looked up
        if peer is None:
            try:
                peer = self._peers[target.data] = self._open(target, found)
            except KVStoreError as error:
                self._try_next_rail(target.data)
                for call in calls:
                    call.failed(error)
                return
        for call in calls:
            if peer.is_closed:
                call.failed(Closed(f"the connection to {peer.name} is closed"))
            else:
                peer.ask(call)

    def _open(self, target: Target, found: Found) -> Peer:
        family, address = found
        return Peer(
            self._loop,
            family,
            address,
            greeting=self._greeting(),
            boot_id=boot_id_of(target),
            on_closed=lambda closed, error: self._closed(target.data, closed, error),
            clock=self._clock,
        )

    def _looked_up(self, address: str, found: Found | None) -> None:
        waiting = self._waiting.pop(address, None)
        if waiting is None:
            return
        if found is None:
            self._try_next_rail(waiting.target.data)
            for call in waiting.calls:
                call.failed(Unavailable(f"the name in {address} of target {waiting.target.id} is not known"))
            return
        self._connect(waiting.target, found, waiting.calls)

    def _closed(self, data: tuple[str, ...], peer: Peer, error: KVStoreError) -> None:
        if self._peers.get(data) is peer:
            del self._peers[data]
        if not isinstance(error, Closed):
            self._try_next_rail(data)

    def _try_next_rail(self, data: tuple[str, ...]) -> None:
        if len(self._rails) > PEERS_MAX:
            self._rails.clear()
        self._rails[data] = self._rails.get(data, 0) + 1

    def _close_an_idle_one(self) -> bool:
        for peer in self._peers.values():
            if peer.is_idle:
                peer.close(Closed("another worker is to be asked"))
                return True
        return False


class Names:
    """Host names looked up in threads, a few at a time: the resolver of the C library waits."""

    def __init__(self, loop: Loop, on_found: Callable[[str, Found | None], None]) -> None:
        self._loop = loop
        self._on_found = on_found
        self._results: list[tuple[str, Found | None]] = []
        self._running = 0
        self._event = -1

    def look_up(self, address: str) -> bool:
        """Find an address "name:port"; False when too many are being looked up."""
        if self._running >= PEER_LOOKUPS_MAX:
            return False
        if self._event < 0:
            self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._loop.watch(self._event, self._woken)
        self._running += 1
        threading.Thread(target=self._run, args=(address, self._event), name=f"name {address}", daemon=True).start()
        return True

    def close(self) -> None:
        """Nobody waits any more."""
        if self._event >= 0:
            self._loop.forget(self._event)
            if not self._running:
                os.close(self._event)  # else a thread still writes to it, and the process ends
            self._event = -1

    def _run(self, address: str, event: int) -> None:
        self._results.append((address, _resolve(address, flags=0)))
        os.eventfd_write(event, 1)

    def _woken(self, _: int) -> None:
        os.read(self._event, _SIGNAL_BYTES)
        while self._results:
            address, found = self._results.pop()
            self._running -= 1
            self._on_found(address, found)


def numeric(address: str) -> Found | None:
    """A "host:port" whose host is a number, ready to connect to; None for a name."""
    return _resolve(address, flags=socket.AI_NUMERICHOST)


def _resolve(address: str, *, flags: int) -> Found | None:
    host, port = split_address(address)
    try:
        family, _, _, _, found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)[0]
    except (OSError, UnicodeError):  # the latter for what cannot be a name, such as one with two dots in a row
        return None
    return family, found  # type: ignore[return-value]  # one of the two forms


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[host]:port"; port 0, which nobody has, where there is none that can be."""
    host, _, text = address.rpartition(":")
    port = int(text) if text.isdecimal() and len(text) <= _PORT_DIGITS else 0
    return host.strip("[]"), port if port <= _PORT_MAX else 0


def boot_id_of(target: Target) -> bytes:
    """The boot id of a target's worker as the view says it, zeros where it does not."""
    try:
        boot_id = bytes.fromhex(target.boot_id)
    except ValueError:
        return bytes(ID_BYTES)
    return boot_id if len(boot_id) == ID_BYTES else bytes(ID_BYTES)
