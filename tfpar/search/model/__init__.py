"""The model that planners search: GraphNodes, blocks that repeat, and three of each kept."""
