"""Texts, and the prompts that a grid cuts from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moejax.errors import UserError
from moejax.evaluate.experiments.definition import Cell, Experiment
from moejax.evaluate.experiments.workload import PromptBatches
from moejax.models.hub import model_directory
from moejax.requests.tokenizer import load_tokenizer

Part = tuple[float, float]

TRAIN: Part = (0.0, 0.6)
TEST: Part = (0.8, 1.0)
"""Contiguous parts of a text. Policies learn from the first, results are measured on the last, and
settings are chosen on the part between (docs/how-to/compare_policies.md, "A fair comparison")."""

WARM_UP_TOKENS = 16


def windows(
    ids: Sequence[int], count: int, length: int, name: str, part: Part = TEST
) -> list[tuple[int, ...]]:
    """Cuts `count` windows of `length` tokens, spread evenly over a part of a text. They overlap if
    the part is shorter than all of them. Raises UserError for a part without room for a window."""
    begin, end = (int(share * len(ids)) for share in part)
    if end - begin < length:
        which = "last fifth" if part == TEST else "first three fifths"
        raise UserError(
            f"the {which} of text {name!r} has {end - begin} tokens, which is no prompt of "
            f"{length}; give a longer text or fewer prompt_tokens"
        )
    last = end - length
    starts = [begin + (last - begin) * i // max(count - 1, 1) for i in range(count)]
    return [tuple(ids[start : start + length]) for start in starts]


class Prompts:
    """Prompts from an experiment's texts."""

    def __init__(self, experiment: Experiment):
        self._experiment = experiment
        self._ids: dict[str, list[int]] = {}
        self._tokenizer: Any = None

    def workload(self, cell: Cell, warm_up: bool = False) -> PromptBatches:
        """Returns the cell's prompts.

        - `warm_up`: take only as few tokens as show an engine everything.

        Raises UserError for a text without room for a prompt.
        """
        asked = self._experiment
        # The same prompts at any batch, or the first of the largest.
        most = asked.prompts or max(asked.batch)
        count = cell.batch if warm_up or asked.prompts is None else most
        prompts = windows(self.tokens(cell.text), most, cell.prompt_tokens, cell.text)[:count]
        output = min(asked.output_tokens, WARM_UP_TOKENS) if warm_up else asked.output_tokens
        return PromptBatches(tuple(prompts), cell.batch, output, asked.temperature, cell.seed)

    def training(self) -> PromptBatches:
        """Returns prompts from the training parts of all texts together, of the shortest length."""
        asked, length = self._experiment, min(self._experiment.prompt_tokens)
        found = [
            window
            for text in asked.sources
            for window in windows(self.tokens(text), asked.train_prompts, length, text, TRAIN)
        ]
        batch, seed = max(asked.batch), asked.seeds[0]
        return PromptBatches(tuple(found), batch, asked.output_tokens, asked.temperature, seed)

    def quality_tokens(self, text: str) -> list[int]:
        """Returns the tokens whose quality is measured: the first of a text's last fifth."""
        ids = self.tokens(text)
        return ids[int(TEST[0] * len(ids)) :][: self._experiment.quality_tokens]

    def tokens(self, text: str) -> list[int]:
        """Returns all tokens of a text."""
        asked = self._experiment
        if text not in self._ids:
            if self._tokenizer is None:
                words = asked.options.get("tokenizer") or model_directory(asked.model)
                self._tokenizer = load_tokenizer(words, required=True)
            self._ids[text] = self._tokenizer.encode(asked.sources[text].read_text())
        return self._ids[text]
