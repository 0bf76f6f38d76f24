"""Drafts by a smaller model, which an engine of its own runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moejax.engine.drafts import Drafts
from moejax.engine.loop import Engine
from moejax.errors import OutOfKV
from moejax.requests.request import Request
from moejax.requests.sampling_params import SamplingParams

DRAWN_BY = ("temperature", "top_k", "top_p", "min_p", "logit_bias", "allowed_token_ids")
"""Parameters by which both models choose a token."""


class ModelDrafts(Drafts):
    """Drafts by a smaller model with the same tokens.

    Each request is a session of the smaller model, so that a draft computes only what came since
    the draft before. It draws by the request's seed, which belongs to positions: where both models
    find the same tokens likely, they draw the same one.

    - `engine`: of the smaller model. Nothing else uses it.
    """

    method = "draft_model"

    def __init__(self, most: int, model: str, engine: Engine, *, adaptive: bool = True):
        super().__init__(most, adaptive=adaptive)
        self.model, self.engine = model, engine
        scheduler = engine.scheduler
        self._room = min(scheduler.max_model_len, scheduler.page.tokens(scheduler.arena.pages))
        """Most tokens of a sequence."""
        self._sessions: dict[Request, str] = {}

    def propose(self, asked: Mapping[Request, int], rows: int) -> dict[Request, list[int]]:
        for request in [r for r in self._sessions if r.finish_reason is not None]:
            self.engine.end_session(self._sessions.pop(request))
        drafts: dict[Request, Request] = {}
        share = -(-rows // max(len(asked), 1))  # what is drafted beyond it would cost steps
        try:
            for request, most in asked.items():
                tokens = self.histories.tokens(request)
                if (count := min(most, share, self._room - len(tokens))) < 1:
                    continue
                params = SamplingParams(
                    **{name: getattr(request.params, name) for name in DRAWN_BY},
                    seed=request.seed,
                    max_tokens=count,
                    ignore_eos=True,
                )
                name = self._sessions.setdefault(request, str(request.number))
                drafts[request] = self.engine.add(tokens.tolist(), params, session_id=name)
            while not self.engine.idle:
                self.engine.step()
        except BaseException as error:  # a turn left open would refuse the end of its session
            self.engine.abort(drafts.values())
            self.engine.drain()
            if not isinstance(error, OutOfKV):
                raise
            # Its sessions fill its KV: they begin anew, and this step has no drafts.
            while self._sessions:
                self.engine.end_session(self._sessions.popitem()[1])
            return {}
        return {request: draft.output for request, draft in drafts.items()}

    def stats(self) -> dict[str, Any]:
        return {"method": self.method, "model": self.model, **super().stats()}
