"""Integration with Keras: training loop, callbacks, saving and checkpoints of parallel models."""
