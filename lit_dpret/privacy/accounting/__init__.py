"""From releases to epsilon: composition, truncated sampling, calibrated noise, groups, and choosing among runs."""
