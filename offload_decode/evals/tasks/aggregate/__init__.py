"""Tasks that no small selection of a text's tokens solves: a file each, on what `spread.py` says of all."""
