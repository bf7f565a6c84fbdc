"""From a generator to a synthetic data set: sample queries, filter them, and compare them with real ones.

`writer` draws queries (`groups`, `sampler`, `shards`) and writes a `dataset_folder`. `filters` select and label
released queries, `textsim` compares texts, and `pseudo_queries` makes queries from public passages. The package is
larger than planned because a set has the same bytes after any number of interruptions, with any number of processes.
"""
