"""The command `kvstore`. The one file that imports typer; what a command needs is imported when it runs.

Exit status: 0 done; 1 it failed, `check` found damage, `doctor` something that fails, or records of a drain were not
taken; 2 the request was wrong; 3 the node (or a port, a drive) is not available now, or a drain not done yet: trying
again may help.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvstore.cli.option_values import (
    check_hex,
    digest_of,
    manifest_of,
    parsed,
    tokens_of,
    whole_digest,
)
from kvstore.errors import InvalidRequest, KVStoreError, Retryable
from kvstore.limits import SECOND_NS, STATUS_NODE_NS

if TYPE_CHECKING:
    from kvstore.server.grpc_edge.client import ControlClient
    from kvstore.server.report import Drained

EXIT_FAILED: Final = 1
EXIT_INVALID: Final = 2
EXIT_UNAVAILABLE: Final = 3

app = typer.Typer(
    help="A disaggregated KVCache store: chunks of KV of large language models, on SSD nodes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

drive_app = typer.Typer(help="A drive that no node has open: adopt or format it.", no_args_is_help=True)
app.add_typer(drive_app, name="drive")
tenants_app = typer.Typer(help="Tenants, their tokens, and what they use.", no_args_is_help=True)
app.add_typer(tenants_app, name="tenants")

Node = Annotated[str, typer.Option("--node", envvar="KVSTORE_NODE", help="gRPC address of a node.")]
Json = Annotated[bool, typer.Option("--json", help="Report as JSON.")]
Timeout = Annotated[str, typer.Option("--timeout", help="How long a call may take, such as 10s.")]
TokenFile = Annotated[
    str | None,
    typer.Option("--token-file", envvar="KVSTORE_TOKEN_FILE", help="File with the token, where the node has tenants."),
]
_NODE_DEFAULT: Final = "127.0.0.1:7400"


def main() -> None:
    """Run the command line; errors of ours become one clear message and an exit status."""
    try:
        try:
            app()
        finally:
            sys.stdout.flush()  # else a reader that is gone is noticed at the interpreter's end, outside of here
    except KVStoreError as error:
        for line in str(error).splitlines():
            print(f"kvstore: {line}", file=sys.stderr)
        sys.exit(_exit_status(error))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # who read it has seen enough (`| head`); what is left of the output must not be tried again at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_FAILED)


def _exit_status(error: KVStoreError) -> int:
    if isinstance(error, InvalidRequest):
        return EXIT_INVALID
    return EXIT_UNAVAILABLE if isinstance(error, Retryable) else EXIT_FAILED


def _show_version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


@app.callback()
def common(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version, and end.")
    ] = False,
) -> None:
    """A disaggregated KVCache store: chunks of KV of large language models, on SSD nodes."""


@app.command()
def serve(
    data_dir: Annotated[str | None, typer.Option(help="Folders or raw block devices, comma-separated.")] = None,
    capacity: Annotated[str | None, typer.Option(help="Bytes that all of them together may use, such as 8GiB.")] = None,
    host: Annotated[str | None, typer.Option(help="Addresses to listen on, comma-separated. [127.0.0.1]")] = None,
    advertise: Annotated[str | None, typer.Option(help="Address for clients where --host is a wildcard.")] = None,
    grpc_port: Annotated[str | None, typer.Option(help="Control plane; 0 is any free port. [7400]")] = None,
    data_port: Annotated[str | None, typer.Option(help="Data plane. [7401]")] = None,
    metrics_port: Annotated[str | None, typer.Option(help="/metrics, /healthz and a status page. [7402]")] = None,
    workers: Annotated[str | None, typer.Option(help="Processes that own drives. [one for each host]")] = None,
    cache: Annotated[str | None, typer.Option(help="RAM cache for hot chunks; 0 turns it off. [1GiB]")] = None,
    staging: Annotated[str | None, typer.Option(help="Memory for transfers in progress. [128MiB]")] = None,
    ready_file: Annotated[str | None, typer.Option(help="Written as JSON once the node serves.")] = None,
    cluster: Annotated[str | None, typer.Option(help="etcd://HOST:PORT,...; empty is a node on its own.")] = None,
    node_label: Annotated[str | None, typer.Option(help="Failure domain, such as the rack. [the node]")] = None,
    lease_ttl: Annotated[str | None, typer.Option(help="How long the cluster waits for a silent node. [10s]")] = None,
    node_id: Annotated[str | None, typer.Option(help="Name of the node. [chosen at the first start]")] = None,
    transport: Annotated[str | None, typer.Option(help="tcp, shm, rdma or auto. [auto]")] = None,
    socket_dir: Annotated[str | None, typer.Option(help="Where its Unix sockets go. [TMPDIR]")] = None,
    rdma_port: Annotated[str | None, typer.Option(help="RDMA port, such as mlx5_0:1. [by rule]")] = None,
    rdma_gid: Annotated[str | None, typer.Option(help="Its GID, as index or address. [by rule]")] = None,
    device: Annotated[str | None, typer.Option(help="auto, uring or threads. [auto]")] = None,
    queue_depth: Annotated[str | None, typer.Option(help="Operations in flight for each drive. [32]")] = None,
    segment_bytes: Annotated[str | None, typer.Option(help="Segment of a new drive; 0 is by capacity. [0]")] = None,
    write_amplification_max: Annotated[str | None, typer.Option(help="Bound of re-insertion. [1.3]")] = None,
    drive_endurance: Annotated[str | None, typer.Option(help="Bytes a day a drive is rated for, such as 2TiB.")] = None,
    repair_rate: Annotated[
        str | None, typer.Option(help="Bytes a second that a worker copies from other nodes; 0 is off. [64MiB]")
    ] = None,
    scrub_rate: Annotated[str | None, typer.Option(help="Bytes a second to verify; 0 is off. [2MiB]")] = None,
    drain_timeout: Annotated[str | None, typer.Option(help="Time for calls in progress at the end. [20s]")] = None,
    tenants: Annotated[str | None, typer.Option(help="File with tenants and tokens; none is an open node.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Listen beyond loopback without tenants.")] = False,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error. [info]")] = None,
    log_format: Annotated[str | None, typer.Option(help="human or json. [human]")] = None,
    config: Annotated[
        str | None, typer.Option(help="TOML file with the same names (data_dir, grpc_port, ...).")
    ] = None,
) -> None:
    """Run a node until SIGTERM, which drains and exits 0.

    Each option may also come from the environment (KVSTORE_GRPC_PORT) or from the file of --config.
    """
    flags = _settings_given(locals())
    from kvstore.server.node import run_node
    from kvstore.settings import load_node_settings
    from kvstore.telemetry.logs import LogFormat, LogLevel, configure

    settings = load_node_settings(flags, config=Path(config) if config else None)
    configure(level=LogLevel(settings.log_level), format=LogFormat(settings.log_format), process="supervisor")
    run_node(settings)


def _with_settings_of(model: Callable[..., None]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command all options of another one, in place of its `**settings`."""

    def extend(command: Callable[..., None]) -> Callable[..., None]:
        # typer reads __signature__, and takes the annotations in it as they are
        own, others = (signature(each, eval_str=True).parameters.values() for each in (command, model))
        kept = [one for one in own if one.kind is not Parameter.VAR_KEYWORD]
        command.__signature__ = Signature([*kept, *others])  # type: ignore[attr-defined]
        command.__annotations__ |= {one.name: one.annotation for one in others}
        return command

    return extend


