"""Lines of traffic become requests; invalid lines are counted and never fatal, and memory is bounded."""

from __future__ import annotations

import gzip
import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from ratelimit_rls.core.model import Descriptor, Entry, Request
from ratelimit_rls.errors import RulesError, SettingsError
from ratelimit_rls.simulation.clock import DEFAULT_START_US
from ratelimit_rls.simulation.field_mapping import FieldMapping, InvalidLine
from ratelimit_rls.simulation.histogram import MAX_BUCKETS, TimeHistogram
from ratelimit_rls.simulation.reorder import ReorderBuffer
from ratelimit_rls.simulation.traffic import MAX_LINE_BYTES, LogTraffic, ProfileTraffic, TrafficPhase

S_US = 1_000_000


def request_of(mapping: FieldMapping, **fields: Any) -> Request | None:
    return mapping.request(mapping.values(fields))


def test_fields_fill_the_descriptor_templates() -> None:
    mapping = FieldMapping("%zone%-edge", ["user=%headers.x-user%,path=%path%", "kind=a%%b %n% %ok%"])

    request = request_of(mapping, zone="eu", headers={"x-user": "alice"}, path="/", n=7, ok=True)

    first = Descriptor((Entry("user", "alice"), Entry("path", "/")))
    assert request == Request("eu-edge", (first, Descriptor((Entry("kind", "a%b 7 true"),))))


def test_dotted_name_also_matches_a_flat_field() -> None:
    assert request_of(FieldMapping("d", ["a=%x.y%"]), **{"x.y": "1"}) == Request("d", (Descriptor((Entry("a", "1"),)),))


@pytest.mark.parametrize("missing", [{}, {"user": None}, {"user": "-"}])
def test_descriptor_with_a_missing_field_is_not_sent(missing: dict[str, Any]) -> None:
    mapping = FieldMapping("d", ["user=%user%", "path=%path%"])

    assert request_of(mapping, path="/", **missing) == Request("d", (Descriptor((Entry("path", "/"),)),))
    assert request_of(mapping, **missing) is None


def test_line_has_its_own_descriptor_without_a_template() -> None:
    request = request_of(FieldMapping(), domain="d", descriptor="plan=free,user=a=b", hits="3")

    assert request == Request("d", (Descriptor((Entry("plan", "free"), Entry("user", "a=b")), hits=3),))


@pytest.mark.parametrize(
    "fields",
    [{"descriptor": "a=b"}, {"domain": "d", "descriptor": "a"}, {"domain": "d", "descriptor": "a=b", "hits": "-1"}],
)
def test_invalid_fields_are_a_bad_line(fields: dict[str, str]) -> None:
    with pytest.raises(InvalidLine):
        request_of(FieldMapping(), **fields)


@pytest.mark.parametrize("written", ["user", "=x", "user=%x", "user=%a%,"])
def test_invalid_template_is_rejected_up_front(written: str) -> None:
    with pytest.raises(SettingsError):
        FieldMapping("d", [written])


def log(path: Path, *lines: str | bytes | dict[str, Any]) -> Path:
    texts = [json.dumps(line) if isinstance(line, dict) else line for line in lines]
    path.write_bytes(b"\n".join(text if isinstance(text, bytes) else text.encode() for text in texts))
    return path


def test_bad_lines_are_counted_and_skipped(tmp_path: Path) -> None:
    good = {"start_time": "2024-01-01T00:00:01.5Z", "domain": "d", "descriptor": "a=b"}
    path = log(
        tmp_path / "access.log",
        good,
        "{",
        "",
        "[1]",
        {**good, "start_time": "yesterday"},
        {**good, "start_time": True},
        {**good, "descriptor": []},
        b"\xff",
        "x" * (MAX_LINE_BYTES + 5),
        {**good, "start_time": 1704067202},
    )
    traffic = LogTraffic(path, FieldMapping())

    lines = list(traffic)

    assert [(at_us - DEFAULT_START_US, number) for at_us, number, _ in lines] == [(1_500_000, 1), (2_000_000, 10)]
    assert traffic.invalid.count == 7
    assert [number for number, _ in traffic.invalid.first] == [2, 4, 5, 6, 7]
    with pytest.raises(RulesError, match=r"access\.log:2:1: error: not JSON"):
        list(LogTraffic(path, FieldMapping(), strict=True))


