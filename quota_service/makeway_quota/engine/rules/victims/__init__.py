"""Victims of a preemptor: candidates, sets of them, and the searches for the best set (rules 5.1 to 5.5).

- `preemptor`: the candidates of a preemptor, by which right, and their order of protection
- `sets`: sets of victims; which are legal and minimal, and which of two is better
- `on_node`, `node_by_node`: the sets of one node; the sets for a gang, node after node
- `one_by_one`: victims chosen one after the other, where there are too many candidates for every set
- `ranking`, `bounds`: the nodes by their best set, kept between preemptors; lower bounds of what a set costs there
- `trial`: evictions on trial in the cluster, and their undoing
- `returning`: whether a victim could return at once by evicting another workload

`rules/reclaim.py` is the search that uses them.
"""
