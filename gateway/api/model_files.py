"""``GET /mesh/models/{fingerprint}`` and files below it: the served model, for nodes that have no copy of their own."""

from __future__ import annotations

from litestar import Request, Response, get
from litestar.datastructures import State
from litestar.params import FromPath
from litestar.types import ASGIApp

from gateway.file_response import FileResponse
from gateway.model_files import MODEL_FILES_PATH, ModelFiles
from gateway.openai_errors import ApiError, json_bytes
from gateway.state import GatewayState


@get(f"{MODEL_FILES_PATH}/{{fingerprint:str}}")
async def list_model_files(request: Request[None, None, State], fingerprint: FromPath[str]) -> Response[bytes]:
    """Names, sizes and hashes."""
    files = _admit(request, fingerprint)
    headers = {"etag": files.etag}
    return Response(json_bytes(files.listing()), media_type="application/json", headers=headers)


@get(f"{MODEL_FILES_PATH}/{{fingerprint:str}}/{{file:str}}")
async def get_model_file(
    request: Request[None, None, State], fingerprint: FromPath[str], file: FromPath[str]
) -> ASGIApp:
    """One file, or the range of it that is asked for."""
    files = _admit(request, fingerprint)
    gateway: GatewayState = request.app.state.gateway
    return FileResponse(
        files,
        files.find(file),
        request.headers.get("range"),
        is_head=request.scope["state"]["is_head"],
        stall_s=gateway.stream_limits.stall_s,
    )


def _admit(request: Request[None, None, State], fingerprint: FromPath[str]) -> ModelFiles:
    """The files, for callers who may read them.

    Raises:
        ApiError: 401 without the mesh token, 404 where there are no such files.
    """
    gateway: GatewayState = request.app.state.gateway
    files = gateway.model_files
    if files is None:
        message = "This gateway has no copy of the model's weights: nodes fetch them from the hub, by the model's name."
        raise ApiError(404, message, code="no_model_files")
    files.check_token(request.scope["path"], dict(request.scope["headers"]))
    files.check_fingerprint(fingerprint)
    return files
