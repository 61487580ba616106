"""Assignment of the parts of a step to the stages of a pipeline."""
