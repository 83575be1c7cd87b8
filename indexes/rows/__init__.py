"""Stored rows and the compiled loops over them: codecs, scores, copies, threads."""