def _settings_given(options: Mapping[str, object]) -> dict[str, object]:
    """Options of `serve` as settings: what was not given is left to environment and file."""
    given = {name: value for name, value in options.items() if name != "config"}
    return given | {"insecure": given["insecure"] or None}


@app.command()
@_with_settings_of(serve)
def doctor(as_json: Json = False, **settings: object) -> None:
    """What is wrong with this machine, for a node with these settings: found, needed, and the fix for each line.

    Exit status 1 when something is failing: a node would not start, or not keep what its settings promise.
    """
    from kvstore.cli.doctor import run_doctor

    config = settings["config"]
    sys.exit(run_doctor(_settings_given(settings), config=Path(str(config)) if config else None, as_json=as_json))


@app.command()
def status(
    node: Node = _NODE_DEFAULT,
    as_json: Json = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again every 2 seconds.")] = False,
    timeout: Timeout = "10s",
    token_file: TokenFile = None,
) -> None:
    """How a node is, and all targets of its cluster: state, space, hit rate, traffic."""
    from kvstore.cli.status import run_status

    with _client(node, timeout, token_file) as client:
        run_status(
            client,
            lambda address: _client(address, timeout, token_file, deadline_ns_max=STATUS_NODE_NS),
            as_json=as_json,
            watch=watch,
        )


