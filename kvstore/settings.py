"""Settings of a node: flag, else environment (KVSTORE_*), else configuration file (TOML), else default.

The names are the same everywhere: flag `--grpc-port`, variable `KVSTORE_GRPC_PORT`, file key `grpc_port`. This is the
one file that imports pydantic; the rest sees `NodeSettings` and `InvalidRequest`.
"""

from __future__ import annotations

import ipaddress
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from kvstore.errors import InvalidRequest
from kvstore.limits import (
    CACHE_BYTES_DEFAULT,
    CAPACITY_BYTES_MIN,
    DATA_DIRS_MAX,
    LEASE_TTL_NS_DEFAULT,
    LEASE_TTL_NS_MAX,
    LEASE_TTL_NS_MIN,
    MS_NS,
    NODE_ID_BYTES_MAX,
    PULL_BYTES_SECOND_DEFAULT,
    QUEUE_DEPTH_DEFAULT,
    QUEUE_DEPTH_MAX,
    SCRUB_BYTES_SECOND_DEFAULT,
    SECOND_NS,
    SEGMENT_BYTES_MAX,
    SEGMENT_BYTES_MIN,
    SEGMENTS_MIN,
    SHUTDOWN_NS_DEFAULT,
    SHUTDOWN_NS_MAX,
    STAGING_BYTES_DEFAULT,
    STAGING_BYTES_MIN,
    WORKERS_MAX,
    WRITE_AMPLIFICATION_DEFAULT,
    WRITE_AMPLIFICATION_MAX,
    GiB,
    KiB,
    MiB,
)

ENVIRONMENT_PREFIX: Final = "KVSTORE_"
_DEFAULTS_OF_REQUIRED: Final[dict[str, object]] = {"data_dir": (), "capacity": 0}

_UNITS: Final = {
    "": 1,
    "b": 1,
    "kib": KiB,
    "mib": MiB,
    "gib": GiB,
    "tib": 1024 * GiB,
    "kb": 1_000,
    "mb": 1_000_000,
    "gb": 1_000_000_000,
    "tb": 1_000_000_000_000,
}
_TIMES: Final = {"ns": 1, "us": 1_000, "ms": MS_NS, "s": SECOND_NS, "m": 60 * SECOND_NS, "h": 3600 * SECOND_NS}
_QUANTITY: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*")


def parse_size(text: str | int) -> int:
    """Bytes of "8GiB", "512MiB", "1.5GB" or 4096. Raises ValueError saying what would be right."""
    if isinstance(text, int):
        return _not_negative(text)
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f"{text!r} is not a size; write a number with B, KiB, MiB, GiB or TiB, such as 8GiB")
    return _whole(Decimal(match[1]) * _UNITS[match[2].lower()], text, "bytes")


def parse_duration(text: str | int) -> int:
    """Nanoseconds of "30s", "200ms", "5m". Raises ValueError saying what would be right."""
    match = _QUANTITY.fullmatch(str(text))
    if match is None or match[2].lower() not in _TIMES:
        raise ValueError(f"{text!r} is not a duration; write a number with ns, us, ms, s, m or h, such as 30s")
    return _whole(Decimal(match[1]) * _TIMES[match[2].lower()], str(text), "nanoseconds")


def format_size(size_bytes: int) -> str:
    """The shortest exact way to write a size, e.g. "8GiB" or "1000B"; `parse_size` reads it back."""
    for unit, bytes_each in (("TiB", 1024 * GiB), ("GiB", GiB), ("MiB", MiB), ("KiB", KiB)):
        if size_bytes and size_bytes % bytes_each == 0:
            return f"{size_bytes // bytes_each}{unit}"
    return f"{size_bytes}B"


def format_duration(duration_ns: int) -> str:
    """The shortest exact way to write a duration, e.g. "90s" or "2h"; `parse_duration` reads it back."""
    for unit in ("h", "m", "s", "ms", "us"):
        if duration_ns and duration_ns % _TIMES[unit] == 0:
            return f"{duration_ns // _TIMES[unit]}{unit}"
    return f"{duration_ns}ns"


