"""One-pass calibration of a whole sampling, solving for targets, fits and probes."""
