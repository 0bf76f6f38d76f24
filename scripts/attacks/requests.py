"""Hostile parameters and prompts through every way into the engine, beside known requests."""

from __future__ import annotations

import dataclasses
import random
from functools import partial
from typing import Any

import numpy as np

from moejax import RequestOutput, SamplingParams, UserError
from moejax.requests.request import GenerationRequest
from scripts.attacks.engine import PROMPTS, answer, check_answer, move_budget
from scripts.attacks.scene import Scene
from scripts.attacks.values import attacked, integer, nested, other, pick, plain, shown, text

WRONG_TYPE = (UserError, TypeError)
"""What a Python caller gets for a value of the wrong type."""

MOST_TOKENS = 1500
"""A request of more, over all its sequences, is work and not a fault; it runs with fewer."""


def hostile_params(scene: Scene) -> SamplingParams | None:
    """Parameters that were accepted; None: they were refused."""
    fields = attacked(scene.rng)
    names = ", ".join(f"{name}={shown(fields[name])}" for name in fields)
    made = scene.call(f"SamplingParams({names})", lambda: SamplingParams(**fields), WRONG_TYPE)
    if not isinstance(made, SamplingParams):
        return None
    most = made.max_tokens or MOST_TOKENS
    if made.n > 1 and made.n * most > MOST_TOKENS:
        made = dataclasses.replace(made, n=2, max_tokens=min(most, 100), min_tokens=0)
    return made


def attack_params(scene: Scene) -> None:
    """One to four requests with hostile parameters, two known ones beside them."""
    move_budget(scene)
    each = [hostile_params(scene) for _ in range(scene.rng.randrange(1, 5))]
    wrong = [(pick(scene.rng, PROMPTS), params) for params in each if params is not None]
    if scene.rng.random() < 0.6:
        _stream_of_requests(scene, [(p, q, None, 0) for p, q in wrong])
    else:
        _at_once(scene, wrong)


def _at_once(scene: Scene, wrong: list[tuple[Any, SamplingParams]]) -> None:
    """All in one LLM.generate, which takes all or none, or the first of them otherwise."""
    llm, known = scene.llm, scene.known
    which = known.sample(scene.rng, 2)
    prompts = [known.prompts[i] for i in which] + [p for p, _ in wrong]
    params = [known.params[i] for i in which] + [q for _, q in wrong]
    if wrong and scene.rng.random() < 0.4:
        (prompt, one), *_ = wrong
        way = pick(scene.rng, ("stream", "generate"))
        if way == "stream":
            scene.call("stream", lambda: list(llm.stream(prompt, one)))
        else:
            scene.call("generate", lambda: llm.generate(prompt, one))
        return
    outputs = scene.call("generate of several", lambda: llm.generate(prompts, params))
    if isinstance(outputs, list):
        if len(outputs) != len(prompts):
            scene.fault("lost", f"{len(outputs)} outputs of {len(prompts)} prompts")
        for i, output in zip(which, outputs, strict=False):
            check_answer(scene, i, output, "generate")
        _check_alone(scene, list(zip(prompts, params, outputs, strict=False))[len(which) :])


def _check_alone(scene: Scene, ran: list[tuple[Any, SamplingParams, RequestOutput]]) -> None:
    """One of the requests that ran gives the same alone."""
    ran = [each for each in ran if each[1].seed is not None and each[1].n == 1]
    if not ran:
        return
    prompt, params, output = pick(scene.rng, ran)
    again = scene.call("the same alone", lambda: scene.llm.generate([prompt], [params]))
    if not isinstance(again, list):
        return
    (alone,) = again
    same = output.outputs[0].token_ids == alone.outputs[0].token_ids
    if same and params.logprobs is not None:
        same = answer(output) == answer(alone)
    if not same or output.outputs[0].text != alone.outputs[0].text:
        scene.fault("bits", f"{params!r:.300}: other tokens than alone")


