"""The Huffman code of header strings (RFC 7541, section 5.2 and appendix B), read a byte at a time.

Between two bytes of coded text a reader stands at one of 256 nodes of the code's tree. What any next byte completes
from there, and where it leads, is worked out when somebody first comes there, and looked up from then on. Steps of four
bits could all be worked out beforehand, but there would be twice as many of them in every string.
"""

from __future__ import annotations

from collections import defaultdict

LENGTHS = (
    "ISXXXXXXXTZXXZXXXXXXXXZXXXXXXXXXBFFHIBDGFFDGDBBBAAABBBBBBBCDKBHFIBCCCCCCCCCCCCCCCCCCCCCCDCDIOIJB"
    "KABABABBBACCBBBABCBAABCCCCCKGJIXPRPPRRRSRSSSSSTSTTRSTSSSSQRSRSSTRQPRRSSQSRRTQRSSQQRQSRSSPRRRSRRS"
    "VVPORSRUVVVWWVTUOQVWWVWTQQVVXWWWPTPQRQQSRRUUTTVSVWVVWWWWWXWWWWWVZ"
)
"""How many bits each of the 256 bytes takes and, last, EOS, which stands for an end and is never sent: A is 5, Z is 30.
They say it all, since the code is canonical: counting upwards, shorter codes come first and, among equals, lower bytes.
"""

MOST_PADDING_BITS = 7


class HpackError(Exception):
    """A header block cannot be read. Its connection is lost (COMPRESSION_ERROR): the next one could mean anything."""


class Node:
    """Where a reader of bits may stand: at the root between two characters, elsewhere within one."""

    __slots__ = ("may_end", "one", "steps", "zero")

    def __init__(self, zero: Node | bytes, one: Node | bytes) -> None:
        self.zero = zero  # what the next bit leads to, or the character that it completes
        self.one = one
        self.may_end = False  # what was read since the last character is padding, if nothing follows
        self.steps: tuple[tuple[bytes, Node], ...] = ()  # of each byte: what it completes, and where it leads

    def explored(self) -> tuple[tuple[bytes, Node], ...]:
        """`steps`, from now on. Ordinary headers come to a quarter of all nodes, with 1.5 MB; all of them take 5 MB."""
        steps: list[tuple[bytes, Node]] = [(b"", self)]
        for _ in range(8):
            steps = [
                (text + then, ROOT) if isinstance(then, bytes) else (text, then)
                for text, node in steps
                for then in (node.zero, node.one)
            ]
        self.steps = tuple(steps)
        return self.steps


def _root() -> Node:
    lost = Node(b"", b"")  # after EOS: nothing leads out, and no string may end
    lost.zero = lost.one = lost
    coded: defaultdict[int, list[Node | bytes]] = defaultdict(list)
    for byte, letter in enumerate(LENGTHS):
        coded[ord(letter) - ord("A") + 5].append(bytes([byte]) if byte < 256 else lost)
    # From the leaves up. On each level, characters that end there come before nodes, whose codes are longer.
    level: list[Node | bytes] = []
    for bits in range(max(coded), 0, -1):
        level = coded[bits] + level
        level = [Node(zero, one) for zero, one in zip(level[::2], level[1::2], strict=True)]
    root = node = level[0]
    for _ in range(MOST_PADDING_BITS + 1):
        assert isinstance(node, Node)
        node.may_end, node = True, node.one  # padding is made of ones
    assert isinstance(root, Node)
    return root


ROOT = _root()


def decode(data: bytes) -> bytes:
    """The text. Raises HpackError if EOS is in it or its end is no padding: ones that make up a byte, at most seven."""
    node = ROOT
    texts = []
    for byte in data:
        try:
            text, node = node.steps[byte]
        except IndexError:  # nobody was here before
            text, node = node.explored()[byte]
        texts.append(text)
    if not node.may_end:
        raise HpackError("a Huffman string that does not end as it should")
    return b"".join(texts)
