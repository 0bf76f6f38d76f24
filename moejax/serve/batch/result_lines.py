"""Makes the output lines of a file job. Only `metrics` holds what cannot be reproduced."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from typing import Any

from moejax.requests.outputs import CompletionOutput, Logprob, RequestOutput
from moejax.serve.batch.lines import Line, result_key
from moejax.serve.batch.openai_fields import CHAT

LEAST_LOGPROB = -9999.0
"""The number that stands for −inf, which JSON does not have; vLLM's servers write it too."""


def success(
    line: Line, output: RequestOutput, model: str, job: Mapping[str, Any] | None = None
) -> bytes:
    """Makes the output line of a finished request.

    - `model`: echoed if an OpenAI line names none.
    - `job`: options to write with the line; one line of a run is enough.
    """
    if line.openai:
        response = {
            "status_code": 200,
            "request_id": line.request_id,
            "body": _openai_body(line, output, model),
        }
        record = _openai_record(line, response, None)
    else:
        record = {"id": line.id, "request_id": line.request_id}
        sequences = [_sequence(completion) for completion in output.outputs]
        if len(sequences) == 1:
            record |= sequences[0]
        else:
            record["outputs"] = [{"index": i, **s} for i, s in enumerate(sequences)]
        record |= prompt_logprobs_of(output) | {"usage": usage_of(output), "error": None}
    metrics = _metrics(output) | ({} if job is None else {"job": job})
    return _encode(record | {"metrics": metrics})


def failure(line: Line, message: str) -> bytes:
    """Makes the output line of a line that could not run."""
    error = {"code": "invalid_request", "message": message, "param": None, "line": line.number}
    if line.openai:
        body = {"error": {"type": "invalid_request_error", **error}}
        response = {"status_code": 400, "request_id": line.request_id, "body": body}
        return _encode(_openai_record(line, response, error))
    return _encode({"id": line.id, "request_id": line.request_id, "error": error})


def read_result(raw: bytes) -> tuple[str | int, bytes, bool]:
    """Returns (id, key, whether it is an error) of an output line.

    Raises ValueError for a line that neither success nor failure wrote.
    """
    record = json.loads(raw)
    try:
        openai = "custom_id" in record
        id = record["custom_id" if openai else "id"]
        request_id = record["response"]["request_id"] if openai else record["request_id"]
        return id, result_key(id, request_id), record["error"] is not None
    except (TypeError, KeyError):
        raise ValueError("not a result of moejax") from None


def _openai_record(line: Line, response: dict, error: dict | None) -> dict[str, Any]:
    name = hashlib.blake2b(json.dumps(line.id).encode(), digest_size=16).hexdigest()
    return {
        "id": f"batch_req_{name}",
        "custom_id": line.id,
        "response": response,
        "error": error,
    }


def _openai_body(line: Line, output: RequestOutput, model: str) -> dict[str, Any]:
    chat = line.url == CHAT
    digest = line.request_id.removeprefix("req_")
    usage = usage_of(output)
    top = None if line.request is None else line.request.sampling_params.logprobs
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{digest}",
        "object": "chat.completion" if chat else "text_completion",
        # Clients expect the field. The time itself is among the metrics.
        "created": 0,
        "model": line.model or model,
        "choices": [choice_of(completion, chat, top or 0) for completion in output.outputs],
        **prompt_logprobs_of(output),
        "usage": {**usage, "total_tokens": sum(usage.values())},
    }


def choice_of(completion: CompletionOutput, chat: bool, top: int) -> dict[str, Any]:
    """Makes OpenAI's choice of a chat or a completion.

    - `top`: number of likeliest tokens that were asked for.
    """
    logprobs = None
    if chat:
        content: dict[str, Any] = {"message": {"role": "assistant", "content": completion.text}}
        if completion.logprobs is not None:
            logprobs = _chat_logprobs(completion, top)
    else:
        content = {"text": completion.text}
        if completion.logprobs is not None:
            logprobs = _completion_logprobs(completion)
    return {
        "index": completion.index,
        **content,
        "logprobs": logprobs,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }


def _completion_logprobs(completion: CompletionOutput) -> dict[str, Any]:
    tokens, values, likeliest, offsets, offset = [], [], [], [], 0
    for token, found in zip(completion.token_ids, completion.logprobs or (), strict=True):
        tokens.append(_token_text(token, found[token]))
        values.append(_finite(found[token].logprob))
        likeliest.append({_token_text(t, e): _finite(e.logprob) for t, e in _sort_by_rank(found)})
        offsets.append(offset)
        offset += len(tokens[-1])
    return {
        "tokens": tokens,
        "token_logprobs": values,
        "top_logprobs": likeliest,
        "text_offset": offsets,
    }


def _chat_logprobs(completion: CompletionOutput, top: int) -> dict[str, Any]:
    """Makes the logprobs of a chat.

    - `top`: number of likeliest tokens that were asked for; the chosen token is not added to them.
    """

    def entry(token: int, found: Logprob) -> dict[str, Any]:
        text = _token_text(token, found)
        return {
            "token": text,
            "logprob": _finite(found.logprob),
            "bytes": list(text.encode()),
        }

    return {
        "content": [
            {
                **entry(token, found[token]),
                "top_logprobs": [entry(t, e) for t, e in _sort_by_rank(found)[:top]],
            }
            for token, found in zip(completion.token_ids, completion.logprobs or (), strict=True)
        ]
    }


def _sequence(completion: CompletionOutput) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
    if completion.logprobs is not None:
        fields["cumulative_logprob"] = _finite(completion.cumulative_logprob or 0.0)
        fields["logprobs"] = [_position(found) for found in completion.logprobs]
    return fields


def prompt_logprobs_of(output: RequestOutput) -> dict[str, Any]:
    """Returns prompt_logprobs with the prompt's ids, which say which entry belongs to
    which token."""
    found = output.prompt_logprobs
    if found is None:
        return {}
    return {
        "prompt_token_ids": output.prompt_token_ids,
        "prompt_logprobs": [None if each is None else _position(each) for each in found],
    }


def _position(found: Mapping[int, Logprob]) -> dict[str, Any]:
    return {
        str(token): {
            "logprob": _finite(entry.logprob),
            "rank": entry.rank,
            "decoded_token": entry.decoded_token,
        }
        for token, entry in _sort_by_rank(found)
    }


def _sort_by_rank(found: Mapping[int, Logprob]) -> list[tuple[int, Logprob]]:
    return sorted(found.items(), key=lambda item: (item[1].rank or 0, item[0]))


def _token_text(token: int, entry: Logprob) -> str:
    # vLLM's servers write a token so when there is no text of it.
    return f"token_id:{token}" if entry.decoded_token is None else entry.decoded_token


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def usage_of(output: RequestOutput) -> dict[str, int]:
    """Returns counts of tokens, under OpenAI's names."""
    return {
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": sum(len(c.token_ids) for c in output.outputs),
    }


def _metrics(output: RequestOutput) -> dict[str, Any]:
    times = output.metrics
    assert times.finished_s is not None
    return {
        "created": int(time.time()),
        "queue_s": _seconds(times.queue_s),
        "ttft_s": _seconds(times.ttft_s),
        "total_s": _seconds(times.finished_s - times.arrival_s),
        "cached_tokens": times.cached_tokens,
        "preemptions": times.preemptions,
        "recomputed": times.recomputed,
    }


def _seconds(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


def _encode(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, ensure_ascii=False, allow_nan=False).encode() + b"\n"
