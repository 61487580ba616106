"""Builds and installs what no package registry has ready: Horovod for the TensorFlow found here."""