_FORMS: Final[Mapping[object, Callable[[int], str]]] = {parse_size: format_size, parse_duration: format_duration}


def _not_negative(value: int) -> int:
    if value < 0:
        raise ValueError(f"{value} is negative; write 0 or more")
    return value


def _whole(value: Decimal, text: str, unit: str) -> int:
    if value != int(value):
        raise ValueError(f"{text!r} is not a whole number of {unit}")
    return int(value)


def _comma_list(value: object) -> object:
    return tuple(piece.strip() for piece in value.split(",") if piece.strip()) if isinstance(value, str) else value


def is_loopback(host: str) -> bool:
    """True for addresses that only this machine reaches. Other names are not resolved: they count as reachable."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _can_be_dialled(host: str) -> bool:
    """Whether it has the form of a name or of an address that is no wildcard; nobody is asked for it."""
    try:
        return not ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return re.fullmatch(r"[^\s:/,@\[\]]+", host) is not None


def is_wildcard(host: str) -> bool:
    """True for 0.0.0.0 and ::, which listen everywhere but name no place to connect to."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


Size = Annotated[int, BeforeValidator(parse_size)]
Duration = Annotated[int, BeforeValidator(parse_duration)]
CommaList = Annotated[tuple[str, ...], BeforeValidator(_comma_list)]
Port = Annotated[int, Field(ge=0, le=65_535)]


class NodeSettings(BaseSettings):
    """What `kvstore serve` needs to know. Sizes are bytes, durations nanoseconds; read each field's description.

    Made by `load_node_settings`, which turns what is wrong into one clear `InvalidRequest`.
    """

    model_config = SettingsConfigDict(
        env_prefix=ENVIRONMENT_PREFIX, frozen=True, extra="forbid", enable_decoding=False, validate_default=False
    )

    data_dir: CommaList = Field(description="folders or raw block devices, one target for each")
    capacity: Size = Field(description="bytes that all of data_dir together may use, divided evenly")
    host: CommaList = Field(
        ("127.0.0.1",), description="addresses to listen on; each worker has one as its rail, and listens on all"
    )
    advertise: str = Field("", description="name or address that clients connect to, where host is a wildcard")
    grpc_port: Port = Field(7400, description="port of the control plane; 0 is any free one")
    data_port: Port = Field(7401, description="port of the data plane; 0 is any free one")
    metrics_port: Port = Field(7402, description="port of /metrics, /healthz and the status page; 0 is any free one")
    workers: int = Field(0, ge=0, le=WORKERS_MAX, description="processes that own drives; 0 is one for each host")
    cache: Size = Field(CACHE_BYTES_DEFAULT, description="RAM cache for hot chunks; 0 turns it off")
    staging: Size = Field(STAGING_BYTES_DEFAULT, description="memory for transfers in progress")
    ready_file: str = Field("", description="written with the addresses once the node serves")
    cluster: str = Field("", description="cluster store, etcd://HOST:PORT,...; empty is a node on its own")
    node_label: str = Field("", description="failure domain, such as the rack; empty is the node itself")
    lease_ttl: Duration = Field(
        LEASE_TTL_NS_DEFAULT,
        ge=LEASE_TTL_NS_MIN,
        le=LEASE_TTL_NS_MAX,
        description="how long the cluster waits for a node that is silent; whole seconds",
    )
    node_id: str = Field("", description="name of the node; empty lets the first start choose one and keep it")
    transport: Literal["tcp", "shm", "auto", "rdma"] = Field(
        "auto", description="how payload travels: auto takes shared memory and RDMA where they can be had"
    )
    socket_dir: str = Field("", description="folder for the node's Unix sockets; empty is that for temporary files")
    rdma_port: str = Field(
        "", description='RDMA port, such as mlx5_0:1; empty lets the rule choose (see "kvstore doctor")'
    )
    rdma_gid: str = Field("", description="GID of that port, its index or address; empty lets the rule choose")
    device: Literal["auto", "uring", "threads"] = Field("auto", description="how the drive is driven")
    queue_depth: int = Field(QUEUE_DEPTH_DEFAULT, ge=1, le=QUEUE_DEPTH_MAX, description="operations in flight a drive")
    segment_bytes: Size = Field(0, description="size of a segment of a new drive; 0 chooses by its capacity")
    write_amplification_max: float = Field(
        WRITE_AMPLIFICATION_DEFAULT, ge=1, le=WRITE_AMPLIFICATION_MAX, description="bound of re-insertion at eviction"
    )
    drive_endurance: Size = Field(0, description="bytes a day that each drive is rated for; 0 is not set")
    scrub_rate: Size = Field(SCRUB_BYTES_SECOND_DEFAULT, description="bytes a second verified per drive; 0 is off")
    repair_rate: Size = Field(
        PULL_BYTES_SECOND_DEFAULT, description="bytes a second that a worker copies from other nodes; 0 is off"
    )
    drain_timeout: Duration = Field(
        SHUTDOWN_NS_DEFAULT, le=SHUTDOWN_NS_MAX, description="how long calls in progress may take at the end"
    )
    tenants: str = Field("", description="file that describes the tenants and their tokens; empty is an open node")
    insecure: bool = Field(False, description="allow addresses beyond loopback without tenants")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="what is worth a line")
    log_format: Literal["human", "json"] = Field("human", description="how a line looks")

    @model_validator(mode="after")
    def _check(self) -> NodeSettings:
        if faults := list(_faults_of_all(self)):
            raise ValueError("\n".join(faults))
        return self

    @property
    def capacity_each_bytes(self) -> int:
        """What each of `data_dir` may use, whole MiB."""
        return self.capacity // len(self.data_dir) // MiB * MiB

    @property
    def advertised_host(self) -> str:
        """The host that clients are told for gRPC and metrics."""
        return self.advertise or self.host[0]


