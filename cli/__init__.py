"""The command line: one module per command. Nothing heavy is imported before a command runs."""

if __name__ != "offload_decode.cli":
    raise ImportError(f"import offload_decode.cli: as {__name__} its modules would exist twice")
