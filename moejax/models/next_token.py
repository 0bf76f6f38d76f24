"""The layer of a checkpoint that predicts a further token (DeepSeek-V3, arXiv:2412.19437, section
2.2; multi-token prediction), read as a model of one layer.

Its input at a position is a projection of two normalised vectors: the embedding of the next token,
and the model's hidden state after its final norm. A decoder layer and a head follow, which give the
token after the next one. transformers leaves these tensors out, so their names are those of the
authors, and what they compute is as in vLLM. Position 0 is not masked there as in vLLM.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from moejax.errors import UserError
from moejax.models.model_config import ModelConfig

OTHER_METHODS = "use method ngram or draft_model"

PREDICTOR_NORMS = ("enorm", "hnorm", "model_norm")
"""Norms of the embedding, of the hidden state, and the model's final one."""

_SHARED = {
    "model.embed_tokens.weight": "model.embed_tokens.weight",
    "lm_head.weight": "lm_head.weight",
    "model.norm.weight": "model.model_norm.weight",
}
"""Tensors of the model that the layer reads too, and their names here."""

_DEEPSEEK = {
    "enorm.weight": "model.enorm.weight",
    "hnorm.weight": "model.hnorm.weight",
    "eh_proj.": "model.eh_proj.",
    "shared_head.norm.weight": "model.norm.weight",
    "shared_head.head.": "lm_head.",
    "embed_tokens.weight": "model.embed_tokens.weight",
    "": "model.layers.0.",
}
"""Beginnings of names after ``model.layers.N.``, N being the number of layers, and what they are
here."""

_QWEN = {
    "pre_fc_norm_embedding.weight": "model.enorm.weight",
    "pre_fc_norm_hidden.weight": "model.hnorm.weight",
    "fc.": "model.eh_proj.",
    "norm.weight": "model.norm.weight",
    "layers.0.": "model.layers.0.",
}
"""The same after ``mtp.``."""


def predictor_of(
    config: ModelConfig, names: Collection[str], source: str
) -> tuple[ModelConfig, dict[str, str]]:
    """Returns the configuration of the first such layer as a model, and the tensors that it reads:
    name → name in that model.

    - `names`: the checkpoint's tensors, by the names that transformers uses.
    - `source`: its path, for messages.

    Raises UserError for a checkpoint without such a layer.
    """
    layer = f"model.layers.{config.num_hidden_layers}."
    if f"{layer}eh_proj.weight" in names:
        start, table, reads = layer, _DEEPSEEK, "before"
    elif "mtp.fc.weight" in names:
        start, table, reads = "mtp.", _QWEN, "after"
    else:
        raise UserError(
            f"{source} has no layer that predicts a further token (tensors {layer}eh_proj.weight "
            f"or mtp.fc.weight); {OTHER_METHODS}"
        )
    if config.window_layers is not None or config.rope_layers is not None:
        raise UserError(
            f"{source}: drafts by {config.architecture}'s own layer are not implemented; "
            f"{OTHER_METHODS}"
        )
    found = {name: own for name, own in _SHARED.items() if name in names}
    for name in names:
        if name.startswith(start):
            rest = name.removeprefix(start)
            begin = next((begin for begin in table if rest.startswith(begin)), None)
            if begin is not None:
                found[name] = table[begin] + rest.removeprefix(begin)
    own = [new for name, new in found.items() if name.startswith(start)]
    found = {name: new for name, new in found.items() if name.startswith(start) or new not in own}
    one = dataclasses.replace(
        config,
        num_hidden_layers=1,
        moe_layers=(True,),
        layer_kinds=None,
        tie_word_embeddings=config.tie_word_embeddings and "lm_head.weight" not in own,
        predicts=reads,
    )
    return one, found
