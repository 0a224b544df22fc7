"""Lines of traffic become requests; what is bad is counted and never fatal, and nothing grows with the traffic."""

from __future__ import annotations

import gzip
import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from ratelimit_rls.core.model import Descriptor, Entry, Request
from ratelimit_rls.errors import RulesError, SettingsError
from ratelimit_rls.trial.mapping import BadLine, Mapping
from ratelimit_rls.trial.moments import START_US
from ratelimit_rls.trial.order import InOrder
from ratelimit_rls.trial.series import MOST_BUCKETS, Series
from ratelimit_rls.trial.traffic import LONGEST_LINE_BYTES, LogTraffic, Phase, ProfileTraffic

S_US = 1_000_000


def asked(mapping: Mapping, **fields: Any) -> Request | None:
    return mapping.request(mapping.values(fields))


def test_fields_fill_the_descriptors_that_are_described() -> None:
    mapping = Mapping("%zone%-edge", ["user=%headers.x-user%,path=%path%", "kind=a%%b %n% %ok%"])

    request = asked(mapping, zone="eu", headers={"x-user": "alice"}, path="/", n=7, ok=True)

    first = Descriptor((Entry("user", "alice"), Entry("path", "/")))
    assert request == Request("eu-edge", (first, Descriptor((Entry("kind", "a%b 7 true"),))))


def test_a_name_with_a_dot_is_found_flat_as_well() -> None:
    assert asked(Mapping("d", ["a=%x.y%"]), **{"x.y": "1"}) == Request("d", (Descriptor((Entry("a", "1"),)),))


@pytest.mark.parametrize("missing", [{}, {"user": None}, {"user": "-"}])
def test_a_descriptor_of_which_a_field_is_missing_is_not_sent(missing: dict[str, Any]) -> None:
    mapping = Mapping("d", ["user=%user%", "path=%path%"])

    assert asked(mapping, path="/", **missing) == Request("d", (Descriptor((Entry("path", "/"),)),))
    assert asked(mapping, **missing) is None


def test_without_a_description_a_line_brings_its_own_descriptor_domain_and_hits() -> None:
    request = asked(Mapping(), domain="d", descriptor="plan=free,user=a=b", hits="3")

    assert request == Request("d", (Descriptor((Entry("plan", "free"), Entry("user", "a=b")), hits=3),))


@pytest.mark.parametrize(
    "fields",
    [{"descriptor": "a=b"}, {"domain": "d", "descriptor": "a"}, {"domain": "d", "descriptor": "a=b", "hits": "-1"}],
)
def test_fields_that_make_no_sense_are_a_bad_line(fields: dict[str, str]) -> None:
    with pytest.raises(BadLine):
        asked(Mapping(), **fields)


@pytest.mark.parametrize("written", ["user", "=x", "user=%x", "user=%a%,"])
def test_a_bad_description_is_refused_before_any_line_is_read(written: str) -> None:
    with pytest.raises(SettingsError):
        Mapping("d", [written])


def log(path: Path, *lines: str | bytes | dict[str, Any]) -> Path:
    texts = [json.dumps(line) if isinstance(line, dict) else line for line in lines]
    path.write_bytes(b"\n".join(text if isinstance(text, bytes) else text.encode() for text in texts))
    return path


def test_bad_lines_are_counted_with_their_numbers_and_the_others_are_read(tmp_path: Path) -> None:
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
        "x" * (LONGEST_LINE_BYTES + 5),
        {**good, "start_time": 1704067202},
    )
    traffic = LogTraffic(path, Mapping())

    lines = list(traffic)

    assert [(at_us - START_US, number) for at_us, number, _ in lines] == [(1_500_000, 1), (2_000_000, 10)]
    assert traffic.bad.count == 7
    assert [number for number, _ in traffic.bad.first] == [2, 4, 5, 6, 7]
    with pytest.raises(RulesError, match=r"access\.log:2:1: error: not JSON"):
        list(LogTraffic(path, Mapping(), strict=True))


def test_a_csv_is_read_by_its_columns_and_an_empty_cell_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "traffic.csv.gz"
    rows = 'when,user,path\n2024-01-01T00:00:00Z,"a,b",/\n1704067201,,/x\n1,2\n"1\n'
    path.write_bytes(gzip.compress(b"\xef\xbb\xbf" + rows.encode()))
    traffic = LogTraffic(path, Mapping("d", ["user=%user%"]), time_field="when")

    assert list(traffic) == [(START_US, 2, (None, "a,b")), (START_US + S_US, 3, (None, None))]
    assert [number for number, _ in traffic.bad.first] == [4, 5]


def test_a_csv_without_the_columns_that_are_named_says_which_there_are(tmp_path: Path) -> None:
    path = tmp_path / "traffic.csv"
    path.write_text("time,who\n")
    with pytest.raises(SettingsError, match="no column 'user'; it has time, who"):
        list(LogTraffic(path, Mapping("d", ["user=%user%"])))


def test_a_zipped_log_that_is_cut_short_is_told_in_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "a.log.gz"
    path.write_bytes(gzip.compress(b'{"a": 1}\n' * 1000)[:-20])
    with pytest.raises(SettingsError, match="cannot be read"):
        list(LogTraffic(path, Mapping("d", ["a=%a%"])))


def test_a_profile_spaces_its_requests_evenly_and_its_phases_follow_each_other() -> None:
    phases = [Phase(Fraction(2), 1_500_000), Phase(Fraction(1, 60), 120 * S_US)]

    lines = list(ProfileTraffic(phases, Mapping("d", ["n=%n%,c=%caller%"]), callers=2))

    assert [at_us - START_US for at_us, _, _ in lines] == [0, 500_000, 1_000_000, 1_500_000, 61_500_000]
    assert [values for _, _, values in lines][-2:] == [(None, "3", "1"), (None, "4", "0")]


def test_lines_are_put_in_order_within_what_is_held_and_the_rest_is_counted() -> None:
    lines = [(at, number, ()) for number, at in enumerate([5, 3, 4, 9, 8, 1, 10])]

    in_order = InOrder(lines, held=2, chunk=1)

    put = [(at_us, number) for out in in_order for at_us, number, _ in out]
    assert put == [(3, 1), (4, 2), (5, 0), (5, 5), (8, 4), (9, 3), (10, 6)]
    assert in_order.late == 1


def test_lines_of_one_moment_stay_as_they_were_written() -> None:
    lines = [(7, number, ()) for number in range(5)]
    assert [line for out in InOrder(lines, held=3, chunk=2) for line in out] == lines


def test_buckets_become_wider_and_lose_nothing() -> None:
    series = Series()
    for second in range(0, 100_000, 7):
        series.add(START_US + second * S_US, refused=second % 2 == 1)

    assert len(series.buckets) <= MOST_BUCKETS
    assert series.width_us == 600 * S_US
    assert series.start_us == START_US
    assert sum(admitted + refused for admitted, refused in series.buckets) == len(range(0, 100_000, 7))
    assert series.buckets[0] == (43, 43)


def test_a_width_that_was_asked_for_only_doubles() -> None:
    series = Series(3 * S_US)
    for second in range(3 * MOST_BUCKETS + 1):
        series.add(START_US + second * S_US, refused=False)
    assert series.width_us == 6 * S_US
