"""A file job: reads lines, generates, appends results, and continues where an earlier process
ended."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import IO, Any, Literal, Protocol

from moejax.errors import UserError, as_user_error, shown
from moejax.progress import count_progress
from moejax.requests.outputs import RequestOutput
from moejax.requests.request import GenerationRequest
from moejax.requests.sampling_params import SamplingParams
from moejax.serve.batch.lines import MOST_LINE, Line, read_lines
from moejax.serve.batch.result_file import ResultFile, open_results
from moejax.serve.batch.result_lines import failure, success

CHOSEN = "chosen"
"""Name of OpenJob.chosen beside the options of a result."""

MOST_MESSAGE = 500
"""Most characters of the message about a bad line, which may quote the line."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A file job's input, output and options."""

    input: str
    """File of JSON lines; `-` is standard input."""
    output: str
    """File of JSON lines to append to; `-` is standard output."""
    model: str = "demo"
    dtype: str = "auto"
    decided_by: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Value of each option that decides bits, and fingerprint of each file (weights, tokenizer)."""
    sampling: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """SamplingParams fields of lines that do not have these fields."""
    seed: int = 0
    """Seed from which lines without a seed get theirs, together with their ids."""
    on_error: Literal["fail", "skip"] = "fail"
    """What a bad line does: "fail" ends the job after the lines before it; "skip" writes an error
    as its result."""
    overwrite: bool = False
    """Whether to start again if the output has results."""

    @property
    def options(self) -> dict[str, Any]:
        """What decides results besides the lines, by name."""
        # One name for a directory, however it is written.
        model = os.path.realpath(self.model) if os.path.isdir(self.model) else self.model
        given = {"model": model, "dtype": self.dtype, "seed": self.seed}
        return {**given, **self.decided_by, **self.sampling}

    @property
    def made_with(self) -> tuple[str, ...]:
        """The part of `options` that all lines share. It leaves out the model's directory, which
        may be moved."""
        named = () if "weights" in self.decided_by else (self.options["model"],)
        return *named, self.dtype, json.dumps(self.decided_by, sort_keys=True, default=str)


def list_given_fields(params: SamplingParams) -> dict[str, Any]:
    """Returns the given fields that differ from their defaults, except the seed. So a new field of
    a later release does not invalidate the results of this one."""
    usual = vars(SamplingParams())
    given = vars(params).items()
    return {name: v for name, v in given if name != "seed" and v != usual[name]}


class JobInput:
    """A job's input: an open file, standard input or a pipe."""

    def __init__(self, stream: IO[bytes]):
        self._stream = stream
        self.again = stream.seekable()
        """Whether `lines` can be called a second time."""
        self._begin = stream.tell() if self.again else 0

    def lines(self) -> Iterator[bytes]:
        """Yields all lines. Of a line with more than MOST_LINE bytes it yields MOST_LINE + 1, so
        that no line takes more memory."""
        if self.again:
            self._stream.seek(self._begin)
        while raw := self._stream.readline(MOST_LINE + 1):
            yield raw
            while len(raw) > MOST_LINE and not raw.endswith(b"\n"):
                raw = self._stream.readline(MOST_LINE + 1)

    def is_at(self, output: str) -> bool:
        """Whether the output file is the input."""
        try:
            return os.path.samestat(os.fstat(self._stream.fileno()), os.stat(output))
        except OSError:  # no such output yet, or an input that is no file
            return False


@contextmanager
def open_input(name: str) -> Iterator[JobInput]:
    """Opens the file of that name; `-` is standard input. Raises UserError if it cannot
    be opened."""
    if name == "-":
        yield JobInput(sys.stdin.buffer)
        return
    try:
        stream = open(name, "rb")  # noqa: SIM115
    except OSError as error:
        raise UserError(f"cannot open {name}: {error.strerror}") from error
    with stream:
        yield JobInput(stream)