def test_csv_is_read_by_column_and_empty_cells_are_missing(tmp_path: Path) -> None:
    path = tmp_path / "traffic.csv.gz"
    rows = 'when,user,path\n2024-01-01T00:00:00Z,"a,b",/\n1704067201,,/x\n1,2\n"1\n'
    path.write_bytes(gzip.compress(b"\xef\xbb\xbf" + rows.encode()))
    traffic = LogTraffic(path, FieldMapping("d", ["user=%user%"]), time_field="when")

    assert list(traffic) == [(DEFAULT_START_US, 2, (None, "a,b")), (DEFAULT_START_US + S_US, 3, (None, None))]
    assert [number for number, _ in traffic.invalid.first] == [4, 5]


def test_csv_with_missing_columns_lists_the_columns(tmp_path: Path) -> None:
    path = tmp_path / "traffic.csv"
    path.write_text("time,who\n")
    with pytest.raises(SettingsError, match="no column 'user'; it has time, who"):
        list(LogTraffic(path, FieldMapping("d", ["user=%user%"])))


def test_truncated_gzip_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "a.log.gz"
    path.write_bytes(gzip.compress(b'{"a": 1}\n' * 1000)[:-20])
    with pytest.raises(SettingsError, match="cannot be read"):
        list(LogTraffic(path, FieldMapping("d", ["a=%a%"])))


def test_profile_spaces_requests_evenly_by_phase() -> None:
    phases = [TrafficPhase(Fraction(2), 1_500_000), TrafficPhase(Fraction(1, 60), 120 * S_US)]

    lines = list(ProfileTraffic(phases, FieldMapping("d", ["n=%n%,c=%caller%"]), callers=2))

    assert [at_us - DEFAULT_START_US for at_us, _, _ in lines] == [0, 500_000, 1_000_000, 1_500_000, 61_500_000]
    assert [values for _, _, values in lines][-2:] == [(None, "3", "1"), (None, "4", "0")]


def test_lines_are_reordered_within_the_buffer() -> None:
    lines = [(at, number, ()) for number, at in enumerate([5, 3, 4, 9, 8, 1, 10])]

    in_order = ReorderBuffer(lines, min_buffered=2, chunk=1)

    put = [(at_us, number) for out in in_order for at_us, number, _ in out]
    assert put == [(3, 1), (4, 2), (5, 0), (5, 5), (8, 4), (9, 3), (10, 6)]
    assert in_order.late == 1


def test_lines_of_equal_time_keep_their_order() -> None:
    lines = [(7, number, ()) for number in range(5)]
    assert [line for out in ReorderBuffer(lines, min_buffered=3, chunk=2) for line in out] == lines


def test_buckets_widen_without_losing_counts() -> None:
    series = TimeHistogram()
    for second in range(0, 100_000, 7):
        series.add(DEFAULT_START_US + second * S_US, denied=second % 2 == 1)

    assert len(series.buckets) <= MAX_BUCKETS
    assert series.width_us == 600 * S_US
    assert series.start_us == DEFAULT_START_US
    assert sum(admitted + denied for admitted, denied in series.buckets) == len(range(0, 100_000, 7))
    assert series.buckets[0] == (43, 43)


def test_explicit_bucket_width_only_doubles() -> None:
    series = TimeHistogram(3 * S_US)
    for second in range(3 * MAX_BUCKETS + 1):
        series.add(DEFAULT_START_US + second * S_US, denied=False)
    assert series.width_us == 6 * S_US
