"""The example in the README of h2 runs, and answers the call."""

from __future__ import annotations

import re
from pathlib import Path

from hpack import Decoder, Encoder

import ratelimit_rls.h2
from ratelimit_rls.h2 import frames
from ratelimit_rls.h2.frames import DATA, END_HEADERS, END_STREAM, HEADERS, PREFACE, frame
from tests.unit.h2.client import fields, prefixed, split

README = Path(ratelimit_rls.h2.__file__).with_name("README.md").read_text()


def test_example_answers_the_call() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    block = Encoder().encode(fields("/echo.Echo/Say"))
    call = frame(HEADERS, END_HEADERS, 1, block) + frame(DATA, END_STREAM, 1, prefixed(b"hello"))
    names: dict[str, bytes] = {"received": PREFACE + frames.settings({}) + call}
    exec(example, names)
    headers, data, trailers = [one for one in split(names["to_send"]) if one.stream_id == 1]
    decoder = Decoder()
    assert (":status", "200") in list(decoder.decode(headers.payload))
    assert data.payload == prefixed(b"hello")
    assert dict(decoder.decode(trailers.payload)) == {"grpc-status": "0"}


def test_names_in_the_readme_exist() -> None:
    """Constants, fields and hooks that the README names by module or class."""
    for module, name in re.findall(r"`(\w+)\.([A-Z_]{4,}|Timeouts)`", README):
        assert hasattr(__import__(f"ratelimit_rls.h2.{module}", fromlist=[name]), name), name
    hooks = __import__("ratelimit_rls.h2.hooks", fromlist=["Hooks"]).Hooks
    for name in re.findall(r"`Hooks\.(\w+)`", README):
        assert callable(getattr(hooks, name)), name
