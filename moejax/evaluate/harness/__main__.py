"""``python -m moejax.evaluate.harness``: lm_eval's own command line, with the model ``moejax``.

For releases of the harness that do not look for plugins (up to 0.4.13); later ones find the model
by the entry point in the group ``lm_eval.models``.
"""

from lm_eval.__main__ import cli_evaluate

import moejax.evaluate.harness.harness_model  # noqa: F401  registers it

if __name__ == "__main__":
    cli_evaluate()
