"""A virtual machine that runs one command of this machine's file system, until it ends or its power goes.

qemu emulates the CPU (no KVM needed: a command begins about 6 s after the start). The guest sees the host's `/`
read-only; /run, /dev and /dev/shm are its own. What it says leaves at once by a virtio port into a file, so that the
host has it whatever happens to the guest in the next instant.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.vm.boot_image import KITS, boot_image

ROOT: Final = Path(__file__).resolve().parents[2]
MEMORY_MIB: Final = 1024
PORT_NAME: Final = "said"
POLL_S: Final = 0.02
TAIL_BYTES: Final = 3_000

_KERNEL_ARGUMENTS: Final = (
    "console=ttyS0 quiet panic=-1 mitigations=off nokaslr audit=0 apparmor=0 random.trust_cpu=on tsc=reliable "
    "no_timer_check cryptomgr.notests"
)


class VirtualMachine:
    """One boot. The command runs in the repository's root with the same interpreter as the caller's, as root.

    In the guest: /run/control is `folder`, /run/disk an empty folder to mount on, /run/tmp for temporary files,
    /dev/vda the disk if there is one, `port_path()` names the device that `said` on the host reads.

    Args:
        folder: an empty folder on the host, for what goes in and out; kept by the caller.
        command: program and arguments.
        kit: which of the image's kernel modules are loaded.
        devices: qemu's arguments for what this machine has besides, as those of `disk_device` and `link_device`.
        before: shell lines that run before the command.
    """

    def __init__(
        self, folder: Path, command: Sequence[str], *, kit: str, devices: Sequence[str] = (), before: str = ""
    ) -> None:
        assert kit in KITS, kit
        self._folder = folder
        self._status = folder / "status"
        self._said = folder / "said"
        self._said.touch()
        (folder / "start").write_text(
            "export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/run/tmp TMPDIR=/run/tmp\n"
            "export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 LC_ALL=C.UTF-8\n"
            f"export PYTHONPATH={ROOT}:{ROOT}/client:{ROOT}/bench\n"
            f"cd {shlex.quote(str(ROOT))}\n{before}\nexec {shlex.join(command)}\n"
        )
        image = boot_image()
        arguments = ["setpriv", "--pdeathsig", "KILL"]  # no machine outlives the test that made it
        arguments += ["qemu-system-x86_64", "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"]
        arguments += ["-M", "q35", "-accel", "tcg,thread=multi,tb-size=512", "-cpu", "max", "-smp", "2"]
        arguments += ["-m", str(MEMORY_MIB), "-kernel", str(image.kernel), "-initrd", str(image.initramfs)]
        arguments += ["-append", f"{_KERNEL_ARGUMENTS} kit={kit}", "-serial", f"file:{folder}/console"]
        arguments += ["-device", "virtio-rng-pci", "-device", "virtio-serial-pci"]
        arguments += ["-chardev", f"file,id=said,path={self._said}"]
        arguments += ["-device", f"virtserialport,chardev=said,name={PORT_NAME}"]
        arguments += ["-virtfs", "local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap,id=host"]
        arguments += ["-virtfs", f"local,path={folder},mount_tag=control,security_model=none,id=control", *devices]
        with (folder / "qemu").open("wb") as log:
            self._process = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def said(self) -> list[str]:
        """Whole lines that the guest has written to its port so far."""
        return self._said.read_text().split("\n")[:-1]

    def wait_said(self, count: int, timeout_s: float) -> list[str]:
        """Waits until the guest has said that many lines.

        Raises:
            RuntimeError: it ended before, or the time is over; with what console and command printed.
        """
        end = time.monotonic() + timeout_s
        while len(lines := self.said()) < count:
            if self._process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the guest said {len(lines)} lines, not {count}\n{self.printed()}")
            time.sleep(POLL_S)
        return lines

    def wait(self, timeout_s: float) -> int:
        """Exit status of the command, once the machine has powered off.

        Raises:
            RuntimeError: the time is over, or the machine ended without running the command to its end.
        """
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise RuntimeError(f"the guest ran longer than {timeout_s:g} s\n{self.printed()}") from None
        if not self._status.exists():
            raise RuntimeError(f"the guest ended without a status\n{self.printed()}")
        return int(self._status.read_text())

    def kill(self) -> None:
        """The power goes: no process of the guest, nor its kernel, does anything any more."""
        self._process.kill()
        self._process.wait()

    def output(self) -> str:
        """All that the command has printed so far."""
        file = self._folder / "output"
        return file.read_text(errors="replace") if file.exists() else ""

    def printed(self) -> str:
        """The ends of what qemu, the guest's console and the command printed."""
        parts = []
        for name in ("qemu", "console", "output"):
            file = self._folder / name
            text = file.read_bytes()[-TAIL_BYTES:].decode(errors="replace") if file.exists() else ""
            parts.append(f"--- {name}\n{text}")
        return "\n".join(parts)

    def __enter__(self) -> VirtualMachine:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def disk_device(disk: Path, *, sector_bytes: int = 512) -> list[str]:
    """A virtio disk, /dev/vda in the guest.

    Args:
        disk: Unix socket of an NBD server.
        sector_bytes: what the disk says its sectors are.
    """
    sizes = f"logical_block_size={sector_bytes},physical_block_size=4096"
    return [
        *("-blockdev", f"nbd,node-name=disk,server.type=unix,server.path={disk},cache.direct=on"),
        *("-device", f"virtio-blk-pci,drive=disk,write-cache=on,{sizes}"),
    ]


def link_device(folder: Path, *, host: int, wire: int = 0) -> list[str]:
    """One end of a wire between two machines, eth0 in the guest for wire 0; both may start in any order.

    Args:
        folder: short path on the host where both ends have their sockets.
        host: 0 or 1.
        wire: of several between the same two, counted from 0 in the order of the devices.
    """
    assert host in (0, 1), host
    here, there = folder / f"link{wire}.{host}", folder / f"link{wire}.{1 - host}"
    here.unlink(missing_ok=True)
    ends = f"local.type=unix,local.path={here},remote.type=unix,remote.path={there}"
    return [
        *("-netdev", f"dgram,id=link{wire},{ends}"),
        *("-device", f"virtio-net-pci,netdev=link{wire},host_mtu=4200,mac=52:54:00:77:0{wire}:0{host + 1},romfile="),
    ]


def missing_programs(names: Sequence[str]) -> list[str]:
    """What of `names` this machine lacks."""
    search = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    return [name for name in names if shutil.which(name, path=search) is None]


def port_path() -> Path:
    """In the guest: the device whose lines the host reads with `VirtualMachine.said`."""
    for name in Path("/sys/class/virtio-ports").glob("*/name"):
        if name.read_text().strip() == PORT_NAME:
            return Path("/dev") / name.parent.name
    raise RuntimeError(f"no virtio port is called {PORT_NAME!r}; this is not the virtual machine")
