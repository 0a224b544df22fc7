"""Stores: decide batches of plans. Counters exist only here."""
