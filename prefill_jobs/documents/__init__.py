"""Documents to text: a file for each format, which says what it reads, what it leaves out and what it costs.

`reading.read_document` picks the format; `encodings` turns bytes into characters. `base` has what all formats
share, `archives` what archives do, `office` what Word and PowerPoint do. Third-party readers are imported
when a document needs them. It may import `common`.
"""
