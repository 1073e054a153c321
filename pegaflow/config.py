"""What can be set, where may it be set, and what is wrong with a setting?

One :class:`Option` is one flag, one environment variable and one key of the TOML file; the flag
wins over the variable, the variable over the file.  ``docs/operations.md`` shows :data:`OPTIONS`.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Generic, TypeVar

import attrs

from pegaflow.errors import ConfigError
from pegaflow.model.address import Address, parse_address
from pegaflow.model.units import format_size, parse_size_bytes

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

LOG_LEVELS = ("trace", "debug", "info", "warn", "error")
LOG_FORMATS = ("console", "json")

MIB = 1 << 20
SLAB_BYTES = 256 * MIB
"""The pool becomes usable in steps of this size; no block crosses from one to the next."""
SLAB_BLOCKS_MIN = 32
"""With a hint a slab holds at least so many blocks, so that less than 1/32 of it is left over."""


@attrs.frozen(eq=False)
class Option(Generic[T_co]):
    """One setting.  ``parse`` turns its text into a value or raises :exc:`ConfigError`."""

    name: str
    """kebab-case: ``--name``, ``PEGAFLOW_NAME`` and the key in the file."""
    metavar: str
    """What to write; empty for a switch."""
    default: str
    """As it would be written; empty when unset."""
    parse: Callable[[str], T_co]
    help: str
    repeatable: bool = False

    @property
    def variable(self) -> str:
        """The environment variable."""
        return "PEGAFLOW_" + self.name.replace("-", "_").upper()


def _size(low: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        size = parse_size_bytes(text)
        if size < low:
            raise ConfigError(f"{text!r} is too small: at least {format_size(low)}")
        return size

    return parse


def _optional(parse: Callable[[str], T]) -> Callable[[str], T | None]:
    return lambda text: parse(text) if text else None


def _number(low: float, high: float, what: str) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise ConfigError(f"{text!r} is not {what} between {low:g} and {high:g}")
        return value

    return parse


def _count(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        plain = text.strip()
        if not (plain.isascii() and plain.isdecimal()) or not low <= int(plain) <= high:
            raise ConfigError(f"{text!r} is not a whole number between {low} and {high}")
        return int(plain)

    return parse


def _choice(names: tuple[str, ...]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        name = text.strip().lower()
        if name not in names:
            raise ConfigError(f"{text!r} is none of {', '.join(names)}")
        return name

    return parse


def _switch(text: str) -> bool:
    plain = text.strip().lower()
    if plain in ("true", "1", "yes", "on"):
        return True
    if plain in ("false", "0", "no", "off"):
        return False
    raise ConfigError(f"{text!r} is neither true nor false")


def _addresses(text: str) -> tuple[Address, ...]:
    found = tuple(parse_address(part) for part in text.split(","))
    for address in found:
        if found.count(address) > 1 and address.port != 0:
            raise ConfigError(f"{address} is there twice")
    return found


def _http_address(text: str) -> Address:
    address = parse_address(text, default_port=9091)
    if address.path:
        raise ConfigError(f"{text!r} is no HTTP address: write HOST:PORT (127.0.0.1:9091)")
    return address


def _devices(text: str) -> tuple[int, ...] | None:
    plain = text.strip().lower()
    if plain in ("", "all"):
        return None
    if plain == "none":
        return ()
    parts = [part.strip() for part in plain.split(",")]
    if not all(part.isascii() and part.isdecimal() for part in parts):
        raise ConfigError(f"{text!r} is no list of devices: write 0,1 or all or none")
    found = tuple(int(part) for part in parts)
    if len(set(found)) < len(found):
        raise ConfigError(f"{text!r} names a device twice")
    return found


_SECONDS_MAX = 7 * 86400.0

ADDR = Option(
    "addr",
    "ADDRESS",
    "127.0.0.1:50055",
    _addresses,
    "Where engines connect: HOST:PORT or unix:/path. Repeatable; comma-separated elsewhere. "
    "Port 0 takes a free one.",
    repeatable=True,
)
DEVICES = Option(
    "devices",
    "LIST",
    "all",
    _devices,
    "CUDA devices to serve, by number: 0,1; all takes those that are there, none serves CPU "
    "engines only.",
)
POOL_SIZE = Option(
    "pool-size",
    "SIZE",
    "30gb",
    _size(MIB),
    "Host memory for cached blocks, in total. A number and b, kb, mb, gb or tb, which are "
    "multiples of 1024.",
)
HINT_VALUE_SIZE = Option(
    "hint-value-size",
    "SIZE",
    "",
    _optional(_size(1)),
    "Typical bytes of a block of one rank. The pool grows in slabs of at least 32 of them (and "
    "256 MiB), so that little is left over at the end of each.",
)
USE_HUGEPAGES = Option(
    "use-hugepages",
    "",
    "false",
    _switch,
    "Back the pool with 2 MiB huge pages. They must be reserved before (vm.nr_hugepages).",
)
DISABLE_NUMA_AFFINITY = Option(
    "disable-numa-affinity",
    "",
    "false",
    _switch,
    "Take the pool's memory from anywhere. Without it the NUMA nodes of the GPUs come first, in "
    "turn where there are several.",
)
SAVE_BANDWIDTH = Option(
    "save-bandwidth",
    "SIZE",
    "",
    _optional(_size(MIB)),
    "At most so many bytes a second from engines to the pool, all saves together. Without it saves "
    "run as fast as they can; loads always do.",
)
MEMORY_RESERVE = Option(
    "memory-reserve",
    "SIZE",
    "256mb",
    _size(0),
    "What must stay free beside the pool. The start is refused when both together exceed the "
    "container's limit or the memory that is available.",
)
HTTP_ADDR = Option(
    "http-addr",
    "HOST:PORT",
    "127.0.0.1:9091",
    _http_address,
    "Where /health, /ready, /metrics and the clean-up routes are. They know no passwords.",
)
HIGH_WATERMARK = Option(
    "high-watermark",
    "FRACTION",
    "0.95",
    _number(0.01, 1.0, "a fraction"),
    "Share of the pool at which background eviction begins.",
)
LOW_WATERMARK = Option(
    "low-watermark",
    "FRACTION",
    "0.90",
    _number(0.01, 1.0, "a fraction"),
    "Share of the pool at which background eviction ends.",
)
LEASE_TTL_SECS = Option(
    "lease-ttl-secs",
    "SECONDS",
    "600",
    _number(0.1, _SECONDS_MAX, "a number of seconds"),
    "How long blocks that a query found stay, unless they are loaded or released earlier.",
)
UNSEALED_TTL_SECS = Option(
    "unsealed-ttl-secs",
    "SECONDS",
    "300",
    _number(0.1, _SECONDS_MAX, "a number of seconds"),
    "How long a block may lack the slots of some ranks before it is given up.",
)
SHUTDOWN_GRACE_SECS = Option(
    "shutdown-grace-secs",
    "SECONDS",
    "10",
    _number(0.0, 3600.0, "a number of seconds"),
    "How long calls in flight may take after SIGTERM or SIGINT.",
)
MAX_MESSAGE_SIZE = Option(
    "max-message-size",
    "SIZE",
    "4mb",
    _size(64 << 10),
    "The largest message of a connection, in either direction.",
)
FIRST_MESSAGE_SECS = Option(
    "first-message-secs",
    "SECONDS",
    "10",
    _number(0.05, _SECONDS_MAX, "a number of seconds"),
    "A connection that has asked nothing for so long is closed.",
)
IDLE_SECS = Option(
    "idle-secs",
    "SECONDS",
    "60",
    _number(0.05, _SECONDS_MAX, "a number of seconds"),
    "A connection that is silent for so long, without a call in flight, is closed. Clients ping.",
)
MAX_CALLS_IN_FLIGHT = Option(
    "max-calls-in-flight",
    "COUNT",
    "64",
    _count(1, 65536),
    "Calls of one connection that may wait for an answer; more are refused as overloaded.",
)
MAX_CONNECTIONS = Option(
    "max-connections",
    "COUNT",
    "1024",
    _count(1, 65536),
    "Connections at a time; more are closed at once.",
)
LOG_LEVEL = Option(
    "log-level", "LEVEL", "info", _choice(LOG_LEVELS), "trace, debug, info, warn or error."
)
LOG_FORMAT = Option(
    "log-format",
    "FORMAT",
    "console",
    _choice(LOG_FORMATS),
    "console for people, json for one JSON object a line. Both go to standard error.",
)
READY_FILE = Option(
    "ready-file",
    "PATH",
    "",
    _optional(Path),
    "Written when the daemon serves: one JSON object with addr, http_addr and pid. Removed at "
    "the end.",
)

OPTIONS: tuple[Option[object], ...] = (
    ADDR,
    DEVICES,
    POOL_SIZE,
    HINT_VALUE_SIZE,
    USE_HUGEPAGES,
    DISABLE_NUMA_AFFINITY,
    SAVE_BANDWIDTH,
    MEMORY_RESERVE,
    HTTP_ADDR,
    HIGH_WATERMARK,
    LOW_WATERMARK,
    LEASE_TTL_SECS,
    UNSEALED_TTL_SECS,
    SHUTDOWN_GRACE_SECS,
    MAX_MESSAGE_SIZE,
    FIRST_MESSAGE_SECS,
    IDLE_SECS,
    MAX_CALLS_IN_FLIGHT,
    MAX_CONNECTIONS,
    LOG_LEVEL,
    LOG_FORMAT,
    READY_FILE,
)


@attrs.frozen(kw_only=True)
class NodeConfig:
    """The daemon's configuration, checked as a whole; made by :func:`resolve`."""

    addresses: tuple[Address, ...]
    http_address: Address
    devices: tuple[int, ...] | None
    """None: all that are there."""
    pool_bytes: int
    hint_value_bytes: int | None
    use_hugepages: bool
    numa_affinity: bool
    save_bandwidth: int | None
    """Bytes a second; None: no cap."""
    memory_reserve_bytes: int
    high_watermark: float
    low_watermark: float
    lease_ttl_s: float
    unsealed_ttl_s: float
    shutdown_grace_s: float
    message_bytes: int
    first_message_s: float
    idle_s: float
    calls_in_flight: int
    connections: int
    log_level: str
    log_format: str
    ready_file: Path | None

    @property
    def slab_bytes(self) -> int:
        """The pool's step of growth: a multiple of 2 MiB, at most the pool."""
        blocks = SLAB_BLOCKS_MIN * (self.hint_value_bytes or 0)
        step = 2 * MIB
        return min(max(SLAB_BYTES, -(-blocks // step) * step), self.pool_bytes)


@attrs.frozen(eq=False)
class Setting(Generic[T_co]):
    """One value and where it comes from."""

    text: str
    value: T_co
    source: str


@attrs.frozen(eq=False)
class Settings:
    """The configuration, and where each part of it comes from."""

    config: NodeConfig
    by_name: Mapping[str, Setting[object]]
    overridden: tuple[str, ...]
    """Sentences about values that had no effect."""


def read_file(path: Path) -> dict[str, str]:
    """The keys of a TOML file with their values as text.  Raises :exc:`ConfigError`."""
    try:
        table = tomllib.loads(path.read_text("utf-8"))
    except OSError as exc:
        raise ConfigError(f"{path} can't be read: {exc.strerror or exc}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path} is no TOML: {exc}") from None
    known = {option.name for option in OPTIONS}
    for key, value in table.items():
        if key not in known:
            raise ConfigError(f"{path}: unknown key {key!r}{_hint(key, known)}")
        if isinstance(value, dict):
            raise ConfigError(f"{path}, key {key}: a table is not possible here")
    return {key: _text(value) for key, value in table.items()}


def _hint(key: str, known: set[str]) -> str:
    import difflib  # only for the message

    near = difflib.get_close_matches(key.replace("_", "-").lower(), sorted(known), n=1)
    return f"; is {near[0]!r} meant?" if near else f"; known are {', '.join(sorted(known))}"


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return ",".join(_text(part) for part in value)
    return str(value)


def resolve(
    flags: Mapping[str, str], environment: Mapping[str, str], file: Path | None = None
) -> Settings:
    """Flag over environment over file over default; ``flags`` by option name.

    Values that lose are checked all the same.  Raises :exc:`ConfigError` that names the source.
    """
    in_file = read_file(file) if file is not None else {}
    found: dict[str, Setting[object]] = {}
    overridden: list[str] = []
    for option in OPTIONS:
        places = [(f"flag --{option.name}", flags.get(option.name))]
        # An empty variable is how shells and container files spell "unset".
        places.append((option.variable, environment.get(option.variable) or None))
        places.append((f"{file}, key {option.name}", in_file.get(option.name)))
        places.append(("the default", option.default))
        given = [_setting(option, where, text) for where, text in places if text is not None]
        winner = found[option.name] = given[0]
        overridden += [
            f"{loser.source} says {loser.text!r} but {winner.source} says {winner.text!r}"
            for loser in given[1:-1]
            if loser.value != winner.value
        ]
    _check_together(found)
    return Settings(_build(found), found, tuple(overridden))


def _setting(option: Option[T], source: str, text: str) -> Setting[T]:
    if not text and source != "the default":
        raise ConfigError(f"{source}: the value is empty")
    try:
        return Setting(text, option.parse(text), source)
    except ConfigError as exc:
        raise ConfigError(f"{source}: {exc}") from None


def _value(found: Mapping[str, Setting[object]], option: Option[T]) -> T:
    return option.parse(found[option.name].text)


def _conflict(found: Mapping[str, Setting[object]], a: str, b: str, rule: str) -> ConfigError:
    one, two = found[a], found[b]
    return ConfigError(
        f"{one.source} sets {a} to {one.text!r} and {two.source} sets {b} to {two.text!r}: {rule}"
    )


def _check_together(found: Mapping[str, Setting[object]]) -> None:
    """Raise :exc:`ConfigError`, naming both sources, when two settings contradict each other."""
    if _value(found, LOW_WATERMARK) > _value(found, HIGH_WATERMARK):
        raise _conflict(
            found, "low-watermark", "high-watermark", "the low mark must not be above the high one"
        )
    hint = _value(found, HINT_VALUE_SIZE)
    if hint is not None and hint > _value(found, POOL_SIZE):
        raise _conflict(
            found, "hint-value-size", "pool-size", "a pool must hold at least one block"
        )
    http = _value(found, HTTP_ADDR)
    if http.port and http in _value(found, ADDR):
        raise _conflict(found, "http-addr", "addr", "each needs a port of its own")


def _build(found: Mapping[str, Setting[object]]) -> NodeConfig:
    return NodeConfig(
        addresses=_value(found, ADDR),
        http_address=_value(found, HTTP_ADDR),
        devices=_value(found, DEVICES),
        pool_bytes=_value(found, POOL_SIZE),
        hint_value_bytes=_value(found, HINT_VALUE_SIZE),
        use_hugepages=_value(found, USE_HUGEPAGES),
        numa_affinity=not _value(found, DISABLE_NUMA_AFFINITY),
        save_bandwidth=_value(found, SAVE_BANDWIDTH),
        memory_reserve_bytes=_value(found, MEMORY_RESERVE),
        high_watermark=_value(found, HIGH_WATERMARK),
        low_watermark=_value(found, LOW_WATERMARK),
        lease_ttl_s=_value(found, LEASE_TTL_SECS),
        unsealed_ttl_s=_value(found, UNSEALED_TTL_SECS),
        shutdown_grace_s=_value(found, SHUTDOWN_GRACE_SECS),
        message_bytes=_value(found, MAX_MESSAGE_SIZE),
        first_message_s=_value(found, FIRST_MESSAGE_SECS),
        idle_s=_value(found, IDLE_SECS),
        calls_in_flight=_value(found, MAX_CALLS_IN_FLIGHT),
        connections=_value(found, MAX_CONNECTIONS),
        log_level=_value(found, LOG_LEVEL),
        log_format=_value(found, LOG_FORMAT),
        ready_file=_value(found, READY_FILE),
    )


def option_table() -> str:
    """The reference table of ``docs/operations.md``, in Markdown."""
    lines = ["| flag | environment | default | meaning |", "|---|---|---|---|"]
    for option in OPTIONS:
        flag = f"`--{option.name} {option.metavar}`" if option.metavar else f"`--{option.name}`"
        default = f"`{option.default}`" if option.default else "unset"
        lines.append(f"| {flag} | `{option.variable}` | {default} | {option.help} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(option_table(), end="")  # noqa: T201 - to paste into the page