@app.command()
def namespaces(
    node: Node = _NODE_DEFAULT,
    tenant: Annotated[str, typer.Option(help="Whose namespaces.")] = "default",
    after: Annotated[str, typer.Option(help="Digest (hex) to go on after.")] = "",
    limit: Annotated[int, typer.Option(help="At most so many.")] = 100,
    as_json: Json = False,
    timeout: Timeout = "10s",
    token_file: TokenFile = None,
) -> None:
    """Namespaces of a tenant that a node knows."""
    from kvstore.cli.render import json_text, show_namespaces
    from kvstore.cli.screen import Screen

    with _client(node, timeout, token_file) as client:
        page = client.namespaces(tenant, after=digest_of(after, "--after") if after else b"", limit=limit)
    if as_json:
        print(json_text(page))
    else:
        show_namespaces(Screen(), page)


@app.command()
def explain(
    keys: Annotated[list[str] | None, typer.Argument(help="Digests of chunks (ChunkKey.digest), in hex.")] = None,
    node: Node = _NODE_DEFAULT,
    tenant: Annotated[str, typer.Option(help="Whose data; an explanation stays within one tenant.")] = "default",
    tokens: Annotated[str, typer.Option(help="Token ids, comma-separated, or @FILE with ids in it.")] = "",
    namespace: Annotated[str, typer.Option(help="Digest of the namespace, in hex, or its beginning.")] = "",
    manifest: Annotated[str | None, typer.Option(help="File with Namespace.manifest() of what you use.")] = None,
    model: Annotated[str, typer.Option(help="Model that you use.")] = "",
    weights: Annotated[str, typer.Option(help="Weights fingerprint that you use.")] = "",
    adapter: Annotated[str, typer.Option(help="Adapter that you use.")] = "",
    adapter_revision: Annotated[str, typer.Option(help="Revision of the adapter.")] = "",
    layout: Annotated[str, typer.Option(help="Digest of the KVLayout that you use, in hex.")] = "",
    as_json: Json = False,
    timeout: Timeout = "10s",
    token_file: TokenFile = None,
) -> None:
    """Why was this a miss?

    Says which field of the namespace differs from what is stored, and for each chunk: stored, never written, evicted
    and when, quarantined or pending. Of a cluster all nodes are asked: where it belongs, and what each of them said.
    """
    from kvstore.cli.cluster_explain import ask_nodes, merge
    from kvstore.cli.render import json_text, show_answer
    from kvstore.cli.screen import Screen
    from kvstore.server.report import Answer, NodeWhere, Question

    check_hex(namespace, "--namespace")
    question = Question(
        tenant=tenant,
        manifest=manifest_of(manifest) if manifest else b"",
        model=model,
        weights=weights,
        adapter=adapter,
        adapter_revision=adapter_revision,
        layout_digest=digest_of(layout, "--layout") if layout else b"",
        keys=b"".join(digest_of(key, "a key") for key in keys or ()),
        tokens=tokens_of(tokens),
    )
    with ExitStack() as stack:
        client = stack.enter_context(_client(node, timeout, token_file))
        nodes = client.report().nodes
        clients = {
            one.grpc: stack.enter_context(_client(one.grpc, timeout, token_file, deadline_ns_max=STATUS_NODE_NS))
            for one in nodes
        }
        if namespace:
            digest = whole_digest(client, tenant, namespace.lower(), list(clients.values()))
            question = replace(question, namespace=digest)

        def asking(where: NodeWhere) -> Answer:
            return clients[where.grpc].explain(question)

        answer = merge(question, client.view(), ask_nodes(nodes, asking)) if nodes else client.explain(question)
    if as_json:
        print(json_text(answer))
    else:
        show_answer(Screen(), answer)


