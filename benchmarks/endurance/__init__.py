"""What is done to commands, and what they lose by it; see `__main__`."""
