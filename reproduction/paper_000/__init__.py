"""`task=paper_000`: every table of paper 000 with our numbers and the paper's. One file for each part."""
