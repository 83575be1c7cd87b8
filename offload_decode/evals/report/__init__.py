"""The page of `eval report`: jinja2 templates and matplotlib's SVG.

`page` puts it together from `answers`, `measures` and `blocks`. It may import `evals` and what lies below it.
"""
