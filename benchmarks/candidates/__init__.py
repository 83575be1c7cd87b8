"""Candidates for the search of a decoding step: built, measured against what stands, and kept or dropped."""
