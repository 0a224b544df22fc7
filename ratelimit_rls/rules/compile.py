"""Documents to the tree: what the rules mean, or every reason why they mean nothing.

Files are taken in the order of their names, so that the order of wildcards, which decides between them, does not hang
on the file system. Either everything compiles or nothing does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ratelimit_rls.core.attributes import AttributeMapping
from ratelimit_rls.core.keys import ShardBy
from ratelimit_rls.core.model import Charge, OnStoreFailure, Position
from ratelimit_rls.core.style import PLAIN, AnswerStyle, Deny
from ratelimit_rls.core.tree import Node, Tree
from ratelimit_rls.errors import Problem, RulesError
from ratelimit_rls.rules import lint, offences
from ratelimit_rls.rules.answer import compile_style
from ratelimit_rls.rules.deny import compile_deny
from ratelimit_rls.rules.descriptor import Level, add_descriptor
from ratelimit_rls.rules.document import Document, Written, read_document
from ratelimit_rls.rules.ext_authz import compile_mapping
from ratelimit_rls.rules.grammar import DESCRIPTOR_KEYS, Findings
from ratelimit_rls.rules.load import Source, load
from ratelimit_rls.rules.node import YamlNode
from ratelimit_rls.rules.rule import Inherited
from ratelimit_rls.rules.word import Words, read_word


@dataclass(frozen=True, slots=True)
class Compiled:
    tree: Tree
    warnings: tuple[Problem, ...]  # sorted by place
    digest: str
    files: int
    ext_authz: Mapping[str, YamlNode]  # by domain, as written: for whoever writes rules back


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
    domains = _domains(parts, merge_domains)
    tree = Tree(
        {domain.name: _build(domain, default) for domain in domains},
        {domain.name: domain.mapping for domain in domains if domain.mapping is not None},
    )
    errors.extend(problem for part in parts for problem in part.found.errors)
    if errors:
        raise RulesError(set(errors))
    warnings = {problem for part in parts for problem in part.found.warnings}
    warnings.update(lint.lint(tree, [part.document for part in parts]))
    mappings = {domain.name: domain.blocks["ext_authz"].value for domain in domains if "ext_authz" in domain.blocks}
    return Compiled(tree, tuple(sorted(warnings)), digest(sources), len(sources), mappings)


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
    words: dict[str, Written[str]] = field(default_factory=dict)  # `charge` and the like, as first written
    charge: Charge | None = None
    on_store_failure: OnStoreFailure | None = None
    shard_by: ShardBy | None = None
    blocks: dict[str, Written[YamlNode]] = field(default_factory=dict)  # `answer` and the like, as first written
    style: AnswerStyle = PLAIN
    deny: Deny | None = None
    mapping: AttributeMapping | None = None

    def add(self, part: _Part) -> None:
        """What is said of the whole domain is read wherever it stands, and counts where it stands first."""
        self.parts.append(part)
        document, found = part.document, part.found
        self.charge = self._word("charge", document.charge, Charge, found) or self.charge
        on_failure = self._word("on_store_failure", document.on_store_failure, OnStoreFailure, found)
        self.on_store_failure = on_failure or self.on_store_failure
        self.shard_by = self._word("shard_by", document.shard_by, ShardBy, found) or self.shard_by
        style, deny = compile_style(document.answer, found), compile_deny(document.deny, found)
        mapping = compile_mapping(document.ext_authz.value, found) if document.ext_authz else None
        if self._is_first("answer", document.answer, found) and style is not None:
            self.style = style
        if self._is_first("deny", document.deny, found):
            self.deny = deny
        if self._is_first("ext_authz", document.ext_authz, found):
            self.mapping = mapping

    def _word(self, key: str, written: Written[str] | None, words: type[Words], found: Findings) -> Words | None:
        """Files may repeat it, and must not differ in it."""
        if written is not None:
            first = self.words.setdefault(key, written)
            if first.value != written.value:
                of_rules = key in DESCRIPTOR_KEYS
                found.error(written.position, offences.word_conflict(key, self.name, first.position, of_rules=of_rules))
        return read_word(key, written, words, found)

    def _is_first(self, key: str, written: Written[YamlNode] | None, found: Findings) -> bool:
        if written is None:
            return False
        first = self.blocks.setdefault(key, written)
        if first is not written:
            found.error(written.position, offences.said_twice(key, self.name, first.position))
        return first is written


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
    inherited = Inherited(domain.charge, default, domain.style, domain.deny, domain.on_store_failure)
    for part in domain.parts:
        for document in part.document.descriptors:
            add_descriptor(level, domain.name, document, part.found, inherited)
    return level.node(
        domain.name,
        position=domain.position,
        style=domain.style,
        deny=domain.deny,
        on_store_failure=domain.on_store_failure,
        shard_by=domain.shard_by or ShardBy.DESCRIPTOR,
    )
