"""Errors as answers."""

from __future__ import annotations

from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from moejax.errors import UserError
from moejax.serve.engine_thread import EngineDeadError
from moejax.serve.http.openai_requests import Refusal

ERRORS = (Refusal, UserError, EngineDeadError, HTTPException, Exception)


def _status(error: Exception) -> int:
    if isinstance(error, Refusal):
        return error.status
    if isinstance(error, HTTPException):
        return error.status_code
    if isinstance(error, EngineDeadError):
        return 503
    return 400 if isinstance(error, UserError) else 500


def error_body(error: Exception) -> dict[str, Any]:
    status = _status(error)
    said = {
        "message": "the server failed; its log says why" if status == 500 else str(error),
        "type": "server_error" if status >= 500 else "invalid_request_error",
        "param": getattr(error, "param", None),
        "code": getattr(error, "code", None),
    }
    return {"error": said}


def error_response(error: Exception) -> Response:
    status = _status(error)
    # Clients of OpenAI wait so long and try again.
    later = {"Retry-After": "1"} if status == 503 and isinstance(error, Refusal) else None
    return JSONResponse(error_body(error), status, later)


async def answer_error(request: Request, error: Exception) -> Response:
    return error_response(error)


async def answer_nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=499)
