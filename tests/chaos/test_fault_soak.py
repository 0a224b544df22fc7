"""A minute of every fault at random under steady load: nothing is lost, nothing leaks, and every policy is kept.

`make soak` does the same for ten minutes, and on a cluster.
"""

from __future__ import annotations

import random

import pytest

from bench.fault_soak import soak, tell

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(240)]


def test_a_minute_of_faults_loses_and_leaks_nothing() -> None:
    assert tell(soak(60.0, seed=random.randrange(2**32))) == []


def test_half_a_minute_of_faults_on_a_cluster_loses_and_leaks_nothing() -> None:
    assert tell(soak(40.0, seed=random.randrange(2**32), cluster=True)) == []
