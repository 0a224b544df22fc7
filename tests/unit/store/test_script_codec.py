"""Script encoding: every step references its own key and spec, even if they are shared."""

from __future__ import annotations

from struct import unpack

from ratelimit_rls.store.script_codec import (
    MAX_BATCH_STEPS,
    EncodedPlan,
    PlanLayout,
    encode_batch,
    split_runs,
)


def packed_plan(*keys: str, max_wait_us: int | None = None) -> EncodedPlan[str]:
    kind = b"0;" + b";".join(b"spec of %s" % key[:1].encode() for key in keys)
    return EncodedPlan(keys, PlanLayout(kind, (0,) * len(keys), 0, (), bytes.decode, str.encode), max_wait_us)


def test_calls_in_sequence_are_the_numbers_of_their_kinds() -> None:
    packed = encode_batch([packed_plan("a1", "b1"), packed_plan("b2"), packed_plan("a2", "b3")], 0)

    assert packed.keys == ["a1", "b1", "b2", "a2", "b3"]
    kinds, _, calls = packed.text.partition(b"\n\n")
    assert kinds.split(b"\n") == [b"0;spec of a;spec of b", b"0;spec of b"]
    assert unpack(">4H", calls) == (0, 0, 1, 0)


def test_the_text_of_calls_in_sequence_does_not_depend_on_their_slots() -> None:
    batch = [packed_plan("a1"), packed_plan("a2")]

    assert encode_batch(batch, 0, spans_slots=True) == encode_batch(batch, 0)


def test_keys_that_occur_twice_are_referenced_by_index() -> None:
    packed = encode_batch([packed_plan("a1", "b1"), packed_plan("b1", "a2")], 0)

    assert packed.keys == ["a1", "b1", "a2"]
    _, _, calls = packed.text.partition(b"\n\n")
    assert unpack(">10H", calls) == (3, 0, 0, 0, 0, 1, 1, 0, 1, 2)


def test_keys_of_several_slots_are_grouped_by_the_first_call_that_uses_them() -> None:
    packed = encode_batch([packed_plan("a1", "a2"), packed_plan("a1"), packed_plan("b1")], 0, spans_slots=True)

    assert packed.keys == ["a1", "a2", "b1"]
    _, _, calls = packed.text.partition(b"\n\n")
    assert unpack(">4H", calls[:8]) == (3, 2, 2, 1)


def test_options_follow_the_kind() -> None:
    packed = encode_batch([packed_plan("a1", max_wait_us=0x20001)], 0)

    _, _, calls = packed.text.partition(b"\n\n")
    assert unpack(">7H", calls) == (1, 0, 0, 4, 2, 1, 0)


def test_runs_are_bounded_and_never_split_a_call() -> None:
    batch = [packed_plan(*(f"{i} {j}" for j in range(50))) for i in range(5)] + [packed_plan(*map(str, range(1000)))]

    pieces = list(split_runs(batch))

    assert [plan for piece in pieces for plan in piece] == batch
    assert [sum(len(plan.keys) for plan in piece) for piece in pieces] == [100, 100, 50, 1000]
    assert MAX_BATCH_STEPS == 128


def test_an_empty_batch_has_no_runs() -> None:
    assert list(split_runs([])) == []
