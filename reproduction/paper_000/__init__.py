"""`task=paper_000`: every table of paper 000 again, ours beside the paper's. One file for each part."""
