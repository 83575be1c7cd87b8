"""Documents to text: a file for each format, which says what it reads and what it leaves out.

`reading.read_document` picks the format; `encodings` turns bytes into characters; `base` has what all formats
share. Third-party readers are imported when a document needs them. It may import `common`.
"""
