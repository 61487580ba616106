"""Strategies of stages x data x tensor on clusters whose devices may differ (auto3d)."""
