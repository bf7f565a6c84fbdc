"""Turn releases into epsilon: composition, truncated sampling, calibrated noise, groups, and selection among runs."""
