"""What an inference worker loads when it imports the client: no gRPC, no protobuf, no torch, no server."""

from __future__ import annotations

import subprocess
import sys

FORBIDDEN = (
    *("grpc", "google.protobuf", "torch", "transformers"),
    *("typer", "rich", "pydantic", "prometheus_client", "opentelemetry"),
)


def test_the_client_is_light() -> None:
    program = f"import sys, kvstore_client; print([name for name in {FORBIDDEN!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
