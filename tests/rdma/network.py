"""Shell lines that give a guest its RDMA devices, and the packages that the host needs for them.

Linux 6.1 serves software RDMA (rxe) in the first network namespace only, so both devices of one machine live there.
Their packets still cross the pair of virtual wires: the table of local addresses is asked only after rules that send
each pair of addresses out of its own interface. GID 0 of rxe is the link-local one, GID 1 that of the IPv4 address.
"""

from __future__ import annotations

from typing import Final

ADDRESSES: Final = ("10.77.0.1", "10.77.0.2")
ASIDE_ADDRESSES: Final = ("10.78.0.1", "10.78.0.2")
"""Of the second wire between two machines, on which they agree what to do while the first one is down."""
GID_INDEX: Final = 1
PYVERBS: Final = "/usr/lib/python3/dist-packages/pyverbs"
"""Debian's package for its own Python 3.11, which ours is too (./dev sees to it)."""

_MTU_BYTES: Final = 4200  # room for the largest RDMA packet, 4096 bytes of payload
_LIMITS: Final = "ulimit -l unlimited; ulimit -n 65536"
# a folder of its own, since dist-packages holds much else that would stand before the packages of .venv
_PYVERBS_PATH: Final = f"mkdir /run/extra; ln -s {PYVERBS} /run/extra/pyverbs; PYTHONPATH=$PYTHONPATH:/run/extra"

TWO_DEVICES: Final = f"""
{_LIMITS}; {_PYVERBS_PATH}
ip -batch - <<'LINES'
link set lo up
link add eth0 mtu {_MTU_BYTES} type veth peer name eth1 mtu {_MTU_BYTES}
LINES
for name in all eth0 eth1; do
  folder=/proc/sys/net/ipv4/conf/$name
  echo 1 > $folder/accept_local; echo 0 > $folder/rp_filter; echo 1 > $folder/arp_ignore; echo 2 > $folder/arp_announce
done
ip -batch - <<'LINES'
link set eth0 up
link set eth1 up
addr add {ADDRESSES[0]}/24 dev eth0
addr add {ADDRESSES[1]}/24 dev eth1
rule add pref 10 iif eth0 lookup local
rule add pref 11 iif eth1 lookup local
rule add pref 20 oif eth0 to {ADDRESSES[1]} lookup 100
rule add pref 21 oif eth1 to {ADDRESSES[0]} lookup 101
rule add pref 22 from {ADDRESSES[0]} to {ADDRESSES[1]} lookup 100
rule add pref 23 from {ADDRESSES[1]} to {ADDRESSES[0]} lookup 101
route add {ADDRESSES[1]} dev eth0 src {ADDRESSES[0]} table 100
route add {ADDRESSES[0]} dev eth1 src {ADDRESSES[1]} table 101
rule add pref 100 lookup local
rule del pref 0
LINES
rdma link add rxe0 type rxe netdev eth0
rdma link add rxe1 type rxe netdev eth1
export KVSTORE_RDMA_GUEST=pair
"""
"""rxe0 on eth0 and rxe1 on eth1 of one machine."""


def one_device(host: int) -> str:
    """rxe0 on eth0 of one of two machines, joined by two wires of `tests.vm.machine.link_device`."""
    return f"""
{_LIMITS}; {_PYVERBS_PATH}
ip -batch - <<'LINES'
link set lo up
link set eth0 mtu {_MTU_BYTES} up
addr add {ADDRESSES[host]}/24 dev eth0
link set eth1 up
addr add {ASIDE_ADDRESSES[host]}/24 dev eth1
LINES
rdma link add rxe0 type rxe netdev eth0
export KVSTORE_RDMA_GUEST={host}
"""
