"""Runtime: links compiled steps into TensorFlow functions, and runs them on the ranks."""
