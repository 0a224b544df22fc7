"""The type of command line options that are durations, in microseconds."""

from __future__ import annotations

from typing import Any

import click

from ratelimit_rls.core.duration import MAX_DURATION_US, duration_parser


class DurationType(click.ParamType[int]):
    name = "DURATION"

    def __init__(self, min_us: int = 1, max_us: int = MAX_DURATION_US) -> None:
        self._parse = duration_parser(min_us, max_us)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return self._parse(str(value))
        except ValueError as error:
            self.fail(f"{value!r} {error}", param, ctx)
