"""Decoder of the Huffman code of header strings (RFC 7541, section 5.2 and appendix B), one byte at a time.

Between two bytes of encoded text, the decoder is at one of 256 nodes of the code tree. For each node, the characters
that every next byte completes and the node it leads to are computed on the first visit and looked up afterwards. Steps
of four bits could all be precomputed, but every string would then take twice as many of them.
"""

from __future__ import annotations

from collections import defaultdict

LENGTHS = (
    "ISXXXXXXXTZXXZXXXXXXXXZXXXXXXXXXBFFHIBDGFFDGDBBBAAABBBBBBBCDKBHFIBCCCCCCCCCCCCCCCCCCCCCCDCDIOIJB"
    "KABABABBBACCBBBABCBAABCCCCCKGJIXPRPPRRRSRSSSSSTSTTRSTSSSSQRSRSSTRQPRRSSQSRRTQRSSQQRQSRSSPRRRSRRS"
    "VVPORSRUVVVWWVTUOQVWWVWTQQVVXWWWPTPQRQQSRRUUTTVSVWVVWWWWWXWWWWWVZ"
)
"""Code lengths in bits of the 256 bytes and, last, of EOS, which is never sent: A is 5, Z is 30.

They define the whole code, because it is canonical: in ascending order, shorter codes come first and, among codes of
equal length, lower bytes.
"""

MAX_PADDING_BITS = 7


class HpackError(Exception):
    """A header block cannot be decoded. The connection must be closed (COMPRESSION_ERROR): the state for later blocks
    is lost."""


class HuffmanNode:
    """Node of the code tree: the root between two characters, any other node within a character."""

    __slots__ = ("may_end", "one", "steps", "zero")

    def __init__(self, zero: HuffmanNode | bytes, one: HuffmanNode | bytes) -> None:
        self.zero = zero  # the node that a 0 bit leads to, or the character that it completes
        self.one = one
        self.may_end = False  # the bits since the last character are valid padding
        self.steps: tuple[
            tuple[bytes, HuffmanNode], ...
        ] = ()  # for each next byte: the characters it completes, and the next node

    def expand(self) -> tuple[tuple[bytes, HuffmanNode], ...]:
        """Compute `steps`. Ordinary headers visit a quarter of all nodes, which takes 1.5 MB; all nodes take 5 MB."""
        steps: list[tuple[bytes, HuffmanNode]] = [(b"", self)]
        for _ in range(8):
            steps = [
                (text + then, ROOT) if isinstance(then, bytes) else (text, then)
                for text, node in steps
                for then in (node.zero, node.one)
            ]
        self.steps = tuple(steps)
        return self.steps


def _build_tree() -> HuffmanNode:
    dead_end = HuffmanNode(b"", b"")  # after EOS: a dead end, where no string may end
    dead_end.zero = dead_end.one = dead_end
    coded: defaultdict[int, list[HuffmanNode | bytes]] = defaultdict(list)
    for byte, letter in enumerate(LENGTHS):
        coded[ord(letter) - ord("A") + 5].append(bytes([byte]) if byte < 256 else dead_end)
    # Build from the leaves up. On each level, characters come before inner nodes, whose codes are longer.
    level: list[HuffmanNode | bytes] = []
    for bits in range(max(coded), 0, -1):
        level = coded[bits] + level
        level = [HuffmanNode(zero, one) for zero, one in zip(level[::2], level[1::2], strict=True)]
    root = node = level[0]
    for _ in range(MAX_PADDING_BITS + 1):
        assert isinstance(node, HuffmanNode)
        node.may_end, node = True, node.one  # padding consists of ones
    assert isinstance(root, HuffmanNode)
    return root


ROOT = _build_tree()


def decode(data: bytes) -> bytes:
    """Decode a string. Raises HpackError if it contains EOS, or does not end with valid padding (at most seven
    ones)."""
    node = ROOT
    texts = []
    for byte in data:
        try:
            text, node = node.steps[byte]
        except IndexError:  # first visit of this node
            text, node = node.expand()[byte]
        texts.append(text)
    if not node.may_end:
        raise HpackError("invalid padding of a Huffman string")
    return b"".join(texts)
