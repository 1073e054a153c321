"""What makes two engines share, and what keeps them apart."""

from __future__ import annotations

import hashlib
import pickle
from pathlib import Path

import pytest

from pegaflow.connector.identity import make_identity, seed_check, weights_revision
from pegaflow.errors import BadRequest
from tests.connector.fakes import FIELDS


def sha256(value: object) -> bytes:
    return hashlib.sha256(pickle.dumps(value, protocol=5)).digest()


@pytest.mark.parametrize("field", sorted(FIELDS))
def test_every_field_changes_the_namespace(field: str) -> None:
    base = make_identity(FIELDS)
    other = make_identity({**FIELDS, field: "another"})
    assert other.namespace != base.namespace
    assert other.manifest.first_difference(base.manifest) == field


@pytest.mark.parametrize("field", sorted(FIELDS))
def test_no_required_field_may_be_missing(field: str) -> None:
    with pytest.raises(BadRequest, match=field):
        make_identity({**FIELDS, field: ""})


def test_the_same_fields_in_another_order_are_the_same_identity() -> None:
    assert make_identity(dict(reversed(FIELDS.items()))) == make_identity(FIELDS)


def test_the_namespace_has_160_bits_and_says_the_model() -> None:
    name, _, digest = make_identity(FIELDS).namespace.rpartition("-")
    assert name == "model"
    assert len(bytes.fromhex(digest)) == 20


def test_a_given_namespace_keeps_the_manifest() -> None:
    given = make_identity(FIELDS, "team-a")
    assert given.namespace == "team-a"
    assert given.manifest == make_identity(FIELDS).manifest


def test_extra_fields_count_too() -> None:
    assert make_identity({**FIELDS, "lora": "on"}).namespace != make_identity(FIELDS).namespace


def test_the_seed_check_sees_seed_and_algorithm() -> None:
    def other(value: object) -> bytes:
        return hashlib.sha512(pickle.dumps(value, protocol=5)).digest()[:32]

    checks = {
        seed_check(sha256, "0", "e1"),
        seed_check(sha256, "1", "e1"),
        seed_check(other, "0", "e1"),
    }
    assert len(checks) == 3
    assert seed_check(sha256, "0", "e2") in checks


def test_a_random_seed_is_shared_with_nobody() -> None:
    assert seed_check(sha256, None, "e1") != seed_check(sha256, None, "e2")


def test_the_revision_of_a_hub_model_is_its_commit() -> None:
    assert weights_revision("org/model", None, "abc") != weights_revision("org/model", None, "abd")
    assert weights_revision("org/model", "v1", None) != weights_revision("org/model", "v2", None)
    assert weights_revision("org/no-such-folder", None, None) == "unknown"


def test_weights_replaced_in_place_are_noticed(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    content = bytearray(b"\x01" * 300_000)
    weights.write_bytes(content)
    first = weights_revision(str(tmp_path), None, None)
    (tmp_path / "README.md").write_text("no weights")
    assert weights_revision(str(tmp_path), None, None) == first
    content[150_000] ^= 1
    weights.write_bytes(content)
    assert weights_revision(str(tmp_path), None, None) != first
