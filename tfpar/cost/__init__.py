"""Cost: what a partitioned step takes on a cluster, in seconds and bytes."""
