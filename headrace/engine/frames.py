"""FrameSocket: whole messages over one end of a connected stream socket. Never blocks, starts no thread.

    frame = length (4 bytes, little-endian), then so many bytes

What the kernel does not take at once waits here until `flush`; queues are bounded by admission (down) and by the tokens
of live requests (up). Knows no messages. A peer that is gone shows as `is_closed`; what is sent to it then is lost.
"""

import socket

_HEAD_BYTES = 4
_READ_BYTES = 1 << 18
MAX_FRAME_BYTES = 1 << 30


class FrameError(Exception):
    """The peer sent what is no frame."""


class FrameSocket:
    def __init__(self, end: socket.socket) -> None:
        """Takes the socket over."""
        end.setblocking(False)
        self._end = end
        self._partial = b""  # the beginning of a frame
        self._unsent = bytearray()
        self.is_closed = False  # by the peer

    def fileno(self) -> int:
        return self._end.fileno()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def send(self, data: bytes) -> None:
        frame = len(data).to_bytes(_HEAD_BYTES, "little") + data
        if self._unsent:
            self._unsent += frame
            self.flush()
            return
        sent = self._try_send(frame)
        if sent < len(frame) and not self.is_closed:
            self._unsent += frame[sent:]

    def flush(self) -> None:
        """Sends what waits, as far as the kernel takes it."""
        del self._unsent[: self._try_send(self._unsent)]
        if self.is_closed:
            self._unsent.clear()

    def receive(self) -> list[bytes]:
        """Every frame that has arrived whole. Raises FrameError."""
        data = self._partial + self._read()
        frames: list[bytes] = []
        at = 0
        while len(data) - at >= _HEAD_BYTES:
            length = int.from_bytes(data[at : at + _HEAD_BYTES], "little")
            if length > MAX_FRAME_BYTES:
                raise FrameError(f"a frame of {length} bytes")
            end = at + _HEAD_BYTES + length
            if end > len(data):
                break
            frames.append(data[at + _HEAD_BYTES : end])
            at = end
        self._partial = data[at:]
        return frames

    def close(self) -> None:
        self._end.close()

    def _read(self) -> bytes:
        parts: list[bytes] = []
        try:
            while part := self._end.recv(_READ_BYTES):
                parts.append(part)
                if len(part) < _READ_BYTES:
                    return b"".join(parts)
            self.is_closed = True
        except BlockingIOError:
            pass
        except ConnectionError:
            self.is_closed = True
        return b"".join(parts)

    def _try_send(self, data: bytes | bytearray) -> int:
        """Bytes that the kernel took."""
        try:
            return self._end.send(data)
        except BlockingIOError:
            return 0
        except ConnectionError:
            self.is_closed = True
            return 0
