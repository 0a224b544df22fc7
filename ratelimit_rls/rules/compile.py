"""Documents to the tree: what the rules mean, or every reason why they mean nothing.

Files are taken in the order of their names, so that the order of wildcards, which decides between them, does not hang
on the file system. Either everything compiles or nothing does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ratelimit_rls.core.model import Charge, Position
from ratelimit_rls.core.tree import Node, Tree
from ratelimit_rls.errors import Problem, RulesError
from ratelimit_rls.rules import lint, offences
from ratelimit_rls.rules.descriptor import Level, add_descriptor, read_charge
from ratelimit_rls.rules.document import Document, Written, read_document
from ratelimit_rls.rules.grammar import Findings
from ratelimit_rls.rules.load import Source, load


@dataclass(frozen=True, slots=True)
class Compiled:
    tree: Tree
    warnings: tuple[Problem, ...]  # sorted by place
    digest: str
    files: int


def compile_documents(
    files: Mapping[str, bytes] | Sequence[Source], *, merge_domains: bool = False, default_admitted: bool = False
) -> Compiled:
    """The tree that `files` describe; raises RulesError with every error of every file.

    `default_admitted` is what rules in the reference's grammar alone are charged by, where nothing else says it.
    """
    if isinstance(files, Mapping):
        files = [Source(name, content) for name, content in files.items()]
    sources = sorted(files, key=lambda source: source.name)
    errors: list[Problem] = []
    parts: list[_Part] = []
    for source in sources:
        found = Findings(source.name)
        try:
            parts.append(_Part(read_document(load(source), found), found))
        except RulesError as error:
            errors.extend(error.problems)
    default = Charge.ADMITTED if default_admitted else Charge.ALWAYS
    tree = Tree({domain.name: _build(domain, default) for domain in _domains(parts, merge_domains)})
    errors.extend(problem for part in parts for problem in part.found.errors)
    if errors:
        raise RulesError(set(errors))
    warnings = {problem for part in parts for problem in part.found.warnings}
    warnings.update(lint.lint(tree, [part.document for part in parts]))
    return Compiled(tree, tuple(sorted(warnings)), digest(sources), len(sources))


def digest(sources: Iterable[Source]) -> str:
    """Of what the files say, in order, not of where they lie: equal on every replica with equal rules."""
    whole = hashlib.sha256()
    for source in sources:
        whole.update(b"%d:" % len(source.content))
        whole.update(source.content)
    return whole.hexdigest()


@dataclass(frozen=True, slots=True)
class _Part:
    document: Document
    found: Findings


@dataclass(slots=True)
class _Domain:
    """One domain with the files that describe it."""

    name: str
    position: Position
    parts: list[_Part] = field(default_factory=list)
    charge: Written[str] | None = None

    def add(self, part: _Part) -> None:
        self.parts.append(part)
        charge = part.document.charge
        if charge is None:
            return
        read_charge(charge, part.found)
        if self.charge is None:
            self.charge = charge
        elif self.charge.value != charge.value:
            part.found.error(charge.position, offences.charge_conflict(self.name, self.charge.position))


def _domains(parts: Iterable[_Part], merge_domains: bool) -> list[_Domain]:
    """A file that belongs to no domain, or may not belong to its own, is looked at all the same: one visit to the
    doctor should find everything."""
    known: dict[str, _Domain] = {}
    astray: list[_Domain] = []
    for part in parts:
        document = part.document
        position = document.domain.position if document.domain else document.position
        name = document.domain.value if document.domain else ""
        domain = known.get(name)
        if not name:
            if not document.is_broken:
                part.found.error(position, offences.empty_domain())
            domain = None
        elif domain is not None and not merge_domains:
            part.found.error(position, offences.duplicate_domain(name, domain.position))
            domain = None
        elif domain is None:
            domain = known[name] = _Domain(name, position)
        if domain is None:
            domain = _Domain(name, position)
            astray.append(domain)
        domain.add(part)
    return [*known.values(), *astray]


def _build(domain: _Domain, default: Charge) -> Node:
    level = Level()
    charge = Charge(domain.charge.value) if domain.charge and domain.charge.value in offences.CHARGES else None
    for part in domain.parts:
        for document in part.document.descriptors:
            add_descriptor(level, domain.name, document, part.found, domain_charge=charge, default_charge=default)
    return level.node(domain.name, position=domain.position)
