"""API keys: deny by default on every path but the three probes.

Decides on `scope["path"]`, the path that the router matches, never on a URL put together from headers.
"""

import hashlib
import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.base.errors import AuthenticationError

OPEN_PATHS = frozenset({"/livez", "/readyz", "/health"})


def parse_keys(text: str) -> tuple[str, ...]:
    """The keys of `Config.api_key`: separated by commas, blanks around them dropped."""
    return tuple(key.strip() for key in text.split(",") if key.strip())


class Auth:
    """ASGI middleware. Without keys it lets everything pass.

    Each key is a tenant: its prefix-cache salt goes to `scope["state"]["cache_salt"]`, so that one tenant cannot find
    out by timing what another has asked. With a single key there is one tenant, and no salt.
    """

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self.app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]
        self._salts = [digest.hex()[:16] if len(keys) > 1 else "" for digest in self._digests]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._digests and scope["type"] in ("http", "websocket") and scope["path"] not in OPEN_PATHS:
            tenant = self._tenant(Headers(scope=scope))
            scope.setdefault("state", {})["cache_salt"] = self._salts[tenant]
        await self.app(scope, receive, send)

    def _tenant(self, headers: Headers) -> int:
        """Index of the key that the request carries. Raises AuthenticationError."""
        given = _bearer(headers.get("authorization", "")) or headers.get("x-api-key", "")
        if not given:
            message = "No API key given: send it as 'Authorization: Bearer KEY'"
            raise AuthenticationError(message, code="missing_api_key")
        digest = hashlib.sha256(given.encode("latin-1")).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]  # all of them: no early exit to time
        if True not in matches:
            raise AuthenticationError("The API key is wrong", code="invalid_api_key")
        return matches.index(True)


def _bearer(header: str) -> str:
    scheme, _, key = header.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""
