"""The example is a package of its own, whose tests run where it is installed."""

collect_ignore = ["example"]
