"""Redis's protocol as far as it is spoken here: words as bytes that are ready to be sent."""

from __future__ import annotations


def bulk(word: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(word), word)


def word_of(bulk_word: bytes) -> bytes:
    """The word that `bulk` was given."""
    return bulk_word[bulk_word.index(b"\n") + 1 : -2]


def command(*words: bytes) -> bytes:
    return b"*%d\r\n%s" % (len(words), b"".join(map(bulk, words)))
