"""Codecs: messages of each API to requests, and decisions to responses. No I/O."""
