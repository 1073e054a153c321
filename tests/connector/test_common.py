"""Configuration, orders, guard and the import that must stay cheap."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

from pegaflow.connector.common import LoadOrder, SaveOrder, StepOrders, read_config
from pegaflow.connector.guard import Complaints, guarded
from pegaflow.connector.tally import HISTOGRAM_VALUES_MAX, Tally
from pegaflow.errors import ConfigError


def test_environment_wins_over_extra_config_over_defaults() -> None:
    assert read_config({}, {}).address == "127.0.0.1:50055"
    extra = {"pegaflow.host": "http://10.0.0.1", "pegaflow.port": 7}
    assert read_config(extra, {}).address == "http://10.0.0.1:7"
    environ = {"PEGAFLOW_HOST": "10.0.0.2", "PEGAFLOW_PORT": "8"}
    assert read_config(extra, environ).address == "10.0.0.2:8"
    assert read_config({"pegaflow.host": "unix:/run/p"}, {}).address == "unix:/run/p"


def test_modes() -> None:
    assert read_config({"pegaflow.mode": "save_only"}, {}).loads is False
    assert read_config({"pegaflow.mode": "read_only"}, {}).saves is False
    with pytest.raises(ConfigError, match="save_only"):
        read_config({"pegaflow.mode": "write"}, {})


@pytest.mark.parametrize("value", ["x", 0, -1, "inf", "nan"])
def test_a_time_limit_is_a_positive_number(value: object) -> None:
    with pytest.raises(ConfigError, match=r"pegaflow\.load_timeout_ms"):
        read_config({"pegaflow.load_timeout_ms": value}, {})


def test_time_limits_and_the_bound_on_the_scheduler() -> None:
    config = read_config({"pegaflow.load_timeout_ms": "250"}, {})
    assert config.load_timeout_s == 0.25
    assert read_config({}, {}).hook_budget_s <= 0.040


def test_unknown_settings_are_told_and_bad_addresses_refused() -> None:
    told: list[str] = []
    read_config({"pegaflow.hots": "x", "other": 1}, {}, told.append)
    assert told == ["pegaflow.hots"]
    with pytest.raises(ConfigError):
        read_config({"pegaflow.port": "none"}, {})
    with pytest.raises(ConfigError, match="256"):
        read_config({"pegaflow.namespace": "x" * 257}, {})


def test_orders_travel_by_pickle() -> None:
    orders = StepOrders(
        (LoadOrder("a", b"l", (1, 2)),),
        (SaveOrder("b", b"", (b"h",), (3,)),),
        frozenset({"c"}),
        frozenset({"d"}),
    )
    assert pickle.loads(pickle.dumps(orders)) == orders


class Hooks:
    def __init__(self) -> None:
        self.tally = Tally()
        self.complaints = Complaints()

    @guarded(lambda: (0, False))
    def hook(self, trouble: bool) -> tuple[int, bool]:
        """Docs."""
        if trouble:
            raise AssertionError("a bug")
        return 7, True


def test_nothing_that_raises_leaves_a_hook() -> None:
    hooks = Hooks()
    assert hooks.hook(False) == (7, True)
    assert hooks.hook(trouble=True) == (0, False)
    assert hooks.tally.total("hook_errors") == 1
    assert Hooks.hook.__doc__ == "Docs."


def test_a_way_out_of_the_process_is_no_error_of_a_hook() -> None:
    class Stop(Hooks):
        @guarded(lambda: None)
        def stop(self) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Stop().stop()


def test_the_same_complaint_is_held_back(caplog: pytest.LogCaptureFixture) -> None:
    complaints = Complaints(interval_s=1000)
    assert complaints.warn("x", "first")
    assert not complaints.warn("x", "second")
    assert complaints.warn("y", "other")
    assert [record.getMessage() for record in caplog.records] == [
        "PegaFlow: first",
        "PegaFlow: other",
    ]


def test_tally_reports_once_and_bounds_histograms() -> None:
    tally = Tally()
    assert tally.take() is None
    tally.add("a", 2)
    tally.set("g", 1)
    for _ in range(HISTOGRAM_VALUES_MAX + 5):
        tally.observe("h", 1.5)
    report = tally.take()
    assert report is not None
    assert report["counters"] == {"a": 2}
    assert report["histograms"]["h"] == [1.5] * HISTOGRAM_VALUES_MAX
    assert tally.take() is None
    tally.set("g", 1)  # unchanged: nothing to tell
    assert tally.take() is None
    assert tally.total("a") == 2


def test_importing_the_package_needs_no_engine() -> None:
    code = (
        "import sys, pegaflow.connector, pegaflow.connector.common;"
        "print([m for m in ('vllm', 'torch', 'cupy', 'capnp', 'trio') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=60)
    assert run.stdout.strip() == b"[]", run.stdout
