"""What is read of TensorFlow's profile."""

from __future__ import annotations

import pytest
import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from tfpar.tf.interop import OpEvent, Profiler
from tfpar.tf.interop.profiler import mark, read_profile


class Space:
    """An XSpace made up by hand; times are nanoseconds."""

    def __init__(self) -> None:
        self.proto = xplane_pb2.XSpace()

    def event(self, where: str, what: str, start: int, end: int, **stats: str | int) -> None:
        found = next((p for p in self.proto.planes if p.name == where), None)
        found = found or self.proto.planes.add(name=where)
        number = len(found.event_metadata) + 1
        found.event_metadata[number].name = what
        line = found.lines[0] if found.lines else found.lines.add(timestamp_ns=1000)
        event = line.events.add(metadata_id=number)
        event.offset_ps, event.duration_ps = (start - 1000) * 1000, (end - start) * 1000
        for key, value in stats.items():
            of_key = len(found.stat_metadata) + 1
            found.stat_metadata[of_key].name = key
            stat = event.stats.add(metadata_id=of_key)
            if isinstance(value, int):
                stat.uint64_value = value
            else:
                stat.str_value = value


def test_ops_that_hand_over_last_until_they_come_back():
    space, host = Space(), "/host:CPU"
    start, done = "ExecutorState::ProcessAsync::Start", "ExecutorState::ProcessAsync::Done"
    sum_ = {"name": "up/AllReduce", "kernel_type": "HorovodGroupedAllreduce"}
    space.event(host, start, 2000, 2100, _p=5, **sum_)
    space.event(host, done, 9000, 9500, _c=5, **sum_)
    space.event(host, "up/AllReduce:HorovodGroupedAllreduce", 3000, 8000)  # how long it worked
    space.event(host, start, 2000, 2100, _p=6, name="late", kernel_type="Recv")
    space.event(host, start, 20000, 20100, _p=7, name="never", kernel_type="Recv")
    space.event(host, "r0/up/MatMul:_FusedMatMul", 1200, 1900)
    space.event(host, "EagerExecute", 1000, 9999)
    space.event(host, "tfpar: 7", 1100, 9900)
    space.event(host, "tfpar: 8#step_num=3#", 10000, 11000)
    profile = read_profile(space.proto)
    assert profile.ops == [
        OpEvent("r0/up/MatMul", "_FusedMatMul", 1200, 1900),
        OpEvent("up/AllReduce", "HorovodGroupedAllreduce", 2000, 9000, True),
        OpEvent("late", "Recv", 2000, 9900, True),  # the end of the step is sure
    ]
    assert [tuple(m) for m in profile.marks] == [("7", 1100, 9900), ("8", 10000, 11000)]


def test_kernels_of_gpus_are_of_the_op_that_started_them():
    space = Space()
    space.event("/device:GPU:0", "ampere_sgemm_128x64", 3000, 4000, tf_op="r0/up/MatMul:MatMul")
    space.event("/device:GPU:0", "MemcpyD2D", 5000, 6000)
    assert read_profile(space.proto).ops == [OpEvent("r0/up/MatMul", "MatMul", 3000, 4000)]


def test_the_profiler_sees_ops_between_its_marks():
    @tf.function
    def product(x):
        return tf.matmul(x, x, name="product")

    product(tf.ones([4, 4]))
    profiler = Profiler()
    profiler.start()
    with mark("here"):
        product(tf.ones([4, 4]))
    profile = profiler.stop()
    (here,) = profile.marks
    (op,) = [op for op in profile.ops if op.node.endswith("product")]
    assert here.name == "here"
    assert here.start <= op.start <= op.end <= here.end


def test_there_is_one_profiler():
    profiler = Profiler()
    profiler.start()
    try:
        with pytest.raises(tf.errors.OpError):
            Profiler().start()
    finally:
        profiler.drop()
    profiler.start()
    assert profiler.stop().marks == []
