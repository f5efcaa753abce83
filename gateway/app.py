"""The Litestar application: endpoints, and what every error looks like."""

from __future__ import annotations

from typing import Any

import structlog
from litestar import Litestar, Request, Response
from litestar.exceptions import HTTPException
from litestar.types import ControllerRouterHandler

from gateway.api.chat import create_chat_completion
from gateway.api.completions import create_completion
from gateway.api.embeddings import create_embeddings
from gateway.api.health import healthz, post_ping, readyz
from gateway.api.mesh import drain_node, get_mesh
from gateway.api.messages import count_message_tokens, create_message
from gateway.api.metrics import get_metrics
from gateway.api.model_files import get_model_file, list_model_files
from gateway.api.models import get_model, list_models
from gateway.api.responses import (
    Responses,
    cancel_response,
    compact_response,
    count_input_tokens,
    create_response,
    delete_response,
    get_response,
    list_input_items,
)
from gateway.api.tokenize import detokenize, get_tokenizer_info, tokenize
from gateway.api.version import get_version
from gateway.api_keys import ApiKeys
from gateway.cors import ANY_ORIGIN, CorsPolicy
from gateway.edge import Edge
from gateway.error_dialect import shape_error
from gateway.model_files import MODEL_FILES_PATH
from gateway.openai_errors import HTTP_INTERNAL_ERROR, ApiError, internal_error
from gateway.request_record import STATUS_CLIENT_LEFT, ClientLeft
from gateway.responses.store import ResponseStore
from gateway.state import GatewayState

log = structlog.get_logger(__name__)


ROUTES: list[ControllerRouterHandler] = [
    create_chat_completion,
    create_completion,
    create_embeddings,
    create_response,
    count_input_tokens,
    compact_response,
    get_response,
    delete_response,
    cancel_response,
    list_input_items,
    create_message,
    count_message_tokens,
    tokenize,
    detokenize,
    get_tokenizer_info,
    list_models,
    get_model,
    healthz,
    readyz,
    post_ping,
    get_version,
    get_mesh,
    list_model_files,
    get_model_file,
    drain_node,
    get_metrics,
]


def create_app(state: GatewayState) -> Litestar:
    """Build the application around one served model."""
    app = Litestar(
        route_handlers=ROUTES,
        exception_handlers={
            ApiError: _answer_api_error,
            HTTPException: _answer_http_exception,
            ClientLeft: _answer_nobody,
            Exception: _answer_unexpected,
        },
        openapi_config=None,
        logging_config=None,
    )
    app.state.gateway = state
    app.state.responses = Responses(ResponseStore(state.clock))
    origins = state.cors_origins or ([ANY_ORIGIN] if state.api_keys else [])
    has_mesh_token = state.model_files is not None and state.model_files.has_token
    api_keys = ApiKeys(
        state.api_keys,
        other_secrets=MODEL_FILES_PATH if has_mesh_token else None,
        mesh_tokens=state.mesh_tokens,
    )
    app.asgi_handler = Edge(app.asgi_handler, api_keys=api_keys, cors=CorsPolicy(origins), clock=state.clock)
    return app


def _answer_api_error(request: Request[Any, Any, Any], error: ApiError) -> Response[bytes]:
    record = request.scope["state"]["record"]
    record.fields["error"] = error.code
    status, body = shape_error(request.scope["path"], error, record.request_id)
    return Response(body, status_code=status, headers=error.headers, media_type="application/json")


def _answer_http_exception(request: Request[Any, Any, Any], error: HTTPException) -> Response[bytes]:
    """What Litestar itself refuses: unknown URLs and methods, and requests that are not HTTP as it should be."""
    method, path = request.scope["method"], request.scope["path"]
    match error.status_code:
        case 404:
            api_error = ApiError(404, f"Unknown request URL: {method} {path}.", code="unknown_url")
        case 405:
            api_error = ApiError(405, f"Not allowed to {method} on {path}.", code="method_not_allowed")
        case status if status < HTTP_INTERNAL_ERROR:
            api_error = ApiError(status, error.detail, code="bad_request")
        case _:
            return _answer_unexpected(request, error)
    api_error.headers.update(error.headers or {})
    return _answer_api_error(request, api_error)


def _answer_nobody(request: Request[Any, Any, Any], error: ClientLeft) -> Response[bytes]:
    request.scope["state"]["record"].fields["client_left"] = error.how
    return Response(b"", status_code=STATUS_CLIENT_LEFT)


def _answer_unexpected(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    record = request.scope["state"]["record"]
    log.error("request.crashed", request_id=record.request_id, exc_info=error)
    return _answer_api_error(request, internal_error())
