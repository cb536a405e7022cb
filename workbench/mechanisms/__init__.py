"""What the notebooks about single mechanisms compute: plain functions on a capture."""
