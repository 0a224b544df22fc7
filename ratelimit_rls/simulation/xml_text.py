"""Conversion of text for XML."""

from __future__ import annotations

import re

# Characters that XML 1.0 cannot represent, not even escaped; YAML and JSON can.
_NOT_XML = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def xml_text(text: str) -> str:
    """Replace each such character by U+FFFD. The result still needs escaping."""
    return _NOT_XML.sub("\ufffd", text)
