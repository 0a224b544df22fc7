"""What a YAML scalar is, in the reference's dialect (go-yaml v2): YAML 1.1 without its traps.

Booleans include the single letters y and n, whole numbers may carry `_`, 0x, 0b, 0o or an octal 0, there are no
sexagesimals (10:30 is text), and a date is text. Which of these a scalar is matters only where a number or a boolean
is wanted: a place for text takes the scalar as it was written.
"""

from __future__ import annotations

import math
import re
from enum import Enum

MAX_INT64 = 2**63 - 1


class Kind(Enum):
    """The value is the tag that messages show."""

    NULL = "!!null"
    BOOL = "!!bool"
    INT = "!!int"
    FLOAT = "!!float"
    STRING = "!!str"


Value = None | bool | int | float | str

_TRUE = ("y", "Y", "yes", "Yes", "YES", "true", "True", "TRUE", "on", "On", "ON")
_FALSE = ("n", "N", "no", "No", "NO", "false", "False", "FALSE", "off", "Off", "OFF")
_NULL = ("", "~", "null", "Null", "NULL")

_WORDS: dict[str, tuple[Kind, Value]] = {
    **dict.fromkeys(_TRUE, (Kind.BOOL, True)),
    **dict.fromkeys(_FALSE, (Kind.BOOL, False)),
    **dict.fromkeys(_NULL, (Kind.NULL, None)),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), (Kind.FLOAT, math.nan)),
    **{sign + word: (Kind.FLOAT, math.inf) for sign in ("", "+") for word in (".inf", ".Inf", ".INF")},
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), (Kind.FLOAT, -math.inf)),
}

# An int has at most 64 digits (a binary one); longer digit strings are floats here and in the reference. The bound
# also keeps int() away from numbers a megabyte long.
_INT = re.compile(
    r"([-+]?)(?:0[xX](?P<hex>[0-9a-fA-F]{1,16})|0[bB](?P<bin>[01]{1,64})|0[oO]?(?P<oct>[0-7]{1,22})|(?P<dec>0|[1-9][0-9]{0,19}))"
)
_BASES = {"hex": 16, "bin": 2, "oct": 8, "dec": 10}
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")


def resolve(text: str) -> tuple[Kind, Value]:
    """What an unquoted scalar is, with its value."""
    word = _WORDS.get(text)
    if word is not None:
        return word
    first = text[0]
    if first == ".":
        return _float(text) or (Kind.STRING, text)
    if first not in "+-0123456789":
        return Kind.STRING, text
    plain = text.replace("_", "")
    return _int(plain) or _float(plain) or (Kind.STRING, text)


def _int(plain: str) -> tuple[Kind, Value] | None:
    found = _INT.fullmatch(plain)
    if found is None or found.lastgroup is None:
        return None
    number = int(found[found.lastgroup], _BASES[found.lastgroup])
    if found[1] == "-":
        number = -number
    # Beyond 64 bits it is no int; what was written in decimal is then a float, as in the reference.
    return (Kind.INT, number) if -(2**63) <= number < 2**64 else None


def _float(plain: str) -> tuple[Kind, Value] | None:
    if _FLOAT.fullmatch(plain) is None:
        return None
    number = float(plain)
    return None if math.isinf(number) else (Kind.FLOAT, number)
