"""From corpora to stores and their indexes: prefilled, resumed, appended to, pushed, spread over machines."""

if __name__ != "offload_decode.prefill_jobs":
    raise ImportError(f"import offload_decode.prefill_jobs: as {__name__} its modules would exist twice")
