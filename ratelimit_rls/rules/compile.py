"""Compiler of rules: source documents to one tree, or all errors.

Sources are processed by rank, lowest first, and within one rank by name, so that the order of wildcards, which decides
between them, does not depend on the file system. The first source that defines a descriptor (descriptor.py) or a domain
setting has precedence; later definitions are ignored with a warning. Either everything compiles or nothing does.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ratelimit_rls.core.attributes import AttributeMapping
from ratelimit_rls.core.identity import IdentityConfig
from ratelimit_rls.core.model import Charge, OnStoreFailure, Position
from ratelimit_rls.core.response_policy import DEFAULT_RESPONSE_POLICY, DenyResponse, ResponsePolicy
from ratelimit_rls.core.storage_keys import ShardBy, ShardByKey, Sharding
from ratelimit_rls.core.tree import Node, Tree
from ratelimit_rls.errors import Problem, RulesError
from ratelimit_rls.rules import diagnostics, lint
from ratelimit_rls.rules.descriptor import OVERRIDDEN, Level, Origin, add_descriptors
from ratelimit_rls.rules.document import Document, read_document
from ratelimit_rls.rules.ext_authz import compile_mapping
from ratelimit_rls.rules.grammar import DESCRIPTOR_KEYS
from ratelimit_rls.rules.identity import compile_identity
from ratelimit_rls.rules.implicit_mapping import MAX_SHAPES, DescriptorShape, complete_mapping, descriptor_shapes
from ratelimit_rls.rules.positioned_fields import EnumT, Positioned, read_enum
from ratelimit_rls.rules.responses import compile_deny, compile_response_policy
from ratelimit_rls.rules.rule import Inherited
from ratelimit_rls.rules.shard_by import compile_shard_by, has_key
from ratelimit_rls.rules.source_document import SourceDocument, load, second_document
from ratelimit_rls.rules.targeting import apply_targeting, is_targeted
from ratelimit_rls.yaml.findings import Findings
from ratelimit_rls.yaml.nodes import YamlNode

UNREAD = "unread"


@dataclass(frozen=True, slots=True)
class CompiledRules:
    tree: Tree
    warnings: tuple[Problem, ...]  # sorted by position
    digest: str
    sources: tuple[str, ...]  # names, in processing order
    ext_authz: Mapping[str, YamlNode]  # by domain, as written: for writing rules back
    identity: Mapping[str, YamlNode]  # by domain, as written

    @property
    def files(self) -> int:
        return len(self.sources)


@contextmanager
def _gc_paused() -> Iterator[None]:
    """Disable garbage collection for the whole process while rules are compiled.

    The rules are a growing heap without cycles, and repeated collections would take a quarter of the time. Calls create
    no cycles either.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@_gc_paused()
def compile_documents(
    files: Mapping[str, bytes] | Sequence[SourceDocument],
    *,
    merge_domains: bool = False,
    default_admitted: bool = False,
) -> CompiledRules:
    """Compile `files` to a tree. Raise RulesError with every error of every file.

    `merge_domains`: whether several files may describe one domain; stored rules always may. `default_admitted`: whether
    rules that use only keys of envoyproxy/ratelimit are charged `admitted` by default.
    """
    if isinstance(files, Mapping):
        files = [SourceDocument(name, content) for name, content in files.items()]
    sources = sort_by_rank(files)
    errors: list[Problem] = []
    parts: list[_ParsedSource] = []
    for source in sources:
        found = Findings(source.name, first_line=source.lines_above + 1)
        try:
            parts.append(_read(source, found))
        except RulesError as error:
            errors.extend(error.problems)
    default = Charge.ADMITTED if default_admitted else Charge.ALWAYS
    domains = _group_by_domain(parts, merge_domains)
    tree = Tree(
        {domain.name: _build(domain, default) for domain in domains},
        {domain.name: mapping for domain in domains if (mapping := domain.completed_mapping()) is not None},
        {domain.name: domain.identity for domain in domains if domain.identity is not None},
    )
    errors.extend(problem for part in parts for problem in part.found.errors)
    if errors:
        raise RulesError(set(errors))
    warnings = {problem for part in parts for problem in part.found.warnings}
    mappings = {domain.name: written for domain in domains if (written := domain.block("ext_authz")) is not None}
    targeted_names = {source.name for source in sources if source.targeting}
    warnings.update(lint.lint(tree, [part.document for part in parts], mappings, targeted_names))
    return CompiledRules(
        tree,
        tuple(sorted(warnings)),
        digest(sources),
        tuple(source.name for source in sources),
        {name: written.value for name, written in mappings.items()},
        {domain.name: written.value for domain in domains if (written := domain.block("identity")) is not None},
    )


