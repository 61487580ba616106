"""What imports TensorFlow: capture, variables, programs that run, Keras."""
