"""Settings: precedence, units, and one sentence for each bad value that names its source."""

from __future__ import annotations

from pathlib import Path

import pytest

from pegaflow import config
from pegaflow.config import MIB, NodeConfig, resolve
from pegaflow.errors import ConfigError
from pegaflow.model.address import Address

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "operations.md"


def file_with(folder: Path, text: str) -> Path:
    path = folder / "pegaflow.toml"
    path.write_text(text)
    return path


def default() -> NodeConfig:
    return resolve({}, {}).config


def test_defaults_are_upstreams_where_the_part_exists() -> None:
    found = default()
    assert found.addresses == (Address("127.0.0.1", 50055),)
    assert found.http_address == Address("127.0.0.1", 9091)
    assert found.pool_bytes == 30 << 30
    assert found.devices is None
    assert found.hint_value_bytes is None
    assert not found.use_hugepages
    assert found.log_level == "info"
    assert found.shutdown_grace_s == 10


def test_flag_beats_environment_beats_file_and_the_losers_are_told(tmp_path: Path) -> None:
    file = file_with(tmp_path, 'pool-size = "1gb"\nlease-ttl-secs = 30\nlog-level = "debug"\n')
    environment = {"PEGAFLOW_POOL_SIZE": "2gb", "PEGAFLOW_LEASE_TTL_SECS": "40"}
    found = resolve({"pool-size": "3gb"}, environment, file)
    assert found.config.pool_bytes == 3 << 30
    assert found.config.lease_ttl_s == 40
    assert found.config.log_level == "debug"
    assert found.by_name["pool-size"].source == "flag --pool-size"
    assert found.by_name["lease-ttl-secs"].source == "PEGAFLOW_LEASE_TTL_SECS"
    assert found.by_name["log-level"].source == f"{file}, key log-level"
    assert list(found.overridden) == [
        "PEGAFLOW_POOL_SIZE says '2gb' but flag --pool-size says '3gb'",
        f"{file}, key pool-size says '1gb' but flag --pool-size says '3gb'",
        f"{file}, key lease-ttl-secs says '30' but PEGAFLOW_LEASE_TTL_SECS says '40'",
    ]


def test_the_same_value_twice_is_no_conflict(tmp_path: Path) -> None:
    file = file_with(tmp_path, 'pool-size = "1024mb"\n')
    assert not resolve({"pool-size": "1gb"}, {}, file).overridden


