"""The command line: one module a command, named as it is. Nothing heavy is imported before a command runs.

`main` (all commands), `options` (those that several share), `output`, `errors` (exit codes), `reference`
(writes `docs/commands.md`). It may import every room but `testing`; typer and rich are imported here alone.
"""

if __name__ != "offload_decode.cli":
    raise ImportError(f"import offload_decode.cli: as {__name__} its modules would exist twice")
