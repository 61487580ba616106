"""Descriptions of clusters: devices, nodes, and the levels of links that join them."""
