"""From a generator to a synthetic data set: sample queries, filter them, and compare them with real ones.

`writer` draws (`groups`, `sampler`, `shards`) and writes a `dataset_folder`; `filters` choose and label what was
released; `textsim` compares texts; `pseudo_queries` makes queries from public passages. It is larger
than planned because a set has the same bytes however often, and by however many processes, it was interrupted.
"""