def sort_by_rank(sources: Iterable[SourceDocument]) -> list[SourceDocument]:
    """Return the sources in order of precedence."""
    return sorted(sources, key=lambda source: (source.rank, source.name))


def digest(sources: Iterable[SourceDocument]) -> str:
    """Return a digest of the sources' content, in order.

    It is equal on every replica with equal rules, wherever they are stored.
    """
    whole = hashlib.sha256()
    for source in sources:
        whole.update(b"%d:" % len(source.content))
        whole.update(source.content)
        if source.is_stored:
            whole.update(repr((source.rank, source.targeting)).encode())
    return whole.hexdigest()


@dataclass(frozen=True, slots=True)
class _ParsedSource:
    document: Document
    origin: Origin
    shapes: frozenset[DescriptorShape]  # of the descriptors that ext_authz must build

    @property
    def found(self) -> Findings:
        return self.origin.found


def _read(source: SourceDocument, found: Findings) -> _ParsedSource:
    """Parse one source. Raise RulesError if it is not YAML."""
    root = load(source)
    _check_second_document(source, found)
    origin = Origin(found, source.rank, source.is_stored)
    if source.targeting is None:
        return _ParsedSource(read_document(root, found), origin, frozenset())
    document = read_document(apply_targeting(root, source.targeting, found), found)
    wanted = frozenset(descriptor_shapes(document) if is_targeted(root, source.targeting) else ())
    return _ParsedSource(document, origin, wanted)


def _check_second_document(source: SourceDocument, found: Findings) -> None:
    """Report a second document.

    envoyproxy/ratelimit reads only the first document of a file, and so do we, with a warning. Stored rules have no
    such precedent: there a second document is an error.
    """
    second = second_document(source)
    if second is None:
        return
    if source.is_stored:
        found.error(second, diagnostics.second_document())
    else:
        found.warn(second, UNREAD, diagnostics.unread_document())


