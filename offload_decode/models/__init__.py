"""Checkpoints and prompts: from files on disk to a model that is served, and from texts to tokens.

`loading`, `checkpoint`, `gguf_model`, `fingerprints` (by what a store knows its model), `prompt`,
`quantization`, `layer_streaming`. It may import `hf` and what lies below it.
"""
