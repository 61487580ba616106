"""Search: planners that find the plan (TAP §IV)."""
