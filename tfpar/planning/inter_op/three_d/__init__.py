"""Strategies of stages x data x tensor on clusters whose devices need not be alike (auto3d)."""
