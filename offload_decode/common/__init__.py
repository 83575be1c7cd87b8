"""What every room may use: the error tree, files that are written whole or not at all, plug-ins, memory.

`errors` (one root, `OffloadDecodeError`), `files` (atomic writes, locks, regular files only, strict JSON),
`plugins` (entry points), `memory` (of this process), `fast_import` (skip slow imports),
`rows/` (stored vectors). It imports nothing of the project.
"""