class Model(Protocol):
    """The part of an LLM, or of a Fleet, that a job uses."""

    @property
    def generated_tokens(self) -> int: ...

    def generate_each(
        self, requests: Iterator[GenerationRequest], /
    ) -> Iterator[tuple[GenerationRequest, RequestOutput | UserError]]: ...

    def end_session(self, session_id: str, /) -> None: ...


@dataclasses.dataclass
class OpenJob:
    """A job whose files are open and checked. Made by `open_job`."""

    job: Job
    input: JobInput
    results: ResultFile
    total: int | None = None
    """Number of input lines that are not blank; None if the input can be read only once."""
    errors: int = 0
    """Number of errors among the results."""
    chosen: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What a start chose by itself that decides bits, such as ops. It is written beside the options
    of a result, and a job that goes on gives it to its start."""
    turns: Counter[str] = dataclasses.field(default_factory=Counter)
    """Turns of each session that have not ended; empty if the input can be read only once."""
    open_sessions: set[str] = dataclasses.field(default_factory=set)
    """Sessions that lack a result."""
    _running: int = 0
    """Lines in the engine."""
    _said: bool = False
    """Whether this run has written its options beside a result."""
    _ended_by: str | None = None
    """The bad line that ends the job, and why."""

    def chosen_before(self) -> dict[str, Any]:
        """Returns what the start chose that made the results there are."""
        if self.job.overwrite or not self.results.regular:
            return {}
        return (self.results.options() or {}).get(CHOSEN, {})

    @property
    def done(self) -> int:
        """Results in the output, errors included."""
        return self.results.count

    @property
    def complete(self) -> bool:
        """Whether every line is known to have a result, so that `run` has nothing to do."""
        return self.done == self.total

    def lines(self) -> Iterator[Line]:
        """All lines of the input."""
        job, lines = self.job, self.input.lines()
        return read_lines(lines, sampling=job.sampling, seed=job.seed, made_with=job.made_with)

    def run(
        self, llm: Model, *, progress: bool = False, warn: Callable[[str], None] = lambda text: None
    ) -> None:
        """Generates for every line that has no result yet.

        - `warn`: called with a message for each bad line.

        Raises UserError for a bad line, once the lines before it are done, unless on_error is
        "skip"; and if the output cannot be written. However it ends, every line of the output is a
        whole result.
        """
        self.results.begin(overwrite=self.job.overwrite)
        with count_progress(
            "generating", self.total, self.done, progress, lambda: llm.generated_tokens
        ) as report:
            for request, output in llm.generate_each(self._requests(warn)):
                line = request.tag
                assert isinstance(line, Line)
                self._running -= 1
                if line.key in self.results.keys:
                    pass  # It ran once more only for the later turns of its session.
                elif isinstance(output, UserError):
                    self._bad(line, str(output), warn)
                else:
                    self._keep_result(line, output, warn)
                report(self.done)
                self._end_turn(llm, request.session_id)
        if self._ended_by is not None:
            kept = (
                f"; {self.done} results are in {self.results.name}: mend the line, and the same "
                f"command goes on from there"
            )
            raise UserError(
                f"{self._ended_by} (--on-error skip goes on without such lines)"
                f"{kept if self.results.regular else ''}"
            )

    def _requests(self, warn: Callable[[str], None]) -> Iterator[GenerationRequest]:
        for line in self.lines():
            asked = line.request
            # A turn continues from the KV of earlier turns, which no file has.
            again = asked is not None and asked.session_id in self.open_sessions
            if line.key in self.results.keys and not again:
                continue
            if asked is None:
                self._bad(line, line.error or "", warn)
            elif asked.session_id is not None and self.total is None:
                # Which turn is a session's last is found by reading the input twice.
                self._bad(line, "session_id needs an input that is a file, not a pipe", warn)
            else:
                self._running += 1
                yield dataclasses.replace(asked, tag=line)
            # Not before the next line is read: a pipe may take long to give one.
            if self._ended_by is not None:
                return

    def _end_turn(self, llm: Model, session_id: str | None) -> None:
        """Ends a session after its last turn, so that its KV makes room."""
        if session_id is None or session_id not in self.turns:
            return
        self.turns[session_id] -= 1
        if not self.turns[session_id]:
            del self.turns[session_id]
            with suppress(UserError):  # a session of which no turn ran
                llm.end_session(session_id)

    def _keep_result(self, line: Line, output: RequestOutput, warn: Callable[[str], None]) -> None:
        try:
            with as_user_error("the result cannot be written as JSON"):
                options = None if self._said else {**self.job.options, CHOSEN: self.chosen}
                result = success(line, output, self.job.model, options)
        except UserError as error:
            self._bad(line, str(error), warn)
        else:
            self.results.append(result)
            self._said = True

    def _bad(self, line: Line, message: str, warn: Callable[[str], None]) -> None:
        message = message if len(message) <= MOST_MESSAGE else f"{message[:MOST_MESSAGE]}…"
        message_with_place = f"{self.job.input}, line {line.number}: {message}"
        if self.job.on_error == "fail":
            if self._running:
                # Warn at once, since the running lines may take minutes.
                warn(f"{message_with_place}; lines that run are finished first: {self._running}")
            self._ended_by = message_with_place
            return
        warn(message_with_place)
        self.errors += 1
        self.results.append(failure(line, message))


@contextmanager
def open_job(job: Job) -> Iterator[OpenJob]:
    """Opens and checks the files of a job. Nothing is changed before `OpenJob.run`.

    Raises UserError for files that cannot be read or written, and for results that are not of this
    input with these options.
    """
    with open_input(job.input) as source:
        if job.output != "-" and source.is_at(job.output):
            raise UserError(f"{job.output} is both --input and --output; choose another --output")
        with open_results(job.output, overwrite=job.overwrite) as results:
            opened = OpenJob(job, source, results, errors=results.errors)
            _survey(opened)
            yield opened


def _survey(opened: OpenJob) -> None:
    """Reads the whole input for its size, its sessions and the lines that the results belong to.
    Raises UserError for results that are not of this input with these options."""
    job, source, results = opened.job, opened.input, opened.results
    if source.again:
        opened.total, sessions = 0, False
        for raw in source.lines():
            opened.total += bool(raw.strip())
            sessions |= b'"session_id"' in raw
        if results.keys or sessions:
            _compare_lines(opened)
    elif results.keys:
        raise UserError(
            f"{job.output} has results, and what comes from {job.input} cannot be compared "
            f"with them beforehand; put it into a file and give that as --input, choose "
            f"another --output, or start anew with --overwrite"
        )


def _compare_lines(opened: OpenJob) -> None:
    """Reads the whole input for its sessions. Raises UserError unless every result in the output
    belongs to one of its lines."""
    job, keys = opened.job, opened.results.keys
    missing = set(keys)
    for line in opened.lines():
        missing.discard(line.key)
        if line.request is not None and (session_id := line.request.session_id) is not None:
            opened.turns[session_id] += 1
            if line.key not in keys:
                opened.open_sessions.add(session_id)
    if missing:
        where, id = opened.results.first_not_in(opened.results.keys - missing)
        what = _difference(opened.results.options(), job.options)
        raise UserError(
            f"{where}: the result of {id!r} does not belong to {job.input} "
            f"with these options ({what}); give the same ones, choose "
            f"another --output, or start anew with --overwrite"
        )


def _difference(was: Mapping[str, Any] | None, now: Mapping[str, Any]) -> str:
    """Returns what a result was made with that is not asked for now."""
    if was is None:
        return "another line, model, dtype, seed or sampling option"
    # As JSON gives them back.
    now = json.loads(json.dumps(now))
    names = [n for n in {**was, **now} if n != CHOSEN and was.get(n) != now.get(n)]
    each = [f"{n} was {_show_option(n, was)}, is {_show_option(n, now)}" for n in names]
    return "; ".join(each) or "another line"


def _show_option(name: str, options: Mapping[str, Any]) -> str:
    return shown(options[name]) if name in options else "its default"
