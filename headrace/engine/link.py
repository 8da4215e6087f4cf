"""What both ends of the link between the API process and the engine process agree on, apart from the messages.

stdin of the child    one line of JSON, the Job; its end of file tells the child that the parent is gone
life pipe             the child writes beats; its end of file tells the parent that the child is gone
ipc socket            messages.ToEngine down, messages.FromEngine up, as msgpack
"""

import msgspec
import zmq

from headrace.base.config import Config

BEAT_BYTES = 8  # one beat: for how many ns the step that is running has been running, little-endian; 0 between steps


class Job(msgspec.Struct, frozen=True):
    """What an engine process is told to run."""

    config: Config
    model_path: str
    epoch: int
    beat_s: float  # between two beats


def open_socket(context: "zmq.Context[zmq.Socket[bytes]]") -> "zmq.Socket[bytes]":
    """A socket of either end. Queues are bounded by admission (down) and by the tokens of live requests (up)."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    return socket
