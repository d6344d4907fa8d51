"""Kernel and first file system of the tests' virtual machines: made once from Debian's stock kernel, then kept.

The initramfs is busybox, the modules below and `init`, which loads those of one kit, mounts the host's `/` read-only
and hands over. Needs no root: `apt-get download` works for every user on Debian.
"""

from __future__ import annotations

import fcntl
import hashlib
import lzma
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PROGRAMS: Final = ("qemu-system-x86_64", "busybox", "cpio", "zstd", "dpkg-deb", "apt-get", "setpriv")
_META_PACKAGE: Final = "linux-image-amd64"
_BASE_MODULES: Final = ("virtio_pci", "virtio_console", "virtio_rng", "9pnet_virtio", "9p")
_KIT_MODULES: Final = {
    # ext4 asks for crc32c_generic by a soft dependency, which modules do not name in `depends`
    "disk": ("virtio_blk", "crc32c_generic", "ext4"),
    # rxe asks for "crc32" of the crypto interface by name only; without it `rdma link add` fails with ENOENT
    "rdma": ("veth", "virtio_net", "crc32_generic", "ib_uverbs", "rdma_rxe", "sch_netem"),
}
KITS: Final = tuple(_KIT_MODULES)
_MODULE_FILES: Final = (  # patterns of tar, whose * takes in whole folders
    "drivers/virtio/*",
    "drivers/char/*",
    "drivers/block/*",
    "drivers/infiniband/core/*",
    "drivers/infiniband/sw/*",
    "drivers/net/net_failover*",
    "drivers/net/veth*",
    "drivers/net/virtio_net*",
    "net/*",
    "fs/*",
    "lib/*",
    "crypto/*",
    "arch/*",
)

_INIT: Final = """#!/bin/busybox sh
b=/bin/busybox
$b mount -t proc proc /proc; $b mount -t sysfs sys /sys
for word in $($b cat /proc/cmdline); do case $word in kit=*) kit=${word#kit=};; esac; done
while read module; do $b insmod /modules/$module || echo "insmod $module failed"; done < /modules/order.$kit
nine=trans=virtio,version=9p2000.L,msize=512000
$b mount -t 9p -o ro,cache=loose,$nine host /host || echo "no 9p root"
$b mount -t proc proc /host/proc; $b mount -t sysfs sys /host/sys; $b mount -t devtmpfs dev /host/dev
$b mkdir -p /host/dev/pts /host/dev/shm
$b mount -t devpts pts /host/dev/pts; $b mount -t tmpfs shm /host/dev/shm; $b mount -t tmpfs run /host/run
$b ln -s /proc/self/fd /host/dev/fd
$b mkdir /host/run/control /host/run/tmp /host/run/disk
$b mount -t 9p -o cache=none,$nine control /host/run/control || echo "no control folder"
$b ip link set lo up
$b hostname kvstore-vm
$b chroot /host /bin/sh /run/control/start < /host/dev/null > /host/run/control/output 2>&1
echo $? > /host/run/control/status
$b poweroff -f
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class BootImage:
    """Files that qemu boots."""

    kernel: Path
    initramfs: Path


def boot_image() -> BootImage:
    """The image, made on first use (one download of about 70 MB) and kept in ~/.cache/kvstore/vm.

    Raises:
        RuntimeError: apt knows no kernel package, or the package is not as expected.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kvstore" / "vm"
    cache.mkdir(parents=True, exist_ok=True)
    edition = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]
    ready = cache / edition
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not ready.exists():
            package = _kernel_package(cache)
            with tempfile.TemporaryDirectory(dir=cache) as scratch:
                _build(package, Path(scratch))
                (Path(scratch) / "image").rename(ready)
            for old in cache.iterdir():
                if old.is_dir() and old != ready:  # of an earlier edition of this file
                    shutil.rmtree(old)
    return BootImage(kernel=ready / "vmlinux", initramfs=ready / "initramfs.img")


