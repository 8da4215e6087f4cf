"""What systemd is told of the service's state, if it asked: one datagram on its notification socket."""

import socket
from contextlib import suppress


def notify(path: str, state: str) -> None:
    """Sends `state` ("READY=1", "STOPPING=1", ...) to the socket at `path`; `@` begins an abstract name."""
    if not path:
        return
    address = "\0" + path[1:] if path.startswith("@") else path
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        sender.connect(address)
        sender.sendall(state.encode())
