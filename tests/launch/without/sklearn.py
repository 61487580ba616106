"""Stands before scikit-learn on the path of ranks, which Keras imports wherever it is installed.

Nothing that ranks do needs it, and it is a quarter of what importing TensorFlow takes.
"""

raise ImportError("ranks of tests go without scikit-learn")
