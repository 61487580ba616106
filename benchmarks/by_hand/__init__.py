"""What tfpar on many processes is measured against: parallel training as one writes it by hand.

- `horovod_data_parallel`: GradientTape, and an all-reduce of the gradients with Horovod;
- `multi_worker_mirrored`: TensorFlow's MultiWorkerMirroredStrategy with a custom loop;
- `megatron`: matrices split over the ranks, all-reduces with Horovod in both directions.

`worker` is the program of a rank, `launch` starts the ranks and asks them for steps.
"""
