"""`python -m kvstore_client.demo ROLE --node HOST:PORT`: one process of `kvstore demo`. Prints lines of JSON."""

from __future__ import annotations

import argparse
from typing import Protocol

from kvstore.cli.demo_report import RoleNote, RoleReport, to_line


class Roles(Protocol):
    """The parts of the demo; the real model and the synthetic one play them."""

    def prefill(self, node: str) -> RoleReport:
        """Computes the KV of the prompt and writes its chunks."""

    def decode(self, node: str) -> RoleReport:
        """Restores what the store has, computes the rest and generates."""

    def alone(self) -> RoleReport:
        """Computes everything and generates, without a store."""


def say(note: str) -> None:
    """Shows a line to the person who watches."""
    print(to_line(RoleNote(note=note)), flush=True)


def main() -> None:
    """Plays one role."""
    parser = argparse.ArgumentParser(prog="python -m kvstore_client.demo", description=__doc__)
    parser.add_argument("role", choices=("fetch", "prefill", "decode", "alone"))
    parser.add_argument("--node", default="", help="gRPC address of any node")
    parser.add_argument("--synthetic", action="store_true", help="made-up KV instead of a model's")
    arguments = parser.parse_args()
    if arguments.role == "fetch":
        _fetch()
        return
    roles = _synthetic_roles() if arguments.synthetic else _model_roles()
    if arguments.role == "alone":
        report = roles.alone()
    else:
        report = (roles.prefill if arguments.role == "prefill" else roles.decode)(arguments.node)
    print(to_line(report), flush=True)


def _fetch() -> None:
    from kvstore_client.integrations.smollm2 import ensure_model

    say(f"model in {ensure_model(say)}")


def _synthetic_roles() -> Roles:
    from kvstore_client.demo.synthetic_roles import SyntheticRoles

    return SyntheticRoles()


def _model_roles() -> Roles:
    from kvstore_client.demo.model_roles import ModelRoles
    from kvstore_client.integrations.smollm2 import ensure_model

    return ModelRoles(ensure_model(say))


if __name__ == "__main__":
    main()
