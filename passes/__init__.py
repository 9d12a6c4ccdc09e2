"""The passes, in the order of `pipeline.py`."""
