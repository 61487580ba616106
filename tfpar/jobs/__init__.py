"""Jobs around training: launch, diagnosis, installation and calibration.

* `jobs.launch` starts the ranks of a job as processes, supervises and restarts them: `tfpar run`.
* `jobs.doctor` examines a machine and says how to repair what is missing: `tfpar doctor`.
* `jobs.install` builds Horovod for the TensorFlow that is installed: `tfpar install-horovod`.
* `jobs.calibration` measures devices, collectives and links as a cluster description:
  `tfpar calibrate`.

The launcher and the doctor never load TensorFlow in their own process.
"""
