"""Which stored tokens does a query attend to? One class a method, those alike in one file.

`base` (`Selector`, budgets), `budgeted`, `registry`, `evicting`, `scores`; `unselected` estimates the rest.
A selector may import `kv`, `store`, `attention`, `indexes` and `common`, and no model.
"""
