"""What a generation can end with, apart from its tokens."""

from __future__ import annotations

from shared.errors import MeshError


class NotReady(MeshError):
    """No route covers the model: `no_route`. Asking again later may help."""


class AdmissionRefused(MeshError):
    """The mesh does not take the request, and nothing of it has run.

    `queue_full` and `queue_timeout`: it has no room now. `session_too_large`: it never has room for so much.
    `context_too_long`: no route takes so many positions. `sampling_unsupported`: no last hop does all that is asked
    for; `unsupported` in `fields` names what.

    Args:
        code: One of the above.
        message: One sentence for people.
        retry_after_s: When asking again is worth it; None when it never is.
        fields: The values behind the sentence.
    """

    def __init__(self, code: str, message: str, *, retry_after_s: int | None, **fields: object) -> None:
        super().__init__(code, message, **fields)
        self.retry_after_s = retry_after_s


class GenerationFailed(MeshError):
    """A generation that had begun cannot go on, and with it the other choices of its request.

    `node_lost`: no node came back for a range in time. `no_progress`: replay upon replay got no answer.
    `payload_too_large`: a step that no frame can hold. `no_route` and the codes of `AdmissionRefused`: the choices
    that were left when some had begun found no places. Anything else is the code with which a node kept
    refusing the step, for example ``bad_step`` or ``out_of_memory``.
    """
