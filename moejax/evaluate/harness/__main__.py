"""``python -m moejax.evaluate.harness``: lm_eval's own command line, with the model ``moejax``.

Releases of the harness up to 0.4.13 need it, since they do not look for plugins. Later ones find
the model by the entry point in the group ``lm_eval.models``.
"""

from lm_eval.__main__ import cli_evaluate

import moejax.evaluate.harness.harness_model  # noqa: F401  registers it

if __name__ == "__main__":
    cli_evaluate()
