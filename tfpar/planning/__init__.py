"""Planning: from a captured step to its plan.

request, problems     what is asked, and what a planner then solves, as values
drive                 the loop over candidates: make, lay out, fit, price, keep the best
proposals             candidates that an outer search proposes
memory                the loop over named moves that make a plan fit
solve                 one problem: cache, planner, Ctrl-C
"""
