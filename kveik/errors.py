"""Everything that can go wrong, drawn as one tree with two trunks.

KveikError
├── Refused            the caller's: nothing changed, the message names the number and the knob; HTTP 4xx
│   ├── BadValue           a parameter outside its range                               400
│   ├── PromptTooLong      more tokens than the context holds                          400 context_length_exceeded
│   ├── Unsupported        a model, tensor type or feature we do not have              400
│   ├── ModelBroken        weights missing, truncated or inconsistent                  400
│   ├── DoesNotFit         memory, context or blocks do not suffice                    400
│   ├── Unreachable        a download, folder or port that cannot be had               400
│   ├── NotAuthorized      a missing or wrong API key                                  401
│   ├── ModelNotFound      a name we do not serve                                      404 model_not_found
│   ├── BodyStalled        a request body that does not arrive                         408
│   ├── BodyTooLarge       more bytes than the server reads                            413
│   ├── WrongMediaType     a request body that is not plain JSON                       415
│   └── Overloaded         the queue is full, or the server is draining                429 / 503
└── Broken             ours: HTTP 5xx, logged with the plan that was running
    ├── NonFiniteLogits    the model produced NaN or Inf for one request                500 non_finite_logits
    ├── StepFailed         the step that computed the request failed as a whole         500 step_failed
    └── EngineStopped      a fault outside a step: nobody is served any more            500 engine_stopped

Caught in one place each: `kveik.cli.main` for the command line, `kveik.server.app` for HTTP, `kveik.engine.loop` for the step.
"""

from __future__ import annotations

from kveik.words import counted


class KveikError(Exception):
    """The root. `message` is safe to show to a client: no path of the server, no traceback, no echo of long input."""

    status: int = 500
    code: str | None = None
    """OpenAI's machine-readable code, where one exists."""

    param: str | None = None
    """The request field at fault, where one is."""

    @property
    def message(self) -> str:
        return str(self)


class Refused(KveikError):
    """The caller asked for something we do not do. Nothing changed."""

    status = 400


class BadValue(Refused):
    """A parameter is outside its range or of the wrong kind."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLong(Refused):
    """The prompt and the tokens asked for do not fit into the context."""

    code = "context_length_exceeded"

    def __init__(
        self,
        *,
        tokens: int,
        allowed: int,
        wanted: int | None = None,
        param: str = "prompt",
        at_least: bool = False,
        wanted_as: str = "max_tokens",
    ) -> None:
        """`at_least`: the prompt was given up before its last token was counted. `wanted_as`: the field that holds `wanted`."""
        asked = f"{'at least ' * at_least}{counted(tokens, 'prompt token')}" + (
            "" if wanted is None else f" and {wanted_as} {wanted}"
        )
        super().__init__(f"This server's context holds {counted(allowed, 'token')} (--max-model-len); the request has {asked}.")
        self.param = param


class Unsupported(Refused):
    """A model, tensor type or feature that we do not have. The message names it."""


class ModelBroken(Refused):
    """Weights or vocabulary are missing, truncated or contradict each other."""


class DoesNotFit(Refused):
    """Memory, context or blocks do not suffice. The message holds the arithmetic and what would work."""


class Unreachable(Refused):
    """A download, a folder or a port cannot be had."""


class NotAuthorized(Refused):
    """No API key, or a wrong one."""

    status = 401
    code = "invalid_api_key"


class ModelNotFound(Refused):
    """A model name that this server does not serve."""

    status = 404
    code = "model_not_found"

    def __init__(self, served: tuple[str, ...]) -> None:
        super().__init__(f"The model asked for is not served here; this server has: {', '.join(served)}.")
        self.param = "model"


class BodyTooLarge(Refused):
    """The request body has more bytes than the server reads."""

    status = 413

    def __init__(self, *, allowed: int) -> None:
        super().__init__(f"The request body is larger than {counted(allowed, 'byte')} (--max-body-bytes).")


class BodyStalled(Refused):
    """The request body did not arrive in time."""

    status = 408

    def __init__(self, *, seconds: float) -> None:
        super().__init__(f"The request body was not complete after {seconds:g} seconds.")


class WrongMediaType(Refused):
    """The request body is declared as something other than uncompressed UTF-8 JSON."""

    status = 415

    def __init__(self) -> None:
        super().__init__("The request body must be uncompressed JSON in UTF-8, sent as Content-Type: application/json.")


class Overloaded(Refused):
    """The queue is full (429) or the server is stopping (503). Worth trying again after `retry_after` seconds."""

    status = 429

    def __init__(self, message: str, *, retry_after: int = 1, status: int = 429) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.status = status


class Broken(KveikError):
    """Our fault. The message says what the caller may know; the log has the rest."""

    status = 500


class NonFiniteLogits(Broken):
    """The model produced NaN or Inf for one request; that request ends, the others go on."""

    code = "non_finite_logits"

    def __init__(self) -> None:
        super().__init__(
            "The model's logits were not finite (NaN or infinite) for this request, so that no token could be chosen; "
            "it was ended, others go on."
        )


class StepFailed(Broken):
    """The step failed as a whole; the sequences in it end, those that were not in it go on."""

    code = "step_failed"

    def __init__(self) -> None:
        super().__init__("The step that computed this request failed inside the engine, and it was ended; others go on.")


class EngineStopped(Broken):
    """A fault outside the model's step: the books may be wrong, so nobody is served on."""

    code = "engine_stopped"

    def __init__(self) -> None:
        super().__init__("The engine has stopped after a fault; the server must be started again.")
