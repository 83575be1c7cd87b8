"""Where keys and values live while a model decodes.

`HostKV` (the stored prefix, attended to on the host or the device), `GeneratedKV` (question and generated
tokens), `placement` and `device_cache` (what a device holds), `indexes` (those beside a store).
It may import `store`, `attention`, `indexes`, `common`.
"""
