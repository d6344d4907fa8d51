"""Networks under test: places with an address of their own, and faults between them. Needs root.

Each place is a network namespace with one card, or several (rails), that lives as long as a small process of ours
(PR_SET_PDEATHSIG): whatever ends this process, the kernel takes namespaces, wires and rules away with it. All cards
hang on one bridge, which lies in a namespace as well; this process reaches them over a wire of its own. Each rail is a
subnet.
"""

from __future__ import annotations

import os
import random
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, Self

MTU_BYTES: Final = 1_500
_WAIT_SECONDS: Final = 30.0
_POLL_SECONDS: Final = 0.01
_RAILS_MAX: Final = 4
_SUBNETS: Final = 250
_FIRST_HOST: Final = 10
_PLACES_MAX: Final = 240
_BRIDGE: Final = "br0"
_FRAME_BYTES_MAX: Final = 64 * 1024
_STEADY: Final[Mapping[str, str | int]] = {"tcp_congestion_control": "reno", "tcp_min_tso_segs": 16}
"""Whatever this machine's default is. BBR sends what a slow connection may send in a millisecond, a frame or two, and
each wakes both sides; so the CPU would be the limit long before a network of many such connections is."""
_OWN_ADDRESSES: Final[Mapping[str, str | int]] = {"arp_ignore": 1, "arp_announce": 2}
"""Each card answers for its own addresses only: all of them hear what is asked on the bridge."""
_RULES: Final = """
table ip lab {
  chain inward { type filter hook input priority 0; }
  chain outward { type filter hook output priority 0; }
}
flush table ip lab
"""


class NamespacesUnavailable(RuntimeError):
    """This process may not make network namespaces; the message says what is missing."""


@dataclass(slots=True, kw_only=True)
class NetPlace:
    """A network namespace. Made by `NetLab.add`.

    Attributes:
        addresses: One for each rail.
        prefix: Command that runs what follows it inside.
    """

    name: str
    addresses: tuple[str, ...]
    holder: subprocess.Popen[bytes]
    blocked: set[str] = field(default_factory=set)

    @property
    def address(self) -> str:
        """That of its first rail."""
        return self.addresses[0]

    @property
    def prefix(self) -> tuple[str, ...]:
        """Command that runs what follows it inside."""
        return "nsenter", f"--net=/proc/{self.holder.pid}/ns/net"