@dataclass(slots=True)
class _Domain:
    """One domain with the sources that describe it, in order of precedence."""

    name: str
    position: Position
    parts: list[_ParsedSource] = field(default_factory=list)
    # The first value of each domain setting, with the rank of its source: enumerations (`charge`, …) and blocks
    # (`answer`, …)
    settings: dict[str, tuple[Positioned[Any], int]] = field(default_factory=dict)
    blocks: dict[str, tuple[Positioned[YamlNode], int]] = field(default_factory=dict)
    charge: Charge | None = None
    on_store_failure: OnStoreFailure | None = None
    shard_by: Sharding | None = None
    shard_by_part: _ParsedSource | None = None  # the source that `shard_by` is from
    response_policy: ResponsePolicy = DEFAULT_RESPONSE_POLICY
    deny: DenyResponse | None = None
    mapping: AttributeMapping | None = None
    identity: IdentityConfig | None = None

    def add(self, part: _ParsedSource) -> None:
        """Add a source. Domain settings are validated in every source, and the first one applies."""
        self.parts.append(part)
        document, found = part.document, part.found
        self.charge = self._setting("charge", document.charge, Charge, part, self.charge)
        self.on_store_failure = self._setting(
            "on_store_failure", document.on_store_failure, OnStoreFailure, part, self.on_store_failure
        )
        shard_by = compile_shard_by(document.shard_by, found)
        if shard_by is not None:
            self._check_conflict("shard_by", shard_by, part)
            if self.shard_by is None:
                self.shard_by, self.shard_by_part = shard_by.value, part
        response_policy, deny = compile_response_policy(document.answer, found), compile_deny(document.deny, found)
        mapping = compile_mapping(document.ext_authz.value, found) if document.ext_authz else None
        identity = compile_identity(document.identity.value, found) if document.identity else None
        if self._is_first("answer", document.answer, part) and response_policy is not None:
            self.response_policy = response_policy
        if self._is_first("deny", document.deny, part):
            self.deny = deny
        if self._is_first("ext_authz", document.ext_authz, part):
            self.mapping = mapping
        if self._is_first("identity", document.identity, part):
            self.identity = identity

    def existing_file(self, part: _ParsedSource) -> Position | None:
        """Return the position of an earlier file with this domain, if `part` is a file, too; otherwise None."""
        if part.origin.is_stored:
            return None
        others = (other.document.domain for other in self.parts if not other.origin.is_stored)
        return next((domain.position for domain in others if domain is not None), None)

    def block(self, key: str) -> Positioned[YamlNode] | None:
        return self.blocks[key][0] if key in self.blocks else None

    def completed_mapping(self) -> AttributeMapping | None:
        """Return the ext_authz mapping, completed for stored rules; report the source that exceeds the bound.

        If the domain reads credentials from requests there is always a mapping, if only to verify them.
        """
        wanted: set[DescriptorShape] = set()
        for part in self.parts:
            wanted |= part.shapes
            if part.shapes and len(wanted) > MAX_SHAPES:
                part.found.error(part.document.position, diagnostics.too_many_shapes(self.name, MAX_SHAPES))
                return self.mapping
        reads_credentials = self.identity is not None and self.identity.locations
        return complete_mapping(self.mapping or (AttributeMapping.of(()) if reads_credentials else None), wanted)

    def _setting(
        self, key: str, written: Positioned[str] | None, enum: type[EnumT], part: _ParsedSource, known: EnumT | None
    ) -> EnumT | None:
        """Read an enumeration setting. Sources may repeat it; within one rank, they must not differ."""
        if written is not None:
            self._check_conflict(key, written, part)
        read = read_enum(key, written, enum, part.found)
        return known or read

    def _check_conflict(self, key: str, written: Positioned[Any], part: _ParsedSource) -> None:
        """Report a setting that differs from that of an earlier source."""
        first, rank = self.settings.setdefault(key, (written, part.origin.rank))
        if first.value != written.value:
            if rank == part.origin.rank:
                of_rules = key in DESCRIPTOR_KEYS
                message = diagnostics.conflicting_setting(key, self.name, first.position, of_rules=of_rules)
                part.found.error(written.position, message)
            else:
                self._warn(key, written.position, first.position, part)

    def _is_first(self, key: str, written: Positioned[YamlNode] | None, part: _ParsedSource) -> bool:
        if written is None:
            return False
        first, rank = self.blocks.setdefault(key, (written, part.origin.rank))
        if first is not written:
            if rank == part.origin.rank:
                part.found.error(written.position, diagnostics.duplicate_setting(key, self.name, first.position))
            else:
                self._warn(key, written.position, first.position, part)
        return first is written

    def _warn(self, key: str, at: Position, by: Position, part: _ParsedSource) -> None:
        part.found.warn(at, OVERRIDDEN, diagnostics.overridden_domain_setting(key, self.name, by))


def _group_by_domain(parts: Iterable[_ParsedSource], merge_domains: bool) -> list[_Domain]:
    """Group the sources by domain.

    A file without a domain, or with a duplicate one, is checked nevertheless, so that one run finds all errors.
    """
    known: dict[str, _Domain] = {}
    astray: list[_Domain] = []
    for part in parts:
        document = part.document
        position = document.domain.position if document.domain else document.position
        name = document.domain.value if document.domain else ""
        domain = known.get(name)
        if not name:
            if not document.is_broken:
                part.found.error(position, diagnostics.empty_domain())
            domain = None
        elif domain is not None and not merge_domains and (first := domain.existing_file(part)) is not None:
            part.found.error(position, diagnostics.duplicate_domain(name, first))
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
    inherited = Inherited(domain.charge, default, domain.response_policy, domain.deny, domain.on_store_failure)
    for part in domain.parts:
        add_descriptors(level, domain.name, part.document.descriptors, part.origin, inherited)
    root = Node(
        domain.name,
        position=domain.position,
        response_policy=domain.response_policy,
        deny=domain.deny,
        on_store_failure=domain.on_store_failure,
        shard_by=domain.shard_by or ShardBy.DESCRIPTOR,
    )
    complete = level.attach_to(root)
    if isinstance(domain.shard_by, ShardByKey) and domain.shard_by_part and not has_key(complete, domain.shard_by.key):
        position = domain.settings["shard_by"][0].position
        message = diagnostics.unused_shard_by_key(domain.shard_by.key, domain.name)
        domain.shard_by_part.found.warn(position, "unused-shard-key", message)
    return complete
