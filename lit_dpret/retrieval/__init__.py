"""Exact search, rankings and runs, their measures, and the uncertainty of these.

`search` is built on `topk`, `products`, `rows` and `scores`; `backends` adds other libraries' searches. `trec_runs` has
`evaluate`, which uses `metrics`; `statistics` and `comparison` give the uncertainty of a number. The package is large
because search is exact to the last tie, even in bfloat16 and from files, which no library offers.
"""