def _stream_of_requests(scene: Scene, wrong: list[tuple[Any, SamplingParams, Any, Any]]) -> None:
    """LLM.generate_each: every request has one result or one error, whatever the others are."""
    known, rng = scene.known, scene.rng
    asked = [
        GenerationRequest(known.prompts[i], known.params[i], tag=("known", i))
        for i in known.sample(rng, 2)
    ]
    for n, (prompt, params, session, priority) in enumerate(wrong):
        request = partial(
            *(GenerationRequest, prompt, params),
            session_id=session,
            priority=priority,
            tag=("wrong", n),
        )
        made = scene.call("GenerationRequest", request, WRONG_TYPE)
        if isinstance(made, GenerationRequest):
            asked.append(made)
    rng.shuffle(asked)

    def run() -> list[tuple[GenerationRequest, RequestOutput | UserError]]:
        most = pick(rng, (None, 1, 3))
        return list(scene.llm.generate_each(iter(asked), max_in_flight=most))

    found = scene.call("generate_each", run)
    if not isinstance(found, list):
        return  # its error is a fault already, or it is a UserError of the iterator itself
    tags = [request.tag for request, _ in found]
    if sorted(map(str, tags)) != sorted(str(request.tag) for request in asked):
        scene.fault("lost", f"generate_each: {len(found)} results of {len(asked)} requests")
    ran = []
    for request, output in found:
        kind, i = request.tag
        if kind == "known":
            check_answer(scene, i, output, "generate_each")
        elif isinstance(output, RequestOutput) and request.session_id is None:
            ran.append((request.prompt, request.sampling_params, output))
    _check_alone(scene, ran)


# ---- prompts

BASES = (" ", "a", "\0", "é", "ab ", "\n", "😀", "\u200d", "9", "\ufffd")


def hostile_text(rng: random.Random) -> str:
    """Text that is long, of one character, or no text that UTF-8 can write."""
    draw = rng.random()
    if draw < 0.4:
        return text(rng)
    length = pick(rng, (100, 1000, 30_000, 300_000, 5_000_000, 10_000_000))
    base = pick(rng, BASES)
    return base * (length // len(base.encode())) + pick(rng, ("x", "", "\ud800"))


def hostile_ids(rng: random.Random) -> Any:
    """Token ids that are none, or too many."""
    draw = rng.random()
    if draw < 0.5:
        return [pick(rng, (rng.randrange(4096), integer(rng))) for _ in range(rng.randrange(6))]
    choices = (
        *([], [True], [1.5], [None], ["1"], [[1]], nested(50_000), range(10**8), [0] * 1_000_000),
        *(np.zeros(3), np.arange(4), np.arange(10**7), np.zeros((2, 2), int), {1, 2}, b"abc"),
    )
    return pick(rng, choices)


def hostile_messages(rng: random.Random) -> Any:
    roles = ("user", "system", "", "\0", "nobody", 5, None, "assistant" * 10_000)
    return pick(
        rng,
        (
            other(rng),
            [],
            [{}],
            [{"role": pick(rng, roles), "content": hostile_text(rng)}],
            [{"role": "user", "content": other(rng)}],
            [{"role": "user", "content": "x"}] * 20_000,
            [{"role": "user", "content": nested(5000), "tool_calls": nested(10)}],
            nested(100),
        ),
    )


def hostile_prompt(rng: random.Random) -> Any:
    draw = rng.random()
    if draw < 0.45:
        return hostile_text(rng)
    if draw < 0.65:
        return hostile_ids(rng)
    if draw < 0.75:
        return other(rng)
    keys = ("prompt", "prompt_token_ids", "messages", "multi_modal_data")
    makers = (hostile_text, hostile_ids, hostile_messages, other)
    return {pick(rng, keys): pick(rng, makers)(rng) for _ in range(rng.randrange(3))}


def attack_prompts(scene: Scene) -> None:
    """Hostile prompts, sessions and priorities, with parameters that run."""
    move_budget(scene)
    rng, llm = scene.rng, scene.llm
    wrong = [
        (
            hostile_prompt(rng),
            SamplingParams(**plain(rng)),
            pick(rng, (None, None, None, "s", "", "\0", other(rng))),
            pick(rng, (0, 0, 0, integer(rng), other(rng))),
        )
        for _ in range(rng.randrange(1, 4))
    ]
    prompt, params, session, priority = wrong[0]
    way = pick(rng, ("each", "each", "generate", "stream", "chat", "score"))
    if way == "each":
        _stream_of_requests(scene, wrong)
    elif way == "generate":
        scene.call(
            "generate",
            lambda: llm.generate(prompt, params, session_id=session, priority=priority),
            WRONG_TYPE,
        )
    elif way == "stream":
        scene.call("stream", lambda: list(llm.stream(prompt, params)), WRONG_TYPE)
    elif way == "chat":
        messages = hostile_messages(rng)
        scene.call("chat", lambda: llm.chat(messages, params), WRONG_TYPE)
    else:
        ids = hostile_ids(rng)
        scene.call("score", lambda: llm.score(ids), WRONG_TYPE)
