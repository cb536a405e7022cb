"""What the project claims about speed, measured where it runs: ``cpu`` and ``gpu``."""
