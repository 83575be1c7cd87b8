"""lm-eval's tasks, run from stores: `lm_eval --model offload-decode`. `model` alone knows lm-eval."""
