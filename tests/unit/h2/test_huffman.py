"""Huffman strings, compared with the `hpack` library."""

from __future__ import annotations

import pytest
from hpack.exceptions import HPACKDecodingError
from hpack.huffman import HuffmanEncoder
from hpack.huffman_constants import REQUEST_CODES, REQUEST_CODES_LENGTH
from hpack.huffman_table import decode_huffman
from hypothesis import given, settings
from hypothesis import strategies as st

from ratelimit_rls.h2.huffman import ROOT, HpackError, decode

encode = HuffmanEncoder(REQUEST_CODES, REQUEST_CODES_LENGTH).encode

quickly = settings(deadline=None, database=None)

texts = st.text("0123456789abcdef-", max_size=60).map(str.encode) | st.binary(max_size=60)


def bits(text: str) -> bytes:
    """Convert a string of bits, with optional spaces, to bytes."""
    digits = text.replace(" ", "")
    assert len(digits) % 8 == 0
    return int(digits, 2).to_bytes(len(digits) // 8)


def read(data: bytes) -> bytes | None:
    try:
        return decode(data)
    except HpackError:
        return None


def read_by_the_other(data: bytes) -> bytes | None:
    try:
        return decode_huffman(data)
    except HPACKDecodingError:
        return None


@pytest.mark.parametrize(
    ("coded", "text"),
    [
        ("f1e3c2e5f23a6ba0ab90f4ff", b"www.example.com"),
        ("a8eb10649cbf", b"no-cache"),
        ("25a849e95bb8e8b4bf", b"custom-value"),
        ("d07abe941054d444a8200595040b8166e082a62d1bff", b"Mon, 21 Oct 2013 20:13:21 GMT"),
        ("", b""),
    ],
)
def test_rfc_examples(coded: str, text: bytes) -> None:
    assert decode(bytes.fromhex(coded)) == text


def test_every_pair_of_bytes() -> None:
    for first in range(256):
        text = b"".join(bytes([first, second]) for second in range(256))
        assert decode(encode(text)) == text


@quickly
@given(texts)
def test_round_trip(text: bytes) -> None:
    assert decode(encode(text)) == text


def test_any_two_bytes_decode_as_in_the_hpack_library() -> None:
    strings = [bytes([first]) for first in range(256)]
    strings += [bytes([first, second]) for first in range(256) for second in range(256)]
    assert [read(string) for string in strings] == [read_by_the_other(string) for string in strings]


@quickly
@given(st.binary(max_size=40) | st.builds(lambda text, end: encode(text) + end, texts, st.binary(max_size=5)))
def test_any_bytes_decode_as_in_the_hpack_library(data: bytes) -> None:
    assert read(data) == read_by_the_other(data)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        pytest.param(bits("11111000"), b"&", id="none"),
        pytest.param(bits("1111001 1"), b"x", id="one bit"),
        pytest.param(bits("00011 111"), b"a", id="three bits"),
        pytest.param(bits("1111111000 00011 00011 00011 1111111"), b"!aaa", id="seven bits"),
    ],
)
def test_valid_padding_is_ignored(data: bytes, text: bytes) -> None:
    assert decode(data) == text


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(bits("00011 000"), id="zeros"),
        pytest.param(bits("00011 110"), id="ones but for the last"),
        pytest.param(bits("00011 011"), id="ones but for the first"),
        pytest.param(bits("11111111"), id="eight bits and nothing else"),
        pytest.param(bits("11111000 11111111"), id="eight bits"),
        pytest.param(bits("00011 111 11111111"), id="eleven bits"),
        pytest.param(bits("1111111111111111"), id="sixteen bits"),
    ],
)
def test_invalid_padding_is_an_error(data: bytes) -> None:
    with pytest.raises(HpackError):
        decode(data)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(bits("1" * 30 + "11"), id="alone"),
        pytest.param(bits("00011" + "1" * 30 + "00011"), id="between characters"),
        pytest.param(bits("1" * 30 + "00011 00011 00011 111"), id="and then all in order"),
        pytest.param(bits("1" * 30 + "11" + "0" * 400), id="and much after it"),
    ],
)
def test_eos_is_an_error(data: bytes) -> None:
    with pytest.raises(HpackError):
        decode(data)


def test_number_of_nodes_is_limited() -> None:
    """All bytes lead to one of the 256 inner nodes of a tree with 257 leaves, or to the dead end after EOS."""
    nodes = {ROOT}
    ahead = [ROOT]
    while ahead:
        steps = ahead.pop().expand()
        assert len(steps) == 256
        new = {node for _, node in steps} - nodes
        nodes |= new
        ahead += new
    assert len(nodes) == 257


def test_node_steps_are_computed_once() -> None:
    decode(encode(b"again"))
    steps = ROOT.steps
    assert steps
    decode(encode(b"again"))
    assert ROOT.steps is steps
