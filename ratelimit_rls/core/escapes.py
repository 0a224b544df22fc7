"""Percent escapes in what a client sends, read in time that grows with its length alone, whatever it is made of.

`urllib.parse` reads the same, but asks Python about each `%`: 56 KB of them are some 20 ms of everybody's time.
"""

from __future__ import annotations

import re

_ESCAPE = re.compile(rb"%([0-9A-Fa-f]{2})")
_DIGITS = "0123456789ABCDEFabcdef"
_BYTES = {f"{high}{low}".encode(): bytes.fromhex(high + low) for high in _DIGITS for low in _DIGITS}


def unescaped(text: str) -> str:
    """`%20` is a space. An escape that is none, or bytes that are no text, stay as they were sent."""
    if "%" not in text:
        return text
    try:
        pieces = _ESCAPE.split(text.encode())  # text, digits, text, digits, ..., text
        pieces[1::2] = map(_BYTES.__getitem__, pieces[1::2])
        return b"".join(pieces).decode()
    except UnicodeError:
        return text


def of_a_form(text: str) -> str:
    """The same, where `+` is a space too."""
    return unescaped(text.replace("+", " "))


def parameter_pattern(name: str) -> re.Pattern[str]:
    """Finds the parameter in a query with `&` put before it, however its name is escaped.

    Group 1 is the value as sent, None without a `=`. The search runs from one `&` to the next, and a name ends before
    another one or a `=`, so that nothing is looked at twice.
    """
    ways = ["".join(map(_ways_to_write, name))]
    if re.search("[+%]", name) and not re.search("[&=]", name):
        ways.append(_as_it_stands(name))
    return re.compile(f"&(?:{'|'.join(ways)})(?:=([^&]*)|(?![^&]))")


def _ways_to_write(character: str) -> str:
    escape = "".join(f"%{byte:02X}" for byte in character.encode())
    either_case = re.sub("[A-F]", lambda digit: f"[{digit[0]}{digit[0].lower()}]", escape)
    match character:
        case "&" | "=" | "+":  # would end the name, or be a space
            return either_case
        case "%":
            return f"(?:{either_case}|%(?![0-9A-Fa-f]{{2}}))"
        case " ":
            return f"(?:{either_case}|[ +])"
        case _:
            return f"(?:{either_case}|{re.escape(character)})"


def _as_it_stands(name: str) -> str:
    """Who writes a `+` or a `%` in the rules may have copied the name from a query."""
    has_escapes = _ESCAPE.search(name.encode()) is not None
    if has_escapes and unescaped(name) == name and "+" not in name:  # they are no text, so only `+` is unescaped
        return "[ +]".join(map(re.escape, name.split(" ")))
    return re.escape(name)
