"""Error classes, drawn as one tree with two trunks.

KveikError
├── Refused            the caller's fault: nothing changed, the message names number and setting; HTTP 4xx
│   ├── BadValue           a parameter outside its range                               400
│   ├── PromptTooLong      more tokens than the context holds                          400 context_length_exceeded
│   ├── Unsupported        a model, tensor type or feature that is not built           400
│   ├── ModelBroken        weights missing, truncated or inconsistent                  400
│   ├── DoesNotFit         memory, context or blocks do not suffice                    400
│   ├── Unreachable        a download, folder or port that is not available            400
│   ├── NotAuthorized      a missing or wrong API key                                  401
│   ├── ModelNotFound      a model name that this server does not serve                404 model_not_found
│   ├── BodyStalled        a request body that does not arrive                         408
│   ├── BodyTooLarge       more bytes than the server reads                            413
│   ├── WrongMediaType     a request body that is not plain JSON                       415
│   └── Overloaded         the queue is full, or the server is draining                429 / 503
└── Broken             the server's fault: HTTP 5xx, logged with the plan that was running
    ├── NonFiniteLogits    the model produced NaN or Inf for one request                500 non_finite_logits
    ├── StepFailed         the step that computed the request failed as a whole         500 step_failed
    └── EngineStopped      a fault outside a step: the engine accepts no more requests  500 engine_stopped

Caught in one place each: `kveik.cli.main` for the command line, `kveik.server.app` for HTTP, `kveik.engine.loop` for the step.
"""

from __future__ import annotations

from kveik.words import counted


class KveikError(Exception):
    """The root. `message` is safe to show to a client: no path of the server, no traceback, no echo of long input."""

    status: int = 500
    code: str | None = None
    """OpenAI's machine-readable code; None where OpenAI has none."""

    param: str | None = None
    """The request field at fault; None where no single field is."""

    @property
    def message(self) -> str:
        return str(self)


class Refused(KveikError):
    """The request cannot be served as it is. Nothing changed."""

    status = 400


class BadValue(Refused):
    """A parameter is outside its range or of the wrong kind."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLong(Refused):
    """The prompt and the requested tokens do not fit into the context.

    The sentences are OpenAI's: clients that shorten a prompt by themselves recognise the error by its text.
    """

    code = "context_length_exceeded"

    def __init__(
        self,
        *,
        tokens: int,
        allowed: int,
        wanted: int | None = None,
        prompt_field: str = "prompt",
        wanted_field: str = "max_tokens",
        at_least: bool = False,
    ) -> None:
        """`wanted`: new tokens, requested in `wanted_field`. `at_least`: `tokens` is a lower bound of the prompt's length."""
        place = "messages" if prompt_field == "messages" else "prompt"
        if wanted is None:
            what, shorter = f"your {place} resulted in {'at least ' * at_least}{counted(tokens, 'token')}", place
        else:
            what = f"you requested {counted(tokens + wanted, 'token')} ({tokens} in the {place}, {wanted} in the completion)"
            shorter = f"{place} or completion"
        super().__init__(
            f"This model's maximum context length is {counted(allowed, 'token')}. However, {what}. "
            f"Please reduce the length of the {shorter}, or start the server with a larger --max-model-len."
        )
        self.param = wanted_field if wanted is not None and tokens < allowed else prompt_field


class Unsupported(Refused):
    """A model, tensor type or feature that is not built. The message names it."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ModelBroken(Refused):
    """Weights or vocabulary are missing, truncated or contradict each other."""


class DoesNotFit(Refused):
    """Memory, context or blocks do not suffice. The message holds the arithmetic and what would work."""


class Unreachable(Refused):
    """A download, a folder or a port is not available."""


class NotAuthorized(Refused):
    """The API key is missing or wrong."""

    status = 401
    code = "invalid_api_key"


class ModelNotFound(Refused):
    """The server does not serve a model of this name."""

    status = 404
    code = "model_not_found"

    def __init__(self, served: tuple[str, ...]) -> None:
        super().__init__(f"The requested model does not exist on this server. Models served: {', '.join(served)}.")
        self.param = "model"


class BodyTooLarge(Refused):
    """The request body has more bytes than the server reads."""

    status = 413

    def __init__(self, *, allowed: int) -> None:
        super().__init__(f"The request body has more than {counted(allowed, 'byte')} (--max-body-bytes). Send a smaller one.")


class BodyStalled(Refused):
    """The request body did not arrive in time."""

    status = 408

    def __init__(self, *, seconds: float) -> None:
        super().__init__(f"The request body was not complete after {seconds:g} seconds (--stall-seconds). Send it again.")


class WrongMediaType(Refused):
    """The request body is declared as something other than uncompressed UTF-8 JSON."""

    status = 415

    def __init__(self) -> None:
        super().__init__("The request body must be uncompressed JSON in UTF-8, sent as Content-Type: application/json.")


class Overloaded(Refused):
    """The queue is full (429) or the server is stopping (503). The client may retry after `retry_after` seconds."""

    status = 429

    def __init__(self, message: str, *, retry_after: int = 1, status: int = 429) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.status = status


class Broken(KveikError):
    """The server is at fault. The message holds what is safe for the client; the log holds the rest."""

    status = 500


class NonFiniteLogits(Broken):
    """The model produced NaN or Inf for one request. That request ends; the others continue."""

    code = "non_finite_logits"

    def __init__(self) -> None:
        super().__init__(
            "The model's logits for this request are not finite (NaN or infinite). The request has ended; other requests "
            "continue. If this happens again, start the server with --dtype float32."
        )


class StepFailed(Broken):
    """The step failed as a whole. The sequences in it end; the others continue."""

    code = "step_failed"

    def __init__(self) -> None:
        super().__init__(
            "The step that computed this request failed inside the engine. The request has ended; other requests continue. "
            "Send it again; the server's log has the cause."
        )


class EngineStopped(Broken):
    """A fault outside the model's step: the engine's state may be wrong, so it accepts no more requests."""

    code = "engine_stopped"

    def __init__(self) -> None:
        super().__init__("The engine has stopped after a fault. Restart the server; its log has the cause.")