def _faults_of_drives(settings: NodeSettings) -> Iterator[str]:
    count = len(settings.data_dir)
    if not 1 <= count <= DATA_DIRS_MAX:
        yield f"data_dir names {count} folders; name 1 to {DATA_DIRS_MAX}"
        return
    if len(set(map(os.path.abspath, settings.data_dir))) < count:
        yield f"data_dir {','.join(settings.data_dir)} names one folder twice; name each once"
    if settings.capacity_each_bytes < CAPACITY_BYTES_MIN:
        each = "the data dir" if count == 1 else f"each of {count} data dirs"
        yield (
            f"capacity {format_size(settings.capacity)} gives {each} "
            f"{format_size(settings.capacity_each_bytes)}, at least {format_size(CAPACITY_BYTES_MIN)} is needed; "
            f"set capacity to {format_size(CAPACITY_BYTES_MIN * count)} or more"
        )
    else:
        yield from _faults_of_segment(settings.segment_bytes, settings.capacity_each_bytes)
    if 0 < settings.drive_endurance < MiB:
        yield f"drive_endurance is {settings.drive_endurance} bytes a day; write it with a unit, such as 2TiB"


def _faults_of_segment(segment_bytes: int, capacity_bytes: int) -> Iterator[str]:
    if segment_bytes == 0:
        return
    most = min(SEGMENT_BYTES_MAX, capacity_bytes // SEGMENTS_MIN // MiB * MiB)
    if not SEGMENT_BYTES_MIN <= segment_bytes <= most or segment_bytes % MiB:
        yield (
            f"segment_bytes {format_size(segment_bytes)} must be whole MiB from {format_size(SEGMENT_BYTES_MIN)} to "
            f"{format_size(most)} (a drive has {SEGMENTS_MIN} segments or more); 0 chooses by the capacity"
        )


def _faults_of_memory(settings: NodeSettings) -> Iterator[str]:
    if settings.staging < STAGING_BYTES_MIN:
        yield f"staging {format_size(settings.staging)} is below {format_size(STAGING_BYTES_MIN)}; raise staging"
    memory = memory_limit_bytes()
    wanted = settings.cache + settings.staging
    if memory and wanted > memory * 9 // 10:
        yield (
            f"cache {format_size(settings.cache)} and staging {format_size(settings.staging)} together exceed 90 % of "
            f"this machine's memory ({memory // MiB}MiB); lower cache, or set it to 0"
        )


def _faults_of_addresses(settings: NodeSettings) -> Iterator[str]:
    name_bytes = len(settings.node_id.encode())
    if name_bytes > NODE_ID_BYTES_MAX:
        yield f"node_id has {name_bytes} bytes, the limit is {NODE_ID_BYTES_MAX}; choose a shorter one"
    if not settings.host:
        yield "host is empty; name an address to listen on, such as 127.0.0.1"
    for host in settings.host:
        if not settings.insecure and not settings.tenants and not is_loopback(host):
            yield (
                f"host {host} is reachable from other machines, and no tenants are known; listen on 127.0.0.1, "
                "pass --tenants FILE, or pass --insecure where the network is trusted"
            )
        if is_wildcard(host) and not settings.advertise:
            yield f"host {host} names no place that clients can connect to; pass --advertise ADDRESS with it"
    if settings.advertise and not _can_be_dialled(settings.advertise):
        yield (
            f"advertise {settings.advertise} is no name or address that clients can connect to; give one alone, such "
            "as 10.0.0.5 or node-5.example: ports are added to it, and brackets to an IPv6 address"
        )
    ports = [port for port in (settings.grpc_port, settings.data_port, settings.metrics_port) if port]
    if len(set(ports)) < len(ports):
        yield f"grpc_port, data_port and metrics_port must differ, they are {ports}"


def _faults_of_all(settings: NodeSettings, *, has_drives: bool = True) -> Iterator[str]:
    """What does not fit together, one line each."""
    if has_drives:
        yield from _faults_of_drives(settings)
    yield from _faults_of_memory(settings)
    yield from _faults_of_addresses(settings)


def memory_limit_bytes() -> int:
    """Memory this process may use: the machine's, or its control group's if that is less. 0 where neither is known."""
    limits: list[int] = []
    try:
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (OSError, ValueError):
        pass
    # memory.max of cgroup v2; in a container its own group is the root of the mount
    try:
        text = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        text = "max"
    if text.isdigit():
        limits.append(int(text))
    return min(limits, default=0)


def load_node_settings(flags: Mapping[str, object], *, config: Path | None = None) -> NodeSettings:
    """The settings of a node.

    Args:
        flags: what was given on the command line, by field name; None means not given.
        config: TOML file with field names as keys; None is KVSTORE_CONFIG, or no file.

    Raises:
        InvalidRequest: something is missing, unknown, malformed or out of bounds. One line for each fault.
    """
    given: dict[str, Any] = {name: value for name, value in flags.items() if value is not None}
    path = config or (Path(found) if (found := os.environ.get(f"{ENVIRONMENT_PREFIX}CONFIG")) else None)
    from_file = _read_config(path) if path else {}
    try:
        return _layered(from_file)(**given)
    except ValidationError:
        # pydantic looks at what does not fit together only where each setting alone is right
        inspected = _inspect(given, path, from_file)
        raise InvalidRequest("\n".join((*inspected.missing, *inspected.faults))) from None


def inspect_node_settings(
    flags: Mapping[str, object], *, config: Path | None = None
) -> tuple[NodeSettings, tuple[str, ...]]:
    """The settings as far as they are sound, for a program that tells what is wrong instead of refusing.

    What is malformed has its default, a missing data_dir is empty and a missing capacity 0. A file that cannot be read
    or parsed is a fault, and counts as empty.

    Returns:
        The settings, and one line for each fault; a missing data_dir or capacity is none.
    """
    given: dict[str, Any] = {name: value for name, value in flags.items() if value is not None}
    path = config or (Path(found) if (found := os.environ.get(f"{ENVIRONMENT_PREFIX}CONFIG")) else None)
    faults: tuple[str, ...] = ()
    from_file: dict[str, Any] = {}
    try:
        from_file = _read_config(path) if path else {}
    except InvalidRequest as error:
        faults = (str(error),)
    inspected = _inspect(given, path, from_file)
    return inspected.settings, (*faults, *inspected.faults)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Inspected:
    """Settings as far as they are sound, and one line for each that is missing or wrong."""

    settings: NodeSettings
    missing: tuple[str, ...]
    faults: tuple[str, ...]


def _inspect(given: Mapping[str, Any], path: Path | None, from_file: dict[str, Any]) -> _Inspected:
    faults: dict[str, str] = {}
    missing: dict[str, str] = {}
    sound = dict(given)
    left = from_file
    while True:
        try:
            settings = _layered(left, _Unchecked)(**sound)
            break
        except ValidationError as error:
            for entry in error.errors():
                detail, name = dict(entry), str(entry["loc"][0])
                told = missing if detail["type"] == "missing" else faults
                told[name] = _fault(detail, given, path, from_file)
                left = {key: value for key, value in left.items() if key != name}
                sound.pop(name, None)
                if name in NodeSettings.model_fields:
                    sound[name] = _default_as_given(name)
    has_drives = not {"data_dir", "capacity"} & {*faults, *missing}
    return _Inspected(
        settings=settings,
        missing=tuple(missing.values()),
        faults=(*faults.values(), *_faults_of_all(settings, has_drives=has_drives)),
    )


def _default_as_given(name: str) -> object:
    """The default of a setting as a flag would give it: it is read again, and a duration without a unit is refused."""
    field = NodeSettings.model_fields[name]
    if any(getattr(rule, "func", None) is parse_duration for rule in field.metadata):
        return f"{field.default}ns"
    return _DEFAULTS_OF_REQUIRED.get(name, field.default)


class _Unchecked(NodeSettings):
    """Fields alone: what does not fit together is looked at by whoever made it."""

    @model_validator(mode="after")
    def _check(self) -> _Unchecked:
        return self


def _layered(from_file: dict[str, Any], base: type[NodeSettings] = NodeSettings) -> type[NodeSettings]:
    class FileSource(PydanticBaseSettingsSource):
        def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:
            return from_file.get(field_name), field_name, False

        def __call__(self) -> dict[str, Any]:
            return from_file

    class LayeredSettings(base):  # type: ignore[valid-type, misc]  # a base chosen at run time
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return init_settings, env_settings, FileSource(settings_cls)

    return LayeredSettings


def _read_config(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise InvalidRequest(f"config file {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"config file {path} is not valid TOML: {error}") from error


_WORDS: Final = {"int_parsing": "write a whole number", "float_parsing": "write a number"}


def _message(detail: Mapping[str, Any], name: str) -> str:
    """What is wrong with one value and what would be right, in the units that people write."""
    kind, given = str(detail["type"]), detail["input"]
    rules = NodeSettings.model_fields[name].metadata if name in NodeSettings.model_fields else []
    form = next((_FORMS[rule.func] for rule in rules if getattr(rule, "func", None) in _FORMS), str)
    for key, bound, words in (("le", "less_than_equal", "at most"), ("ge", "greater_than_equal", "at least")):
        if kind == bound:
            return f"{form(given)} is not allowed; give {words} {form(detail['ctx'][key])}"
    if kind in _WORDS:
        return f"{given!r}: {_WORDS[kind]}"
    message = str(detail["msg"]).removeprefix("Value error, ")
    return message if repr(given) in message or not name else f"{given!r}: {message[:1].lower() + message[1:]}"


def _fault(detail: dict[str, Any], flags: Mapping[str, object], path: Path | None, from_file: dict[str, Any]) -> str:
    """One line for a person out of one entry of pydantic's list."""
    name = ".".join(map(str, detail["loc"][:1]))
    message = _message(detail, name)
    if not name:
        return message
    flag, variable = f"--{name.replace('_', '-')}", f"{ENVIRONMENT_PREFIX}{name.upper()}"
    if detail["type"] == "missing":
        return f"{name} is not set; pass {flag}, or set {variable} or {name} in the config file"
    if detail["type"] == "extra_forbidden":
        known = ", ".join(NodeSettings.model_fields)
        return f"{name} is not a setting; known are: {known}"
    if name in flags:
        origin = f"flag {flag}"
    elif variable in os.environ:
        origin = f"environment variable {variable}"
    else:
        origin = f"key {name} of {path}" if name in from_file else f"default of {name}"
    return f"{origin}: {message}"
