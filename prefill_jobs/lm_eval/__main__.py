"""lm-eval's command with our model: `python -m offload_decode.prefill_jobs.lm_eval run --model …`.

For releases up to 0.4.13, which read no entry points. Later ones find it in the group `lm_eval.models`.
"""

from lm_eval.__main__ import cli_evaluate

from offload_decode.prefill_jobs.lm_eval import model  # noqa: F401  # registers the model

if __name__ == "__main__":
    cli_evaluate()
