"""Parameters of queries that say no more than they mean."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema


def _true_or_false(value: Any) -> Any:
    """Not the dozen other words that pydantic takes for one of them."""
    if isinstance(value, str):
        if value not in ("true", "false"):
            raise ValueError("it is true or false")
        return value == "true"
    return value


QueryBool = Annotated[bool, BeforeValidator(_true_or_false), WithJsonSchema({"type": "boolean"})]
