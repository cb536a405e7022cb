"""`workbench tune`: density, true error and time of every setting on a capture, and a choice."""
