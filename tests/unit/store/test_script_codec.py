"""Script encoding: every step references its own key and spec, even if they are shared."""

from __future__ import annotations

from struct import unpack

from ratelimit_rls.store.script_codec import (
    MAX_BATCH_STEPS,
    EncodedPlan,
    PlanLayout,
    encode_batch,
    encode_slots,
    split_runs,
)


def packed_plan(*keys: str, flags: int = 0) -> EncodedPlan[str]:
    return EncodedPlan(
        keys,
        PlanLayout(
            tuple(b"spec of %s" % key[:1].encode() for key in keys),
            (0,) * len(keys),
            flags,
            None,
            (),
            bytes.decode,
            str.encode,
        ),
    )


def test_keys_and_specs_are_encoded_once_and_referenced_by_index() -> None:
    packed = encode_batch([packed_plan("a1", "b1"), packed_plan("b1", "a2", flags=3)], 0)

    assert packed.keys == ["a1", "b1", "a2"]
    specs, _, calls = packed.text.partition(b"\n\n")
    assert specs.split(b"\n") == [b"spec of a", b"spec of b"]
    assert unpack(">13H", calls) == (0, 2, 0, 0, 0, 1, 1, 2, 3, 1, 1, 2, 0)


def test_keys_of_several_slots_are_grouped() -> None:
    packed = encode_slots([packed_plan("a1", "a2"), packed_plan("a1"), packed_plan("b1")], [7, 7, 9], 0)

    assert packed.keys == ["a1", "a2", "b1"]
    _, _, calls = packed.text.partition(b"\n\n")
    assert unpack(">3H", calls[:6]) == (2, 2, 1)


def test_runs_are_bounded_and_never_split_a_call() -> None:
    batch = [packed_plan(*(f"{i} {j}" for j in range(50))) for i in range(5)] + [packed_plan(*map(str, range(1000)))]

    pieces = list(split_runs(batch))

    assert [plan for piece in pieces for plan in piece] == batch
    assert [sum(len(plan.keys) for plan in piece) for piece in pieces] == [100, 100, 50, 1000]
    assert MAX_BATCH_STEPS == 128


def test_an_empty_batch_has_no_runs() -> None:
    assert list(split_runs([])) == []
