"""Tests and simulations of rules: test files and replayed traffic, on a virtual clock."""
