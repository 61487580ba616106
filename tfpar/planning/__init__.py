"""Planning: from a captured step to its plan.

request, problems     what is asked, and what a planner then solves, as values
drive, candidates     the loop over candidates: propose, lay out, fit, price, keep the best
step_search           makes candidates of proposals, for one step
pipeline_search       picks the outer search: the pipeline that is given, or all
solve                 one problem: cache, planner, Ctrl-C
intra_op, inter_op    planners of layouts; searches of pipelines
memory                the loop over named moves that make a plan fit
pricing               the one price of a plan
"""