@app.command()
def scrub(
    node: Node = _NODE_DEFAULT,
    rate: Annotated[str, typer.Option(help="Bytes a second per drive; 0 is as fast as it can.")] = "0",
    every_node: Annotated[bool, typer.Option("--every-node", help="All nodes of the cluster.")] = False,
    as_json: Json = False,
    timeout: Timeout = "10s",
    token_file: TokenFile = None,
) -> None:
    """Verify the records of all sealed segments now; `kvstore status` shows the progress."""
    from kvstore.cli.everywhere import on_every_node, words_of_scrub
    from kvstore.server.report import NodeWhere
    from kvstore.settings import parse_size

    rate_bytes = parsed(parse_size, rate, "--rate")
    with _client(node, timeout, token_file) as client:
        nodes = client.report().nodes if every_node else ()
        if not nodes:
            started = client.scrub(rate_bytes)
            words = "scrub started" if started else "a scrub was in progress; it goes on"
            _tell(as_json, {"started": started}, words)
            return

    def scrubbing(where: NodeWhere) -> bool:
        with _client(where.grpc, timeout, token_file) as one:
            return one.scrub(rate_bytes)

    found = on_every_node(nodes, scrubbing)
    _tell(as_json, {"nodes": [asdict(one) for one in found]}, words_of_scrub(found))
    sys.exit(EXIT_UNAVAILABLE if any(one.failure for one in found) else 0)


@app.command()
def drop(
    namespace: Annotated[str, typer.Argument(help="Digest of the namespace, in hex.")] = "",
    node: Node = _NODE_DEFAULT,
    tenant: Annotated[str, typer.Option(help="Whose namespace.")] = "default",
    manifest: Annotated[str | None, typer.Option(help="File with Namespace.manifest(), for the digest.")] = None,
    as_json: Json = False,
    timeout: Timeout = "10s",
    token_file: TokenFile = None,
) -> None:
    """Hide everything in a namespace, at once, on every node of the cluster. Nodes that are away hear of it later.

    With --manifest a node remembers the drop also when none of those that answer knows the namespace.
    """
    from kvstore.types.digest import digest

    content = manifest_of(manifest) if manifest else b""
    if not content and not namespace:
        raise InvalidRequest("no namespace is given; pass its digest in hex, or --manifest FILE")
    whole = digest(content) if content else digest_of(namespace, "the namespace")
    with _client(node, timeout, token_file) as client:
        done = client.drop(tenant, whole, manifest=content)
    words = "dropped" if done.dropped else "no node knows such a namespace"
    _tell(as_json, asdict(done), "; ".join((words, *(f"not told: {one}" for one in done.unreached))))
    sys.exit(0 if done.dropped else EXIT_FAILED)


@app.command()
def drain(
    node: Node = _NODE_DEFAULT,
    resume: Annotated[bool, typer.Option("--resume", help="Take puts again.")] = False,
    as_json: Json = False,
    timeout: Timeout = "60s",
    token_file: TokenFile = None,
) -> None:
    """Refuse new puts on a node; gets go on. In a cluster, wait up to --timeout while it hands on what it holds.

    Exit status 0 when all of it was handed on, 3 when that is not done yet, 1 when it is over and some was not taken.
    """
    with _client(node, timeout, token_file) as client:
        drained = client.drain(resume=resume)
    if not drained.draining:
        _tell(as_json, {"draining": False}, "takes puts again")
        return
    words, status = _drain_outcome(drained)
    _tell(as_json, asdict(drained), words)
    sys.exit(status)


