"""The listening socket: bound before anything slow begins, so that a taken port is an error within milliseconds."""

import errno
import ipaddress
import socket

from headrace.base.errors import ConfigError

_BACKLOG = 2048


def listen(host: str, port: int, has_key: bool) -> socket.socket:
    """A bound, listening socket. Raises ConfigError naming the flag and the cure.

    Beyond loopback an API key is required: an open generation endpoint is found within hours.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(f"--host: {host!r} is no address of this machine: {error}") from error
    family, kind, protocol, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    if not has_key and not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
        raise ConfigError(
            f"--host {host} can be reached from other machines: set --api-key (or HEADRACE_API_KEY), "
            "or listen on 127.0.0.1"
        )
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(_explain(error, host, port)) from error
    return listener


def _explain(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use: choose another with --port, or --port 0 for a free one"
    if error.errno == errno.EACCES:
        return f"port {port} needs privileges: choose one above 1023 with --port"
    return f"cannot listen on {host} port {port}: {error.strerror or error}"


def url_of(listener: socket.socket) -> str:
    """Where a client on this machine reaches the listener."""
    address = listener.getsockname()
    host = ipaddress.ip_address(str(address[0]).partition("%")[0])
    if host.is_unspecified:
        host = ipaddress.ip_address("127.0.0.1" if host.version == 4 else "::1")
    return f"http://[{host}]:{address[1]}" if host.version == 6 else f"http://{host}:{address[1]}"
