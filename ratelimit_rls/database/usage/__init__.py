"""Recorded decisions and usage: written in the background, rolled up, queried, archived and deleted."""
