"""The error tree: each error knows its wire code, its HTTP status, and whether placing again may help.

Translated once at each edge (the gRPC codec, HTTP); scarcity is `None`, bugs are assertions, nothing is
swallowed.
"""

from __future__ import annotations

from typing import ClassVar

Details = dict[str, str | int | float | None]


class ServingError(Exception):
    """Anything that ends a request in a way the client must hear of.

    `details` holds small, printable facts (field names, limits, worker ids), never prompt content.
    """

    code: ClassVar[str] = "internal_error"
    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, **details: str | int | float | None) -> None:
        super().__init__(message)
        self.message = message
        self.details: Details = details

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.details))


def _rebuild(kind: type[ServingError], message: str, details: Details) -> ServingError:
    return kind(message, **details)


class RequestError(ServingError):
    """The client's fault; the same request will fail again."""

    code = "invalid_request_error"
    http_status = 400


class InvalidRequest(RequestError):
    """`details["param"]` names the field."""

    code = "invalid_value"


class ContextTooLong(RequestError):
    code = "context_length_exceeded"


class UnknownModel(RequestError):
    code = "model_not_found"
    http_status = 404


class UnknownWorker(RequestError):
    code = "unknown_worker"
    http_status = 404


class LastOfRole(RequestError):
    """The worker is the only one of its role; it leaves it only by force."""

    code = "last_of_role"
    http_status = 409


class Unauthorized(RequestError):
    """No API key, or none that is known here; never says which."""

    code = "invalid_api_key"
    http_status = 401


class Forbidden(RequestError):
    """The key is known, but not for this."""

    code = "forbidden"
    http_status = 403


class AdmissionError(ServingError):
    """Not now; `details["retry_after_s"]` says when."""

    code = "overloaded"
    http_status = 503
    retryable = True


class Overloaded(AdmissionError):
    code = "overloaded"
    http_status = 429


class QuotaExceeded(AdmissionError):
    code = "quota_exceeded"
    http_status = 429


class NoWorkerAvailable(AdmissionError):
    code = "no_worker_available"
    http_status = 503


class HandoffError(ServingError):
    """The move of a sequence between two workers failed; the router places again."""

    code = "handoff_failed"
    http_status = 503
    retryable = True


class ReservationRefused(HandoffError):
    """Decode has no room for the ticket: back-pressure, heard at once."""

    code = "reservation_refused"


class TransferTimeout(HandoffError):
    code = "transfer_timeout"


class TransferCorrupt(HandoffError):
    code = "transfer_corrupt"


class TicketExpired(HandoffError):
    code = "ticket_expired"


class StaleEpoch(HandoffError):
    """The message was meant for another incarnation of this worker."""

    code = "stale_epoch"


class LayoutMismatch(HandoffError):
    """Prefill and decode hold different models or block shapes; `details` name both sides."""

    code = "layout_mismatch"


class StagingLost(HandoffError):
    """The shared memory that a frame names is not there any more; its payload can be sent another way."""

    code = "staging_lost"


class WorkerError(ServingError):
    code = "worker_error"
    http_status = 503
    retryable = True


class WorkerLost(WorkerError):
    """The connection broke or the process died."""

    code = "worker_lost"


class Unauthenticated(WorkerError):
    """The caller did not show the receiver's cluster token: it belongs to another cluster, or to none."""

    code = "unauthenticated"


class WorkerDraining(WorkerError):
    """The worker takes no new work; what runs on it must move."""

    code = "worker_draining"


class WrongRole(WorkerError):
    """The worker runs the other phase at present."""

    code = "wrong_role"


class StepFailed(WorkerError):
    """A step of the engine raised; the sequences of that step are lost on this worker."""

    code = "step_failed"
    http_status = 500


class Cancelled(ServingError):
    code = "cancelled"
    http_status = 499


class DeadlineExceeded(ServingError):
    code = "deadline_exceeded"
    http_status = 504


class InvalidConfig(ServingError):
    """A setting or a checkpoint cannot be honoured; raised at start, names the key."""

    code = "invalid_config"


def _leaves(kind: type[ServingError]) -> list[type[ServingError]]:
    found = [kind]
    for child in kind.__subclasses__():
        found += _leaves(child)
    return found


def error_from_code(code: str, message: str, details: Details) -> ServingError:
    """The error that `code` names;

    An unknown code (a newer peer's) becomes a plain ServingError that keeps the text.
    """
    for kind in reversed(_leaves(ServingError)):
        if kind.__dict__.get("code") == code:
            return kind(message, **details)
    return ServingError(f"{code}: {message}", **details)
