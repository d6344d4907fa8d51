"""`kvstore demo`: prefill writes, the node is killed, decode restores and generates; and the same without the store.

The parts of inference are processes of their own (`python -m kvstore_client.demo`), as they would be in a cluster: they
share nothing but the node.
"""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Final

from kvstore.cli.demo_report import RoleNote, RoleReport, from_line
from kvstore.cli.local_node import LocalNode
from kvstore.cli.screen import Screen
from kvstore.errors import InvalidRequest, KVStoreError, Unavailable
from kvstore.server.private_folder import private_folder

ROLE_TIMEOUT_S: Final = 900
ERROR_TAIL_CHARACTERS: Final = 2_000
MS_NS: Final = 1_000_000
MB: Final = 1_000_000


def run_demo(screen: Screen, *, synthetic: bool) -> int:
    """Runs the demo in a fresh folder that is removed afterwards.

    Returns:
        0 when text and tokens with and without the store are identical and the prefix came back; else 1.
    """
    # As Ctrl-C does, a polite end takes the node along, which has a process group of its own.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        _need_model_packages(synthetic)
        with private_folder(None, purpose="demo") as folder:
            node = LocalNode(folder, arguments=("--cache", "128MiB"))
            try:
                return _play(screen, node, synthetic)
            finally:
                node.close()
    except KVStoreError as error:
        screen.fail(str(error))
        return 1


def _need_model_packages(synthetic: bool) -> None:
    missing = [name for name in ("torch", "transformers", "gguf") if importlib.util.find_spec(name) is None]
    if missing and not synthetic:
        raise InvalidRequest(
            f"the demo with a real model needs {', '.join(missing)}, not installed here; "
            'pip install ".[transformers]" in the source folder of kvstore, or use --synthetic'
        )


def _play(screen: Screen, node: LocalNode, synthetic: bool) -> int:
    if not synthetic:
        with screen.step("fetch the model SmolLM2-135M-Instruct") as tell:
            _role(["fetch"], tell)
    flags = ["--synthetic"] if synthetic else []
    with screen.step("start a node on an empty data dir") as tell:
        tell(f"serving on {node.start().grpc}, data in {node.data_dir}")
    with screen.step("prefill: compute the prompt's KV, write its chunks") as tell:
        prefill = _report(["prefill", "--node", node.addresses.grpc, *flags], tell)
        tell(f"{prefill.chunks} chunks, {_mb(prefill.length_bytes)}, durable")
    with screen.step("kill -9 the node, start it again") as tell:
        node.kill()
        started_ns = time.monotonic_ns()
        address = node.start().grpc
        tell(f"serving again after {_ms(time.monotonic_ns() - started_ns)}")
    with screen.step("decode: match, restore, generate") as tell:
        decode = _report(["decode", "--node", address, *flags], tell)
        tell(f"{decode.matched_tokens} of {decode.prompt_tokens} tokens came from the store")
    with screen.step("the same without the store") as tell:
        alone = _report(["alone", *flags], tell)
        tell(f"{alone.prompt_tokens} tokens computed")
    with screen.step("stop the node") as tell:
        tell(f"exit status {node.stop()}")
    return _verdict(screen, prefill, decode, alone)


def _verdict(screen: Screen, prefill: RoleReport, decode: RoleReport, alone: RoleReport) -> int:
    identical = decode.text == alone.text and decode.text != ""
    faster = alone.first_token_ns / max(1, decode.first_token_ns)
    rows = [
        ("model", decode.model),
        ("tokens matched", f"{decode.matched_tokens} of {decode.prompt_tokens} in {decode.chunks} chunks"),
        ("bytes written, durable", f"{_mb(prefill.length_bytes)} in {_ms(prefill.store_ns)}"),
        ("bytes restored", f"{_mb(decode.length_bytes)} in {_ms(decode.store_ns)}"),
        ("time to first token, cold", _ms(alone.first_token_ns)),
        ("time to first token, restored", f"{_ms(decode.first_token_ns)}, {faster:.1f} times sooner"),
        ("text with and without the store", "identical" if identical else "DIFFERS"),
    ]
    screen.table("A prefix computed once", rows)
    screen.quote("with the store", decode.text)
    if not identical:
        screen.quote("without the store", alone.text)
    for part, report in (("prefill", prefill), ("decode", decode)):
        if report.trouble:
            screen.fail(f"{part}: {report.trouble}")
    if not decode.matched_tokens:
        screen.fail("nothing came back from the store; see `kvstore explain`")
    return 0 if identical and decode.matched_tokens else 1


def _report(arguments: list[str], tell: Callable[[str], None]) -> RoleReport:
    report = _role(arguments, tell)
    if report is None:
        raise Unavailable(f"the demo process {arguments[0]!r} ended without a report")
    return report


def _role(arguments: list[str], tell: Callable[[str], None]) -> RoleReport | None:
    """Runs one part to its end, showing its notes; its report, if it gave one.

    Raises:
        Unavailable: It failed; the message ends with what it printed.
    """
    report = None
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvstore_client.demo", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        try:
            assert process.stdout is not None
            for line in process.stdout:
                message = from_line(line)
                if isinstance(message, RoleNote):
                    tell(message.note)
                else:
                    report = message
            status = process.wait(ROLE_TIMEOUT_S)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        if status != 0:
            errors.seek(0)
            raise Unavailable(
                f"the demo process {arguments[0]!r} ended with {status}; it printed:\n"
                f"{errors.read()[-ERROR_TAIL_CHARACTERS:]}"
            )
    return report


def _ms(duration_ns: int) -> str:
    return f"{duration_ns / MS_NS:,.0f} ms"


def _mb(length_bytes: int) -> str:
    return f"{length_bytes / MB:,.1f} MB"
