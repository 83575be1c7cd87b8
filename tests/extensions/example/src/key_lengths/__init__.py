"""Keys by their length: a selector, an index and a prefill method for offload-decode."""
