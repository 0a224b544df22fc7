"""Packing: every step finds its own key and spec again, whatever is shared."""

from __future__ import annotations

from struct import unpack

from ratelimit_rls.store.batch import LARGEST_BATCH_STEPS, Form, PackedPlan, pack_batch, runs


def packed_plan(*keys: str, flags: int = 0) -> PackedPlan[str]:
    return PackedPlan(keys, Form(tuple(f"spec of {key[0]}" for key in keys), flags, (), bytes.decode, str.encode))


def test_keys_and_specs_are_sent_once_and_found_by_number() -> None:
    packed = pack_batch([packed_plan("a1", "b1"), packed_plan("b1", "a2", flags=3)], 0)

    assert packed.keys == ["a1", "b1", "a2"]
    assert packed.specs == ["spec of a", "spec of b"]
    assert unpack(">12H", packed.calls) == (2, 0, 0, 0, 1, 1, 2, 3, 1, 1, 2, 0)


def test_runs_never_split_a_call_and_stay_short() -> None:
    batch = [packed_plan(*(f"{i} {j}" for j in range(50))) for i in range(5)] + [packed_plan(*map(str, range(1000)))]

    pieces = list(runs(batch))

    assert [plan for piece in pieces for plan in piece] == batch
    assert [sum(len(plan.keys) for plan in piece) for piece in pieces] == [100, 100, 50, 1000]
    assert LARGEST_BATCH_STEPS == 128


def test_nothing_to_send_is_no_run() -> None:
    assert list(runs([])) == []
