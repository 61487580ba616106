"""Installation of Horovod, built for the TensorFlow found here: no registry has it ready."""
