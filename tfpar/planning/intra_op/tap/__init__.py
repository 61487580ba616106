"""TAP's planner: whole weights, by shared subgraphs and patterns (Shi et al., 2023, §IV)."""
