"""The wire: FastAPI, and nothing else of this project imports it."""
