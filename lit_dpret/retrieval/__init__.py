"""Exact search, rankings and runs, their measures, and the uncertainty of these.

`search` stands on `topk`, `products`, `rows` and `scores`; `backends` lends other libraries' searches. `trec_runs` has
`evaluate`, by `metrics`; `statistics` and `comparison` say how sure a number is. Search is exact to the last tie, also
in bfloat16 and from files, which no library does; hence the size of the package.
"""
