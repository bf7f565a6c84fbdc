"""The analyses of paper 004 (its sections 3.3 to 3.5), and those that it leaves open, as lists of what is to be run."""
