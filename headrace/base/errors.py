"""The typed errors of Headrace. Each names the cause and, where there is one, the cure.

Errors have three sizes: one request, one step, the engine. The smaller never becomes the larger: code that serves one
request raises a `RequestError`; only `EngineDeadError` means that the engine itself is gone.
"""


class HeadraceError(Exception):
    """Base of every error that Headrace raises on purpose."""


class ConfigError(HeadraceError):
    """A flag, environment variable or TOML key is unknown or has a bad value."""


class ModelFileError(HeadraceError):
    """A model file is corrupt or unsupported. Names the file and the field that is wrong."""

    def __init__(self, path: object, field: str, problem: str) -> None:
        super().__init__(f"{path}: {field}: {problem}")
        self.path = str(path)
        self.field = field
        self.problem = problem


class ExportError(HeadraceError):
    """A model cannot be written: the file exists, there is no room, or the format cannot express the model."""


class ModelNotFoundError(HeadraceError):
    """MODEL is neither a path, a catalog name nor a reachable hub id. Names the nearest known one."""


class FetchError(HeadraceError):
    """A download failed or did not match its pinned checksum."""


class ModelTooLargeError(HeadraceError):
    """The model or its KV cache does not fit in the memory that the machine or cgroup grants. Says what would fit."""


class RequestError(HeadraceError):
    """One request is wrong or cannot be served. Carries what the HTTP surfaces need to answer."""

    status = 400
    type = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class ContextLengthError(RequestError):
    """Prompt (plus requested output) does not fit in the context. The message holds both numbers."""


class NotFoundError(RequestError):
    """The named model or resource does not exist here."""

    status = 404


class AuthenticationError(RequestError):
    """Missing or wrong API key."""

    status = 401
    type = "authentication_error"


class OverloadedError(RequestError):
    """The whole system is full. `retry_after` is in seconds."""

    status = 503
    type = "overloaded_error"

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message, code="overloaded")
        self.retry_after = retry_after


class EngineDeadError(RequestError):
    """The engine process died or is restarting; the request was not completed."""

    status = 503
    type = "server_error"


class RequestFailedError(RequestError):
    """The engine could not finish this one request (for example: non-finite logits)."""

    status = 500
    type = "server_error"
