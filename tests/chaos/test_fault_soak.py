"""A minute of random faults under steady load: nothing is lost, nothing leaks, and every policy is followed.

`make soak` runs the same for ten minutes, and on a cluster.
"""

from __future__ import annotations

import random

import pytest

from bench.fault_soak import print_report, soak

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(240)]


def test_a_minute_of_faults_loses_and_leaks_nothing() -> None:
    assert print_report(soak(60.0, seed=random.randrange(2**32))) == []


def test_half_a_minute_of_faults_on_a_cluster_loses_and_leaks_nothing() -> None:
    assert print_report(soak(40.0, seed=random.randrange(2**32), cluster=True)) == []