def _kernel_package(cache: Path) -> Path:
    """The kernel's .deb, from the cache or by apt; its version stays what it was at the first download."""
    found = sorted(cache.glob("linux-image-*.deb"))
    if found:
        return found[-1]
    name = _kernel_name()
    if not name:
        subprocess.run(["apt-get", "update", "-qq"], check=True)
        name = _kernel_name()
    if not name:
        raise RuntimeError(f"apt knows no kernel package: {_META_PACKAGE} depends on none; look at apt's sources")
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        # the sandbox user of apt may not write where only the owner may
        subprocess.run(["apt-get", "-qq", "-o", "APT::Sandbox::User=root", "download", name], cwd=scratch, check=True)
        package = next(Path(scratch).glob("*.deb"))
        return package.rename(cache / package.name)


def _kernel_name() -> str:
    answer = subprocess.run(["apt-cache", "depends", _META_PACKAGE], capture_output=True, text=True, check=False)
    match = re.search(r"Depends: (linux-image-\d\S*)", answer.stdout)
    return match[1] if match else ""


def _build(package: Path, scratch: Path) -> None:
    unpacked, root, image = scratch / "package", scratch / "root", scratch / "image"
    for folder in (unpacked, image):
        folder.mkdir()
    patterns = ["./boot/vmlinuz*", *(f"./lib/modules/*/kernel/{name}" for name in _MODULE_FILES)]
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(package)], stdout=subprocess.PIPE) as archive:
        subprocess.run(["tar", "x", "-C", unpacked, "--wildcards", *patterns], stdin=archive.stdout, check=True)
    (image / "vmlinux").write_bytes(_elf_kernel(next(unpacked.glob("boot/vmlinuz-*")).read_bytes()))

    for name in ("bin", "proc", "sys", "dev", "host", "modules"):
        (root / name).mkdir(parents=True)
    shutil.copy(str(shutil.which("busybox")), root / "bin" / "busybox")
    for kit, wanted in _KIT_MODULES.items():
        order = []
        for module, content in _modules(unpacked, (*_BASE_MODULES, *wanted)):
            (root / "modules" / f"{module}.ko").write_bytes(content)
            order.append(f"{module}.ko\n")
        (root / "modules" / f"order.{kit}").write_text("".join(order))
    (root / "init").write_text(_INIT)
    (root / "init").chmod(0o755)
    with (image / "initramfs.img").open("wb") as output:
        pack = "find . | cpio -o -H newc --quiet | zstd -q -3"
        subprocess.run(["sh", "-c", pack], cwd=root, stdout=output, check=True)


def _elf_kernel(compressed: bytes) -> bytes:
    """The kernel as ELF, which boots by the PVH entry without unpacking itself under emulation (3 s less)."""
    at = compressed.find(b"\xfd7zXZ\x00")
    if at >= 0:
        kernel = lzma.LZMADecompressor(lzma.FORMAT_XZ).decompress(compressed[at:])
    else:
        at = compressed.find(b"\x28\xb5\x2f\xfd")
        # what follows the frame is not zstd's, hence no check of the status
        tool = subprocess.run(["zstd", "-qdc"], input=compressed[at:], capture_output=True, check=False)
        kernel = tool.stdout
    if kernel[:4] != b"\x7fELF":
        raise RuntimeError("no ELF kernel inside the package's vmlinuz: neither xz nor zstd")
    return kernel


def _modules(unpacked: Path, wanted: Sequence[str]) -> list[tuple[str, bytes]]:
    """The wanted modules with all they depend on, in an order in which they load."""
    files = {
        file.name.split(".ko")[0].replace("-", "_"): file for file in unpacked.glob("lib/modules/*/kernel/**/*.ko*")
    }
    found: dict[str, bytes] = {}

    def visit(name: str) -> None:
        if name in found or name not in files:  # not there: built into the kernel
            return
        content = files[name].read_bytes()
        if files[name].suffix == ".xz":
            content = lzma.decompress(content)
        match = re.search(rb"\0depends=([^\0]*)\0", content)
        for needed in match[1].decode().split(",") if match else ():
            visit(needed.replace("-", "_"))
        found[name] = content

    for name in wanted:
        visit(name)
    return list(found.items())
