"""Documents to the tree: what the rules mean, or every reason why they mean nothing.

Sources are taken in the order of their ranks, the strongest first, and within one rank in that of their names, so that
the order of wildcards, which decides between them, does not hang on the file system. What a stronger source says of a
descriptor (descriptor.py), or of a whole domain, counts; what a weaker one says of it is left out with a warning.
Either everything compiles or nothing does.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from ratelimit_rls.core.attributes import AttributeMapping
from ratelimit_rls.core.identity import IdentityTerms
from ratelimit_rls.core.keys import ShardBy
from ratelimit_rls.core.model import Charge, OnStoreFailure, Position
from ratelimit_rls.core.style import PLAIN, AnswerStyle, Deny
from ratelimit_rls.core.tree import Node, Tree
from ratelimit_rls.errors import Problem, RulesError
from ratelimit_rls.rules import lint, offences
from ratelimit_rls.rules.answer import compile_style
from ratelimit_rls.rules.deny import compile_deny
from ratelimit_rls.rules.descriptor import OVERRIDDEN, Level, Origin, add_descriptors
from ratelimit_rls.rules.document import Document, read_document
from ratelimit_rls.rules.ext_authz import compile_mapping
from ratelimit_rls.rules.grammar import DESCRIPTOR_KEYS, Findings
from ratelimit_rls.rules.identity import compile_identity
from ratelimit_rls.rules.load import Source, load, second_document
from ratelimit_rls.rules.node import YamlNode
from ratelimit_rls.rules.rule import Inherited
from ratelimit_rls.rules.targeted_mapping import MOST_SHAPES, Shape, completed, shapes
from ratelimit_rls.rules.targeting import is_targeted, targeted
from ratelimit_rls.rules.word import Words, read_word
from ratelimit_rls.rules.written import Written

UNREAD = "unread"


@dataclass(frozen=True, slots=True)
class Compiled:
    tree: Tree
    warnings: tuple[Problem, ...]  # sorted by place
    digest: str
    sources: tuple[str, ...]  # their names, in the order they were taken
    ext_authz: Mapping[str, YamlNode]  # by domain, as written: for whoever writes rules back
    identity: Mapping[str, YamlNode]  # likewise

    @property
    def files(self) -> int:
        return len(self.sources)


@contextmanager
def _collector_at_rest() -> Iterator[None]:
    """Rules that are being read are a growing heap without cycles: to walk over it again and again is a quarter of all
    the time it takes. The collector rests for the whole process, in which calls make no cycles either."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@_collector_at_rest()
def compile_documents(
    files: Mapping[str, bytes] | Sequence[Source], *, merge_domains: bool = False, default_admitted: bool = False
) -> Compiled:
    """The tree that `files` describe; raises RulesError with every error of every file.

    `merge_domains`: whether several files may describe one domain; stored rules may in any case. `default_admitted` is
    what rules in the reference's grammar alone are charged by, where nothing else says it.
    """
    if isinstance(files, Mapping):
        files = [Source(name, content) for name, content in files.items()]
    sources = in_order(files)
    errors: list[Problem] = []
    parts: list[_Part] = []
    for source in sources:
        found = Findings(source.name, first_line=source.lines_above + 1)
        try:
            parts.append(_read(source, found))
        except RulesError as error:
            errors.extend(error.problems)
    default = Charge.ADMITTED if default_admitted else Charge.ALWAYS
    domains = _domains(parts, merge_domains)
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
    return Compiled(
        tree,
        tuple(sorted(warnings)),
        digest(sources),
        tuple(source.name for source in sources),
        {name: written.value for name, written in mappings.items()},
        {domain.name: written.value for domain in domains if (written := domain.block("identity")) is not None},
    )


def in_order(sources: Iterable[Source]) -> list[Source]:
    """The strongest first."""
    return sorted(sources, key=lambda source: (source.rank, source.name))


def digest(sources: Iterable[Source]) -> str:
    """Of what the sources say, in order, not of where they lie: equal on every replica with equal rules."""
    whole = hashlib.sha256()
    for source in sources:
        whole.update(b"%d:" % len(source.content))
        whole.update(source.content)
        if source.is_stored:
            whole.update(repr((source.rank, source.targeting)).encode())
    return whole.hexdigest()


@dataclass(frozen=True, slots=True)
class _Part:
    document: Document
    origin: Origin
    shapes: frozenset[Shape]  # of descriptors that must be made of every request

    @property
    def found(self) -> Findings:
        return self.origin.found


def _read(source: Source, found: Findings) -> _Part:
    """Raises RulesError where it cannot be read at all."""
    root = load(source)
    _check_rest(source, found)
    origin = Origin(found, source.rank, source.is_stored)
    if source.targeting is None:
        return _Part(read_document(root, found), origin, frozenset())
    document = read_document(targeted(root, source.targeting, found), found)
    wanted = frozenset(shapes(document) if is_targeted(root, source.targeting) else ())
    return _Part(document, origin, wanted)


