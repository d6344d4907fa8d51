"""A virtual machine that runs one command of this machine's file system, on a disk of its own, until its power goes.

qemu emulates the CPU (no KVM needed: a command begins about 6 s after the start). The guest sees the host's `/`
read-only; /run, /dev and /dev/shm are its own. What it says leaves at once by a virtio port into a file, so that the
host has it whatever happens to the guest in the next instant.
"""

from __future__ import annotations

import shlex
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.powercut.boot_image import boot_image

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

    In the guest: /run/disk is an empty folder to mount on, /run/tmp for temporary files, /dev/vda the disk,
    `port_path()` names the device that `said` on the host reads.

    Args:
        folder: an empty folder on the host, for what goes in and out; kept by the caller.
        command: program and arguments.
        disk: Unix socket of an NBD server.
        sector_bytes: what the disk says its sectors are.
    """

    def __init__(self, folder: Path, command: Sequence[str], *, disk: Path, sector_bytes: int = 512) -> None:
        self._folder = folder
        self._status = folder / "status"
        self._said = folder / "said"
        self._said.touch()
        (folder / "start").write_text(
            "export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/run/tmp TMPDIR=/run/tmp\n"
            "export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 LC_ALL=C.UTF-8\n"
            f"export PYTHONPATH={ROOT}:{ROOT}/client:{ROOT}/bench\n"
            f"cd {shlex.quote(str(ROOT))}\nexec {shlex.join(command)}\n"
        )
        image = boot_image()
        arguments = ["qemu-system-x86_64", "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"]
        arguments += ["-M", "q35", "-accel", "tcg,thread=multi,tb-size=512", "-cpu", "max", "-smp", "2"]
        arguments += ["-m", str(MEMORY_MIB), "-kernel", str(image.kernel), "-initrd", str(image.initramfs)]
        arguments += ["-append", _KERNEL_ARGUMENTS, "-serial", f"file:{folder}/console", "-device", "virtio-rng-pci"]
        arguments += ["-chardev", f"file,id=said,path={self._said}", "-device", "virtio-serial-pci"]
        arguments += ["-device", f"virtserialport,chardev=said,name={PORT_NAME}"]
        arguments += ["-virtfs", "local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap,id=host"]
        arguments += ["-virtfs", f"local,path={folder},mount_tag=control,security_model=none,id=control"]
        arguments += ["-blockdev", f"nbd,node-name=disk,server.type=unix,server.path={disk},cache.direct=on"]
        sizes = f"logical_block_size={sector_bytes},physical_block_size=4096"
        arguments += ["-device", f"virtio-blk-pci,drive=disk,write-cache=on,{sizes}"]
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


def port_path() -> Path:
    """In the guest: the device whose lines the host reads with `VirtualMachine.said`."""
    for name in Path("/sys/class/virtio-ports").glob("*/name"):
        if name.read_text().strip() == PORT_NAME:
            return Path("/dev") / name.parent.name
    raise RuntimeError(f"no virtio port is called {PORT_NAME!r}; this is not the virtual machine")
