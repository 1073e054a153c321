"""Addresses as people write them."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from pegaflow.client.address import connect_socket
from pegaflow.errors import ConfigError, DeadlineExceeded, PeerGone
from pegaflow.model.address import Address, parse_address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:50055", Address("127.0.0.1", 50055)),
        ("node-1:1", Address("node-1", 1)),
        ("node-1", Address("node-1", 50055)),
        ("http://127.0.0.1:7/", Address("127.0.0.1", 7)),
        ("[::1]:5", Address("::1", 5)),
        ("[::1]", Address("::1", 50055)),
        ("unix:/run/pegaflow.sock", Address("", 0, "/run/pegaflow.sock")),
    ],
)
def test_good_addresses(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert parse_address(str(address)) == address


@pytest.mark.parametrize("text", ["", ":1", "a:b", "a:70000", "unix:relative", "unix:", "a:-1"])
def test_bad_addresses_are_one_sentence(text: str) -> None:
    with pytest.raises(ConfigError, match="no address: write"):
        parse_address(text)


def test_nobody_there(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(PeerGone, match="nothing serves"):
        connect_socket(Address("127.0.0.1", port), 1)
    with pytest.raises(PeerGone, match="nothing serves"):
        connect_socket(Address("", 0, str(tmp_path / "none.sock")), 1)


def test_a_full_backlog_ends_in_time(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(0)
        with socket.socket(socket.AF_UNIX) as first:
            first.connect(path)
            with pytest.raises(DeadlineExceeded):
                connect_socket(Address("", 0, path), 0.1)
