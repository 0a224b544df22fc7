"""Text that XML can carry."""

from __future__ import annotations

import re

# What XML 1.0 has no way to write, not even escaped; YAML and JSON have one.
_NOT_XML = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def xml_text(text: str) -> str:
    """The text with U+FFFD in place of each such character; it is still to be escaped."""
    return _NOT_XML.sub("\ufffd", text)
