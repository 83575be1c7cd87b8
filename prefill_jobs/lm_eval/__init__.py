"""lm-eval's tasks, run from stores: `lm_eval --model offload-decode`. Only `model` imports lm-eval."""