def _check_rest(source: Source, found: Findings) -> None:
    """The reference reads the first document of a file and no other, and so do we, but not without a word. Nobody has
    stored a rule for the reference to read: there, what nobody would read is refused."""
    second = second_document(source)
    if second is None:
        return
    if source.is_stored:
        found.error(second, offences.second_document())
    else:
        found.warn(second, UNREAD, offences.unread_document())


@dataclass(slots=True)
class _Domain:
    """One domain with the sources that describe it, the strongest first."""

    name: str
    position: Position
    parts: list[_Part] = field(default_factory=list)
    # `charge` and the like, `answer` and the like, as first written, with the rank of whoever wrote it
    words: dict[str, tuple[Written[str], int]] = field(default_factory=dict)
    blocks: dict[str, tuple[Written[YamlNode], int]] = field(default_factory=dict)
    charge: Charge | None = None
    on_store_failure: OnStoreFailure | None = None
    shard_by: ShardBy | None = None
    style: AnswerStyle = PLAIN
    deny: Deny | None = None
    mapping: AttributeMapping | None = None
    identity: IdentityTerms | None = None

    def add(self, part: _Part) -> None:
        """What is said of the whole domain is read wherever it stands, and counts where it stands first."""
        self.parts.append(part)
        document, found = part.document, part.found
        self.charge = self._word("charge", document.charge, Charge, part, self.charge)
        self.on_store_failure = self._word(
            "on_store_failure", document.on_store_failure, OnStoreFailure, part, self.on_store_failure
        )
        self.shard_by = self._word("shard_by", document.shard_by, ShardBy, part, self.shard_by)
        style, deny = compile_style(document.answer, found), compile_deny(document.deny, found)
        mapping = compile_mapping(document.ext_authz.value, found) if document.ext_authz else None
        identity = compile_identity(document.identity.value, found) if document.identity else None
        if self._is_first("answer", document.answer, part) and style is not None:
            self.style = style
        if self._is_first("deny", document.deny, part):
            self.deny = deny
        if self._is_first("ext_authz", document.ext_authz, part):
            self.mapping = mapping
        if self._is_first("identity", document.identity, part):
            self.identity = identity

    def taken(self, part: _Part) -> Position | None:
        """Where a file describes it already, if `part` is a file, too."""
        if part.origin.is_stored:
            return None
        others = (other.document.domain for other in self.parts if not other.origin.is_stored)
        return next((domain.position for domain in others if domain is not None), None)

    def block(self, key: str) -> Written[YamlNode] | None:
        return self.blocks[key][0] if key in self.blocks else None

    def completed_mapping(self) -> AttributeMapping | None:
        """With what stored rules need. What exceeds the bound is told of the source that exceeds it.

        Where callers are to prove who they are there is always one, if only to ask them for it.
        """
        wanted: set[Shape] = set()
        for part in self.parts:
            wanted |= part.shapes
            if part.shapes and len(wanted) > MOST_SHAPES:
                part.found.error(part.document.position, offences.too_many_shapes(self.name, MOST_SHAPES))
                return self.mapping
        must_prove = self.identity is not None and self.identity.places
        return completed(self.mapping or (AttributeMapping.of(()) if must_prove else None), wanted)

    def _word(
        self, key: str, written: Written[str] | None, words: type[Words], part: _Part, known: Words | None
    ) -> Words | None:
        """Sources may repeat it; of one rank, they must not differ in it."""
        if written is not None:
            first, rank = self.words.setdefault(key, (written, part.origin.rank))
            if first.value != written.value:
                if rank == part.origin.rank:
                    of_rules = key in DESCRIPTOR_KEYS
                    message = offences.word_conflict(key, self.name, first.position, of_rules=of_rules)
                    part.found.error(written.position, message)
                else:
                    self._warn(key, written.position, first.position, part)
        read = read_word(key, written, words, part.found)
        return known or read

    def _is_first(self, key: str, written: Written[YamlNode] | None, part: _Part) -> bool:
        if written is None:
            return False
        first, rank = self.blocks.setdefault(key, (written, part.origin.rank))
        if first is not written:
            if rank == part.origin.rank:
                part.found.error(written.position, offences.said_twice(key, self.name, first.position))
            else:
                self._warn(key, written.position, first.position, part)
        return first is written

    def _warn(self, key: str, at: Position, by: Position, part: _Part) -> None:
        part.found.warn(at, OVERRIDDEN, offences.overridden_of_domain(key, self.name, by))


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
        elif domain is not None and not merge_domains and (first := domain.taken(part)) is not None:
            part.found.error(position, offences.duplicate_domain(name, first))
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
        add_descriptors(level, domain.name, part.document.descriptors, part.origin, inherited)
    root = Node(
        domain.name,
        position=domain.position,
        style=domain.style,
        deny=domain.deny,
        on_store_failure=domain.on_store_failure,
        shard_by=domain.shard_by or ShardBy.DESCRIPTOR,
    )
    return level.under(root)
