"""`ReplicateConfig` and the enumerations behave like upstream's."""

from __future__ import annotations

import pickle

import pytest

from mooncake import store
from mooncake.store import (
    ObjectDataType,
    ReplicaStatus,
    ReplicateConfig,
    SoftPinAction,
    TaskStatus,
    TaskType,
)


def test_config_defaults_and_text():
    config = ReplicateConfig()
    assert config.replica_num == 1
    assert config.soft_pin_action is SoftPinAction.PRESERVE
    assert config.group_ids is None
    assert str(config) == (
        "ReplicateConfig: { replica_num: 1, nof_replica_num: 0, dfs_replica_num: 0, "
        "soft_pin_action: PRESERVE, soft_pin_ttl_ms: default, with_hard_pin: 0, "
        "preferred_segments: [], preferred_nof_segments: [], prefer_alloc_in_same_node: 0, "
        "data_type: UNKNOWN }"
    )


def test_config_text_shows_every_field():
    config = ReplicateConfig()
    config.preferred_segments = ["a:1", "b:2"]
    config.preferred_segment = "c:3"
    config.group_ids = ["g", "h"]
    config.soft_pin_action = SoftPinAction.ENABLE
    config.soft_pin_ttl_ms = 7
    config.data_type = ObjectDataType.TENSOR
    assert "preferred_segments: [a:1, b:2], preferred_segment (deprecated): c:3, " in str(config)
    assert "soft_pin_action: ENABLE, soft_pin_ttl_ms: 7" in str(config)
    assert str(config).endswith("data_type: TENSOR, group_ids: [g, h] }")


def test_with_soft_pin_is_an_alias_of_the_action():
    config = ReplicateConfig()
    assert config.with_soft_pin is False
    config.with_soft_pin = True
    assert config.soft_pin_action is SoftPinAction.ENABLE
    config.soft_pin_action = SoftPinAction.DISABLE
    assert config.with_soft_pin is False


def test_prefer_same_node_accepts_text():
    config = ReplicateConfig()
    for given, is_on in ((True, True), ("", False), ("True", True), (False, False)):
        config.prefer_alloc_in_same_node = given
        assert config.prefer_alloc_in_same_node is is_on


def test_config_lists_are_copies():
    config = ReplicateConfig()
    config.preferred_segments = ["a:1"]
    config.preferred_segments.append("b:2")
    assert config.preferred_segments == ["a:1"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("replica_num", "1"),
        ("replica_num", -1),
        ("with_hard_pin", "yes"),
        ("soft_pin_action", 1),
        ("soft_pin_ttl_ms", "x"),
        ("data_type", 2),
        ("preferred_segments", "a:1"),
        ("preferred_segments", [1]),
        ("preferred_segment", 1),
        ("prefer_alloc_in_same_node", "node-7"),
        ("group_ids", "g"),
    ],
)
def test_wrong_field_type_raises(field, value):
    with pytest.raises(TypeError):
        setattr(ReplicateConfig(), field, value)


@pytest.mark.parametrize("field", ["with_soft_pin", "with_hard_pin", "prefer_alloc_in_same_node"])
@pytest.mark.parametrize(("value", "is_on"), [(1, True), (0, False), (None, False), (2.5, True)])
def test_switches_accept_truth_values(field, value, is_on):
    config = ReplicateConfig()
    setattr(config, field, value)
    assert getattr(config, field) is is_on


def test_unknown_field_raises():
    with pytest.raises(AttributeError):
        ReplicateConfig().replicas = 2  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("member", "number"),
    [
        (ReplicaStatus.COMPLETE, 3),
        (TaskStatus.SUCCESS, 3),
        (TaskType.REPLICA_MOVE, 1),
        (SoftPinAction.DISABLE, 2),
        (ObjectDataType.GENERAL, 9),
    ],
)
def test_enum_members_do_not_equal_integers(member, number):
    kind = type(member)
    assert repr(member) == f"<{kind.__name__}.{member.name}: {number}>"
    assert str(member) == f"{kind.__name__}.{member.name}"
    assert (member.value, int(member), hash(member)) == (number, number, number)
    assert list(range(20))[member] == number
    assert member != number
    with pytest.raises(TypeError):
        assert member < member
    assert pickle.loads(pickle.dumps(member)) is member
    assert kind.__members__[member.name] is member
    assert kind(number) is member


def test_unknown_enum_value_is_accepted():
    assert ReplicaStatus(77).value == 77
    assert ReplicaStatus(77).name == "???"
    with pytest.raises((TypeError, ValueError)):
        ReplicaStatus("x")


def test_exported_members_favor_the_later_enum():
    assert store.COMPLETE is ReplicaStatus.COMPLETE
    assert store.FAILED is TaskStatus.FAILED
    assert store.PROCESSING is TaskStatus.PROCESSING
    assert store.KVCACHE is ObjectDataType.KVCACHE
    assert store.REPLICA_COPY is TaskType.REPLICA_COPY
