"""Resolution of YAML scalars as in envoyproxy/ratelimit (go-yaml v2): YAML 1.1 without its pitfalls.

Booleans include the single letters y and n; integers may use `_`, 0x, 0b, 0o or an octal 0; there are no sexagesimals
(10:30 is text), and a date is text. The type matters only where a number or a boolean is expected: a text field takes
the scalar as it was written.
"""

from __future__ import annotations

import math
import re
from enum import Enum

MAX_INT64 = 2**63 - 1


class ScalarKind(Enum):
    """Type of a scalar. The value is the tag that messages show."""

    NULL = "!!null"
    BOOL = "!!bool"
    INT = "!!int"
    FLOAT = "!!float"
    STRING = "!!str"


ScalarValue = None | bool | int | float | str

_TRUE = ("y", "Y", "yes", "Yes", "YES", "true", "True", "TRUE", "on", "On", "ON")
_FALSE = ("n", "N", "no", "No", "NO", "false", "False", "FALSE", "off", "Off", "OFF")
_NULL = ("", "~", "null", "Null", "NULL")

_CONSTANTS: dict[str, tuple[ScalarKind, ScalarValue]] = {
    **dict.fromkeys(_TRUE, (ScalarKind.BOOL, True)),
    **dict.fromkeys(_FALSE, (ScalarKind.BOOL, False)),
    **dict.fromkeys(_NULL, (ScalarKind.NULL, None)),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), (ScalarKind.FLOAT, math.nan)),
    **{sign + constant: (ScalarKind.FLOAT, math.inf) for sign in ("", "+") for constant in (".inf", ".Inf", ".INF")},
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), (ScalarKind.FLOAT, -math.inf)),
}

# An integer has at most 64 digits (in binary); longer digit strings are floats, here and in go-yaml. The bound also
# keeps int() from parsing megabytes of digits.
_INT = re.compile(
    r"([-+]?)(?:0[xX](?P<hex>[0-9a-fA-F]{1,16})|0[bB](?P<bin>[01]{1,64})|0[oO]?(?P<oct>[0-7]{1,22})|(?P<dec>0|[1-9][0-9]{0,19}))"
)
_BASES = {"hex": 16, "bin": 2, "oct": 8, "dec": 10}
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")


def resolve(text: str) -> tuple[ScalarKind, ScalarValue]:
    """Return the type and the value of an unquoted scalar."""
    constant = _CONSTANTS.get(text)
    if constant is not None:
        return constant
    first = text[0]
    if first == ".":
        return _float(text) or (ScalarKind.STRING, text)
    if first not in "+-0123456789":
        return ScalarKind.STRING, text
    plain = text.replace("_", "")
    return _int(plain) or _float(plain) or (ScalarKind.STRING, text)


def _int(plain: str) -> tuple[ScalarKind, ScalarValue] | None:
    found = _INT.fullmatch(plain)
    if found is None or found.lastgroup is None:
        return None
    number = int(found[found.lastgroup], _BASES[found.lastgroup])
    if found[1] == "-":
        number = -number
    # Beyond 64 bits it is not an integer; a decimal number then becomes a float, as in go-yaml.
    return (ScalarKind.INT, number) if -(2**63) <= number < 2**64 else None


def _float(plain: str) -> tuple[ScalarKind, ScalarValue] | None:
    if _FLOAT.fullmatch(plain) is None:
        return None
    number = float(plain)
    return None if math.isinf(number) else (ScalarKind.FLOAT, number)
