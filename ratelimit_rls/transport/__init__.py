"""Bytes in, bytes out: the doors through which requests come. Nothing here decides anything."""
