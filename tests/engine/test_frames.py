"""Frames over a stream socket: whole, in order, whatever the kernel cuts; a peer that is gone harms nobody."""

import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from headrace.engine.frames import MAX_FRAME_BYTES, FrameError, FrameSocket


@contextmanager
def pair() -> Iterator[tuple[FrameSocket, FrameSocket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield FrameSocket(ours), FrameSocket(theirs)


def test_frames_arrive_whole_and_in_order_however_they_are_cut() -> None:
    chance = random.Random(1)
    sent = [chance.randbytes(chance.choice((0, 1, 7, 300, 70_000, 900_000))) for _ in range(60)]
    with pair() as (left, right):
        received: list[bytes] = []
        waited = 0
        for data in sent:
            left.send(data)
            waited += left.has_unsent
            if chance.random() < 0.3:
                received += right.receive()
        while left.has_unsent:
            received += right.receive()
            left.flush()
        received += right.receive()
        assert received == sent
        assert waited > 0, "the kernel took everything at once: the test shows nothing"


def test_a_frame_that_comes_byte_by_byte_is_one_frame() -> None:
    raw, end = socket.socketpair()
    with raw, end:
        frames = FrameSocket(end)
        for byte in b"\x05\x00\x00\x00hello\x00\x00\x00":
            assert frames.receive() == []
            raw.send(bytes([byte]))
            if byte == ord("o"):
                assert frames.receive() == [b"hello"]
        raw.send(b"\x00")
        assert frames.receive() == [b""]


def test_what_was_sent_before_the_end_still_arrives() -> None:
    with pair() as (left, right):
        left.send(b"unread by the one who leaves")
        right.send(b"last words")
        right.close()
        assert left.receive() == [b"last words"]
        assert left.is_closed or left.receive() == []
        assert left.is_closed


def test_sending_to_a_peer_that_is_gone_is_no_error_and_keeps_nothing() -> None:
    with pair() as (left, right):
        left.send(bytes(8 << 20))
        assert left.has_unsent
        right.close()
        left.flush()
        left.send(b"more")
        assert left.is_closed and not left.has_unsent


def test_a_length_that_no_message_has_is_refused() -> None:
    raw, end = socket.socketpair()
    with raw, end:
        raw.send((MAX_FRAME_BYTES + 1).to_bytes(4, "little"))
        with pytest.raises(FrameError):
            FrameSocket(end).receive()
