"""`python -m offload_decode`: the command line, where its script is not on the PATH."""

from offload_decode.cli.main import console

if __name__ == "__main__":
    console()