def test_an_empty_variable_is_unset() -> None:
    assert resolve({}, {"PEGAFLOW_POOL_SIZE": ""}).config.pool_bytes == 30 << 30


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("pool-size", "30xb", "'30xb' is no size"),
        ("pool-size", "-1gb", "'-1gb' is no size"),
        ("pool-size", "0", "at least 1mb"),
        ("pool-size", "nan", "is no size"),
        ("hint-value-size", "0", "too small"),
        ("addr", "127.0.0.1", None),
        ("addr", "127.0.0.1:70000", "is no address"),
        ("addr", "127.0.0.1:\u0661", "is no address"),
        ("addr", "unix:relative", "an absolute path"),
        ("addr", "127.0.0.1:1,127.0.0.1:1", "is there twice"),
        ("http-addr", "unix:/tmp/x", "is no HTTP address"),
        ("devices", "0,0", "names a device twice"),
        ("devices", "gpu0", "is no list of devices"),
        ("low-watermark", "1.5", "is not a fraction"),
        ("low-watermark", "nan", "is not a fraction"),
        ("lease-ttl-secs", "-1", "is not a number of seconds"),
        ("lease-ttl-secs", "soon", "is not a number of seconds"),
        ("max-connections", "0", "is not a whole number"),
        ("max-connections", "1e3", "is not a whole number"),
        ("max-message-size", "1kb", "at least 64kb"),
        ("log-level", "loud", "'loud' is none of trace, debug, info, warn, error"),
        ("log-format", "xml", "is none of console, json"),
        ("use-hugepages", "maybe", "is neither true nor false"),
    ],
)
def test_bad_values_name_the_source_and_what_is_right(
    name: str, text: str, says: str | None, tmp_path: Path
) -> None:
    option = next(option for option in config.OPTIONS if option.name == name)
    if says is None:
        resolve({name: text}, {})
        return
    file = file_with(tmp_path, f"{name} = {text!r}\n")
    for flags, environment, path, source in (
        ({name: text}, {}, None, f"flag --{name}: "),
        ({}, {option.variable: text}, None, f"{option.variable}: "),
        ({}, {}, file, f"{file}, key {name}: "),
        # A value that loses is looked at all the same: it will win one day.
        ({name: option.default or "1gb"}, {}, file, f"{file}, key {name}: "),
    ):
        with pytest.raises(ConfigError) as caught:
            resolve(flags, environment, path)
        assert str(caught.value).startswith(source)
        assert says in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('pool_size = "1gb"', "unknown key 'pool_size'; is 'pool-size' meant?"),
        ("zzz = 1", "unknown key 'zzz'; known are addr"),
        ("pool-size = ", "is no TOML"),
        ("[pool-size]\na = 1", "a table is not possible here"),
    ],
)
def test_a_bad_file_is_refused(text: str, says: str, tmp_path: Path) -> None:
    file = file_with(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        resolve({}, {}, file)
    assert str(caught.value).startswith(str(file))
    assert says in str(caught.value)


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read: No such file"):
        resolve({}, {}, tmp_path / "none.toml")


def test_values_of_a_file_may_be_written_naturally(tmp_path: Path) -> None:
    text = """
    addr = ["127.0.0.1:1", "unix:/run/pegaflow.sock"]
    devices = [0, 1]
    use-hugepages = true
    low-watermark = 0.5
    max-connections = 7
    pool-size = 1073741824
    """
    found = resolve({}, {}, file_with(tmp_path, text)).config
    assert found.addresses == (Address("127.0.0.1", 1), Address("", 0, "/run/pegaflow.sock"))
    assert found.devices == (0, 1)
    assert found.use_hugepages
    assert (found.low_watermark, found.connections, found.pool_bytes) == (0.5, 7, 1 << 30)


@pytest.mark.parametrize(
    ("flags", "environment", "says"),
    [
        (
            {"low-watermark": "0.97"},
            {"PEGAFLOW_HIGH_WATERMARK": "0.96"},
            "flag --low-watermark sets low-watermark to '0.97' and PEGAFLOW_HIGH_WATERMARK sets "
            "high-watermark to '0.96': the low mark must not be above the high one",
        ),
        (
            {"low-watermark": "0.97"},
            {},
            "flag --low-watermark sets low-watermark to '0.97' and the default sets "
            "high-watermark to '0.95': the low mark must not be above the high one",
        ),
        (
            {"pool-size": "1gb"},
            {"PEGAFLOW_HINT_VALUE_SIZE": "2gb"},
            "PEGAFLOW_HINT_VALUE_SIZE sets hint-value-size to '2gb' and flag --pool-size sets "
            "pool-size to '1gb': a pool must hold at least one block",
        ),
        (
            {"addr": "127.0.0.1:9091"},
            {},
            "the default sets http-addr to '127.0.0.1:9091' and flag --addr sets addr to "
            "'127.0.0.1:9091': each needs a port of its own",
        ),
    ],
)
def test_contradictions_name_both_sources(  # T32
    flags: dict[str, str], environment: dict[str, str], says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(flags, environment)
    assert str(caught.value) == says


def test_port_zero_is_never_a_contradiction() -> None:
    resolve({"addr": "127.0.0.1:0", "http-addr": "127.0.0.1:0"}, {})


@pytest.mark.parametrize(
    ("text", "want"),
    [("all", None), ("", None), ("none", ()), ("0", (0,)), (" 1, 0 ", (1, 0))],
)
def test_devices(text: str, want: tuple[int, ...] | None) -> None:
    flags = {"devices": text} if text else {}
    assert resolve(flags, {}).config.devices == want


def test_slabs_follow_the_hint_and_never_exceed_the_pool() -> None:
    def slab(**flags: str) -> int:
        return resolve({k.replace("_", "-"): v for k, v in flags.items()}, {}).config.slab_bytes

    assert slab() == 256 * MIB
    assert slab(hint_value_size="1mb") == 256 * MIB
    assert slab(hint_value_size="100mb") == 3200 * MIB
    assert slab(hint_value_size="100mb", pool_size="1gb") == 1024 * MIB
    assert slab(hint_value_size="20971521") % (2 * MIB) == 0


def test_the_page_shows_the_table_of_the_code() -> None:  # T32: documented = effective
    page = DOCUMENT.read_text()
    assert config.option_table() in page, "docs/operations.md: run `python -m pegaflow.config`"


def test_every_default_parses_to_what_is_configured() -> None:
    for option in config.OPTIONS:
        settings = resolve({}, {})
        assert settings.by_name[option.name].value == option.parse(option.default)
