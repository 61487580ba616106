"""Calibration: measures devices, collectives and links of a cluster (ATP §5.3).

It runs on the backend that training uses.
"""
