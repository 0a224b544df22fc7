"""Valid names of users, tiers and organisations, and their encoding in HTTP headers.

HTTP strips spaces at both ends of a header value, and only printable ASCII is passed on unchanged everywhere. So names
have no spaces at their ends, and everything outside printable ASCII is percent-encoded, including the percent sign: two
different names never give the same value, and decoding a value gives the name.

    alice ─► alice      Zoë ─► Zo%C3%AB      Zo%C3%AB ─► Zo%25C3%25AB      " alice" is not allowed
"""

from __future__ import annotations

MAX_ID_LENGTH = 255
"""Maximum characters in the name of a user, a tier or a rule."""


_SAFE = frozenset(map(chr, range(0x20, 0x7F))) - {"%"}


def name_error(name: str) -> str | None:
    """Return why a name is invalid, as the end of a sentence; None if it is valid."""
    if not name:
        return "must not be empty"
    if len(name) > MAX_ID_LENGTH:
        return f"has {len(name)} characters; {MAX_ID_LENGTH} are the most"
    if not name.isprintable():  # False for every space except U+0020, for control characters and lone surrogates
        return "has a character that cannot be printed; use letters, digits, spaces and punctuation"
    if name[0] == " " or name[-1] == " ":
        return "begins or ends with a space, which HTTP headers do not preserve"
    return None


def encode_header_value(name: str) -> str:
    """Encode a name as printable ASCII without spaces at its ends. Injective for every text, even for invalid names."""
    if name.isascii() and name.isprintable() and "%" not in name and name[:1] != " " and name[-1:] != " ":
        return name
    inner = name.strip(" ")
    start = name.find(inner) if inner else len(name)
    end = start + len(inner)
    encoded = "".join([char if char in _SAFE else _percent_encoded(char) for char in inner])
    return "%20" * start + encoded + "%20" * (len(name) - end)


def _percent_encoded(char: str) -> str:
    return "".join([f"%{byte:02X}" for byte in char.encode(errors="surrogatepass")])
