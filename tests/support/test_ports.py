"""Ports for servers under test are not handed out twice."""

from __future__ import annotations

import socket
from contextlib import closing

import pytest

from tests.support.ports import BLOCKS, LOOPBACK, PortBlock


def test_two_processes_never_share_a_block() -> None:
    with closing(PortBlock()) as one, closing(PortBlock()) as other:
        assert not set(one.ports) & set(other.ports)


def test_port_is_reused_only_after_all_others() -> None:
    with closing(PortBlock()) as block:
        ports = [block.free_port() for _ in range(300)]

    assert len(set(ports)) == len(ports)


def test_port_in_use_is_left_out() -> None:
    with closing(PortBlock()) as block, socket.socket() as listener:
        in_use = block.free_port() + 1
        listener.bind((LOOPBACK, in_use))

        assert block.free_port() != in_use


def test_block_is_free_again_once_its_process_ends() -> None:
    with closing(PortBlock()) as block:
        ports = block.ports

    with closing(PortBlock()) as later:
        assert later.ports == ports


def test_too_many_processes_are_an_error() -> None:
    with closing(PortBlock()) as block:
        claimed = block.ports.start - 1

        with pytest.raises(RuntimeError, match="claimed"):
            PortBlock(range(claimed, claimed + 1, BLOCKS.step))
