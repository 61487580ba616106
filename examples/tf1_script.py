"""A script of TensorFlow 1: placeholders, `get_variable`, `minimize`, a Saver.

The graph stays as it was written. `tap.GraphProgram` takes the place of the Session, and its
checkpoints are those of the graph's own Saver.
"""

import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import tempfile

import tensorflow as tf
from machines import FOUR_CORES
from shipped_data import digits

import tfpar as tap

v1 = tf.compat.v1


def graph_of_training() -> tuple[tf.Graph, v1.train.Saver]:
    graph = tf.Graph()
    with graph.as_default():
        v1.set_random_seed(0)
        x = v1.placeholder(tf.float32, [None, 64], name="x")
        y = v1.placeholder(tf.int32, [None], name="y")
        with v1.variable_scope("net"):
            w1 = v1.get_variable("w1", [64, 512])
            b1 = v1.get_variable("b1", [512], initializer=v1.zeros_initializer())
            w2 = v1.get_variable("w2", [512, 10])
        logits = tf.matmul(tf.nn.relu(tf.matmul(x, w1) + b1), w2, name="logits")
        entropies = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)
        loss = tf.reduce_mean(entropies, name="loss")
        v1.train.AdamOptimizer(3e-3).minimize(loss, name="train")
        return graph, v1.train.Saver()


def main() -> None:
    images, labels = digits()
    x, y = images.reshape(-1, 64)[:1792], labels[:1792]
    graph, saver = graph_of_training()

    program = tap.GraphProgram(graph, [4], cluster=FOUR_CORES)
    losses = []
    for _ in range(4):
        for i in range(0, len(x), 128):
            feeds = {"x:0": x[i : i + 128], "y:0": y[i : i + 128]}
            loss = program.run(["train", "loss:0"], feeds)[1]
        losses.append(float(loss))
    print(program.plan.summary())
    print("losses:", *(f"{loss:.4f}" for loss in losses))

    with tempfile.TemporaryDirectory() as folder, v1.Session(graph=graph) as session:
        program.save(f"{folder}/model.ckpt")
        saver.restore(session, f"{folder}/model.ckpt")  # plain TensorFlow, without tfpar
        right = session.run("logits:0", {"x:0": x}).argmax(axis=-1) == y
        print(f"right, says a plain Session: {right.mean():.3f}")


if __name__ == "__main__":
    main()
