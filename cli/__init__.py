"""The command line: one module per command. Nothing heavy is imported before a command runs."""
