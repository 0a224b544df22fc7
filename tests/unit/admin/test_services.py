"""The services of administration are independent of the ports that offer them."""

from __future__ import annotations

import asyncio
import pkgutil
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest

import ratelimit_rls.admin
from ratelimit_rls.admin.backend import AdminBackend
from ratelimit_rls.admin.credentials import new_admin_token, new_key
from ratelimit_rls.admin.rules import compile_rule
from ratelimit_rls.database.administration import Role
from ratelimit_rls.identity.key_format import matches, public_id
from ratelimit_rls.rules.stored_rule import StoredRule

SERVICES = [module.name for module in pkgutil.iter_modules(ratelimit_rls.admin.__path__) if module.name != "http"]


def test_services_import_no_library_of_a_port() -> None:
    """The CLI imports them, too, and starts without a web framework."""
    imports = "; ".join(f"import ratelimit_rls.admin.{name}" for name in SERVICES)
    found = "[name for name in ('fastapi', 'starlette', 'pydantic', 'grpc') if name in sys.modules]"
    run = subprocess.run(
        [sys.executable, "-c", f"import sys; {imports}; print({found})"], capture_output=True, text=True, check=True
    )
    assert (len(SERVICES) >= 9, run.stdout) == (True, "[]\n")


def test_new_credentials_match_their_digests() -> None:
    key, key_text = new_key(b"secret", "alice", tier="gold", expires_s=7.0)
    token, token_text = new_admin_token(b"secret", "ann", Role.WRITE)
    assert matches(b"secret", key_text, key.digest)
    assert matches(b"secret", token_text, token.digest)
    assert (public_id(key_text, "rlk"), public_id(token_text, "rla")) == (key.key_id, token.token_id)
    assert (key.user_id, key.tier, key.expires_s, token.name, token.role) == ("alice", "gold", 7.0, "ann", Role.WRITE)


@pytest.mark.parametrize("enabled", [True, False])
def test_stored_rule_is_compiled_by_the_compiler_of_the_service(enabled: bool) -> None:
    """A disabled rule is compiled alone, and as if it were enabled."""
    compiled: list[tuple[str, Any]] = []
    backend = SimpleNamespace(
        check_rules=lambda rules: compiled.append(("with others", [rule.name for rule in rules])),
        compile_rules=lambda sources: compiled.append(("alone", [source.name for source in sources])),
    )
    rule, other = StoredRule("1", "new", "domain: a", enabled=enabled), StoredRule("2", "other", "domain: b")
    asyncio.run(compile_rule(cast(AdminBackend, backend), rule, {"2": other}))
    assert compiled == [("with others", ["other", "new"]) if enabled else ("alone", ["database:new"])]