DriveDir = Annotated[Path, typer.Argument(help="Data folder or block device.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]


@drive_app.command("adopt")
def adopt_drive(data_dir: DriveDir, yes: Yes = False, as_json: Json = False) -> None:
    """Let the next node that is started with a drive of another node serve what is on it."""
    from kvstore.cli.drive import adopt

    done = adopt(data_dir, ask=_asker(yes))
    _tell(as_json, done, f"{data_dir} may be adopted: start the node with it")


@drive_app.command("format")
def format_drive(data_dir: DriveDir, yes: Yes = False, as_json: Json = False) -> None:
    """Erase a drive, whatever is on it; the next node that is started with it formats it."""
    from kvstore.cli.drive import erase

    done = erase(data_dir, ask=_asker(yes))
    _tell(as_json, done, f"{data_dir} is empty: start the node with it")


@tenants_app.command("list")
def list_tenants(
    node: Node = _NODE_DEFAULT,
    as_json: Json = False,
    timeout: Timeout = "10s",
    token_file: TokenFile = None,
) -> None:
    """What each tenant uses of the node and may use; without an admin's token one's own."""
    from kvstore.cli.render import json_text, show_tenants
    from kvstore.cli.screen import Screen

    with _client(node, timeout, token_file) as client:
        uses = client.report().tenants
    if as_json:
        print(json_text({"tenants": uses}))
    else:
        show_tenants(Screen(), uses)


@tenants_app.command("reload")
def reload_tenants(
    node: Node = _NODE_DEFAULT,
    as_json: Json = False,
    timeout: Timeout = "10s",
    token_file: TokenFile = None,
) -> None:
    """Let a node read its tenants file again, as SIGHUP does; connections of revoked tokens are closed."""
    with _client(node, timeout, token_file) as client:
        count = client.reload_tenants()
    words = f"{count} tenants are known now" if count else "this node is open: it was started without --tenants"
    _tell(as_json, {"tenants": count}, words)


@tenants_app.command("new-token")
def new_token(
    file: Annotated[Path, typer.Argument(help="New file for the secret, readable by its owner only.")],
    as_json: Json = False,
) -> None:
    """Draw a token into a file, and print its SHA-256 for the tenants file."""
    from kvstore.server.tenants import hash_of
    from kvstore.types.secret import write_new_token

    sha256 = hash_of(write_new_token(file)).hex()
    _tell(as_json, {"file": str(file), "sha256": sha256}, sha256)


@tenants_app.command("hash")
def hash_token(
    file: Annotated[Path, typer.Argument(help="File with a token.")],
    as_json: Json = False,
) -> None:
    """Print the SHA-256 of a token, for the tenants file."""
    from kvstore.server.tenants import hash_of
    from kvstore.types.secret import read_token

    sha256 = hash_of(read_token(file)).hex()
    _tell(as_json, {"file": str(file), "sha256": sha256}, sha256)


@app.command()
def check(
    data_dir: Annotated[Path, typer.Argument(help="Data folder or block device of a node that does not run.")],
    as_json: Json = False,
) -> None:
    """Verify every record of a data folder, offline. Exit status 0 only if all is well."""
    from kvstore.cli.check import check_data_dir

    sys.exit(check_data_dir(data_dir, as_json=as_json))


@app.command()
def demo(
    synthetic: Annotated[bool, typer.Option("--synthetic", help="Made-up KV instead of a model: no torch.")] = False,
) -> None:
    """The product at work: prefill writes, the node is killed, decode restores and generates."""
    from kvstore.cli.demo import run_demo
    from kvstore.cli.screen import Screen

    sys.exit(run_demo(Screen(), synthetic=synthetic))


@app.command()
def version(as_json: Json = False) -> None:
    """The version of this program."""
    import kvstore

    _tell(as_json, {"version": kvstore.__version__}, kvstore.__version__)


def _client(
    node: str, timeout: str, token_file: str | None, *, deadline_ns_max: int = 3600 * SECOND_NS
) -> ControlClient:
    from kvstore.server.grpc_edge.client import ControlClient
    from kvstore.settings import parse_duration
    from kvstore.types.secret import read_token

    host, _, port = node.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        raise InvalidRequest(f"--node is {node[:200]!r}; give host:port of its control plane, such as {_NODE_DEFAULT}")
    deadline_ns = parsed(parse_duration, timeout, "--timeout")
    if not 0 < deadline_ns <= 3600 * SECOND_NS:
        raise InvalidRequest(f"--timeout is {timeout}; give more than nothing and at most 1h")
    token = read_token(token_file) if token_file else b""
    return ControlClient(node, deadline_ns=min(deadline_ns, deadline_ns_max), token=token)


def _drain_outcome(drained: Drained) -> tuple[str, int]:
    """What a person is told of a drain, and the exit status."""
    count, left = drained.handed_on, drained.left_behind
    if not drained.done:
        so_far = f"{count} handed on, {left} not taken so far"
        return f"draining, but not done yet: {so_far}; it goes on: run it again", EXIT_UNAVAILABLE
    if left:
        return f"draining: handed on {count} records, {left} were not taken: they are on this node only", EXIT_FAILED
    if not count and not drained.receivers:
        return "draining: puts are refused; nothing can be handed on, for no other node serves", 0
    return f"draining: handed on {count} records", 0


def _asker(yes: bool) -> Callable[[str], bool]:
    """Asks a person; without a terminal nobody is asked, and the answer is no."""
    return lambda question: yes or (sys.stdin.isatty() and typer.confirm(question))


def _tell(as_json: bool, fields: dict[str, object], words: str) -> None:
    import json

    print(json.dumps(fields) if as_json else words)
