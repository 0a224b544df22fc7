"""Serialisation of typed messages to the JSON form that Envoy reads, with the field names of the .proto files."""

from __future__ import annotations

from typing import Any

import betterproto2


def to_json_dict(message: betterproto2.Message) -> dict[str, Any]:
    return message.to_dict(casing=betterproto2.Casing.SNAKE)
