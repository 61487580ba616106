"""What a candidate costs, without propagating again what it does not change."""
