"""Capture of steps: traced Keras steps and functions, and existing graphs of TensorFlow 1."""
