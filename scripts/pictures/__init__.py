"""Pictures of the documentation that are drawn from what the package computes and results hold."""
