"""Fitting plans into memory: one loop (`fit`) over named moves."""