class NetLab:
    """A bridge and its places. A context manager.

    Attributes:
        outside: Addresses of this process's own end, which clients outside of any place connect from: one a rail.
    """

    def __init__(self, *, mtu_bytes: int = MTU_BYTES) -> None:
        """`mtu_bytes` is what a frame carries at most.

        Raises:
            NamespacesUnavailable: This process is not root, or a program is missing.
        """
        if os.geteuid() != 0:
            raise NamespacesUnavailable(f"network namespaces need root, this is user {os.geteuid()}; run as root")
        self._places: dict[str, NetPlace] = {}
        self._mtu = f"mtu {mtu_bytes}"
        self._hub = _hold()
        try:
            self._wire, subnet = self._join_outside()
            self._subnets = [f"10.{222 + rail}.{subnet}" for rail in range(_RAILS_MAX)]
            self.outside = tuple(f"{one}.1" for one in self._subnets)
            _run(*self._inside(self._hub), "ip", "link", "add", "name", _BRIDGE, "type", "bridge")
            self._hub_batch(f"link set dev {_BRIDGE} up")
            self._hub_batch(f"link set dev {self._wire} {self._mtu} master {_BRIDGE} up")
            _batch((), *(f"addr add {one}/24 dev {self._wire}" for one in self.outside))
            _batch((), f"link set dev {self._wire} {self._mtu} up")
        except BaseException:
            self.close()
            raise

    def add(self, name: str, *, rails: int = 1) -> NetPlace:
        """A new place with so many cards. `name` is a letter and at most ten more letters or digits."""
        assert name.isalnum(), f"{name!r} is no name of a place"
        assert len(name) <= 11, f"{name!r} is too long for a name of a place"
        assert name not in self._places, f"place {name} is there"
        assert len(self._places) < _PLACES_MAX, "too many places"
        assert 1 <= rails <= _RAILS_MAX, f"{rails} rails; 1 to {_RAILS_MAX} can be made"
        host = _FIRST_HOST + len(self._places)
        addresses = tuple(f"{subnet}.{host}" for subnet in self._subnets[:rails])
        place = NetPlace(name=name, addresses=addresses, holder=_hold())
        self._places[name] = place
        _set(place.prefix, "conf/all", _OWN_ADDRESSES)
        _batch(place.prefix, "link set lo up")
        for rail, address in enumerate(addresses):
            port, card = _port(place, rail), f"eth{rail}"
            self._hub_batch(f"link add name {port} type veth peer name {card} netns {place.holder.pid}")
            self._hub_batch(f"link set dev {port} {self._mtu} master {_BRIDGE} up")
            _batch(place.prefix, f"addr add {address}/24 dev {card}", f"link set {card} {self._mtu} up")
        return place

    def block(self, place: NetPlace, addresses: Iterable[str]) -> None:
        """Nothing passes between a place and these addresses, in either direction and without a word."""
        place.blocked |= set(addresses)
        self._filter(place)

    def unblock(self, place: NetPlace, addresses: Iterable[str]) -> None:
        """Undo `block`."""
        place.blocked -= set(addresses)
        self._filter(place)

    def cut(self, place: NetPlace, *, rail: int | None = None) -> None:
        """Pull a place's cables, or that of one rail: nobody hears from it any more."""
        self._switch(place, rail, "down")

    def mend(self, place: NetPlace, *, rail: int | None = None) -> None:
        """Put the cables back."""
        self._switch(place, rail, "up")

    def limit(self, place: NetPlace, *, bytes_per_s: int) -> None:
        """What a place sends by each rail passes at this rate at most, as through a slow network card."""
        burst_bytes = max(2 * _FRAME_BYTES_MAX, bytes_per_s // 100)
        _set(place.prefix, "", _STEADY)
        shape = ("rate", f"{bytes_per_s * 8}bit", "burst", f"{burst_bytes}b", "latency", "200ms")
        for rail in range(len(place.addresses)):
            _run(*place.prefix, "tc", "qdisc", "replace", "dev", f"eth{rail}", "root", "tbf", *shape)

    def close(self) -> None:
        """Takes everything away. Idempotent."""
        for place in self._places.values():
            _end(place.holder)
        self._places.clear()
        _end(self._hub)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _join_outside(self) -> tuple[str, int]:
        """A wire from here to the bridge. Its name stands for its subnet, so that two labs never share one."""
        for subnet in random.sample(range(_SUBNETS), _SUBNETS):
            wire = f"kvlab{subnet}"
            peer = ("type", "veth", "peer", "name", wire, "netns", str(self._hub.pid))
            made = _try("ip", "link", "add", wire, *peer)
            if made.returncode == 0:
                return wire, subnet
            if b"exists" not in made.stderr:
                raise NamespacesUnavailable(f"no veth pair can be made: {made.stderr.decode().strip()}")
        raise NamespacesUnavailable(f"all {_SUBNETS} subnets 10.222.0.0/16 are in use by other labs")

    def _filter(self, place: NetPlace) -> None:
        rules = [
            f"add rule ip lab {chain} ip {end} {address} drop"
            for address in sorted(place.blocked)
            for chain, end in (("inward", "saddr"), ("outward", "daddr"))
        ]
        _run(*place.prefix, "nft", "-f", "-", words="\n".join((_RULES, *rules, "")))

    def _switch(self, place: NetPlace, rail: int | None, state: str) -> None:
        chosen = range(len(place.addresses)) if rail is None else (rail,)
        self._hub_batch(*(f"link set dev {_port(place, one)} {state}" for one in chosen))

    def _hub_batch(self, *lines: str) -> None:
        _batch(self._inside(self._hub), *lines)

    @staticmethod
    def _inside(holder: subprocess.Popen[bytes]) -> tuple[str, ...]:
        return "nsenter", f"--net=/proc/{holder.pid}/ns/net"


def _hold() -> subprocess.Popen[bytes]:
    """A process in a network namespace of its own, which is the namespace's whole life."""
    try:
        holder = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "sleep", "infinity"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except FileNotFoundError as error:
        raise NamespacesUnavailable(f"{error.filename} is not installed: apt-get install util-linux") from error
    ours, theirs = os.readlink("/proc/self/ns/net"), Path(f"/proc/{holder.pid}/ns/net")
    until = time.monotonic() + _WAIT_SECONDS
    while _read_link(theirs) in ("", ours):
        if holder.poll() is not None:
            assert holder.stderr is not None
            raise NamespacesUnavailable(f"no network namespace: {holder.stderr.read().decode().strip()}")
        assert time.monotonic() < until, "unshare does not come to an end"
        time.sleep(_POLL_SECONDS)
    return holder


def _end(holder: subprocess.Popen[bytes]) -> None:
    holder.kill()
    holder.wait()
    if holder.stderr is not None:
        holder.stderr.close()


def _port(place: NetPlace, rail: int) -> str:
    """The bridge's end of a card."""
    return f"{place.name}r{rail}" if rail else place.name


def _set(prefix: Sequence[str], folder: str, values: Mapping[str, str | int]) -> None:
    """Settings of the network namespace in /proc/sys/net/ipv4."""
    lines = (f"echo {value} > /proc/sys/net/ipv4/{folder}/{name}" for name, value in values.items())
    _run(*prefix, "sh", "-ec", "\n".join(lines))


def _read_link(path: Path) -> str:
    try:
        return str(path.readlink())
    except FileNotFoundError:
        return ""


def _batch(prefix: Sequence[str], *lines: str) -> None:
    """Several commands of ip(8) at once."""
    _run(*prefix, "ip", "-batch", "-", words="\n".join((*lines, "")))


def _run(*command: str, words: str = "") -> None:
    done = _try(*command, words=words)
    if done.returncode:
        raise NamespacesUnavailable(f"{' '.join(command)} failed: {done.stderr.decode().strip()}")


def _try(*command: str, words: str = "") -> subprocess.CompletedProcess[bytes]:
    environment = os.environ | {"PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"}
    try:
        return subprocess.run(command, input=words.encode(), capture_output=True, timeout=60, env=environment)
    except FileNotFoundError as error:
        raise NamespacesUnavailable(
            f"{error.filename} is not installed: apt-get install iproute2 nftables util-linux"
        ) from error
