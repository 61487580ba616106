"""A tiny Gemma of KerasHub as a preset, without a download, and what is done with it.

Sentences are few and known: the tokenizer is trained on them, as users train SentencePiece's.
"""

from __future__ import annotations

import io
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import keras
import keras_hub
import numpy as np
import sentencepiece

import tfpar as tap
from tests.time_limits import time_limit

TEXT = ["the fox runs", "a dog sleeps", "the dog runs", "a fox sleeps"] * 2
PROMPTS = ["the", "a dog"]
LENGTH, LORA_RANK = 8, 2
SPLIT = (
    tap.shard("token_embedding/embeddings", dim=0, axis="model"),
    *(
        tap.shard(f"{name}/kernel", dim=dim, axis="model")
        for name, dim in {
            "query": 0,
            "attention_output": 0,
            "ffw_gating": 1,
            "ffw_gating_2": 1,
            "ffw_linear": 0,
        }.items()
    ),
    tap.shard("query/lora_kernel_b", dim=1, axis="model"),
)
"""As Megatron does; a table of 21 rows does not divide."""


def save_gemma(folder: Path, *, scale: int = 1, max_shard_size: float | None = None) -> None:
    """A preset of two layers with random weights.

    Args:
        scale: with 1, all has a few kilobytes; the weights grow by its square.
        max_shard_size: of a weights file, in GiB; without, there is one.
    """
    keras.utils.set_random_seed(3)
    names = ("<pad>", "<eos>", "<bos>", "<unk>")
    tokenizer = keras_hub.models.GemmaTokenizer(proto=_sentence_pieces(*names))
    small = scale == 1
    backbone = keras_hub.models.GemmaBackbone(
        vocabulary_size=tokenizer.vocabulary_size() if small else 256 * scale,
        num_layers=2,
        num_query_heads=2,
        num_key_value_heads=1,
        hidden_dim=8 * scale,
        intermediate_dim=16 if small else 256 * scale,
        head_dim=4 * scale,
    )
    preprocessor = keras_hub.models.GemmaCausalLMPreprocessor(tokenizer, sequence_length=LENGTH)
    task = keras_hub.models.GemmaCausalLM(backbone, preprocessor)
    task.save_to_preset(str(folder), max_shard_size=max_shard_size)


def save_llama(folder: Path) -> None:
    """A preset of one layer, with a table for the output of its own, in several files."""
    tokenizer = keras_hub.models.LlamaTokenizer(proto=_sentence_pieces("", "</s>", "<s>", "<unk>"))
    backbone = keras_hub.models.LlamaBackbone(
        vocabulary_size=tokenizer.vocabulary_size(),
        num_layers=1,
        num_query_heads=2,
        num_key_value_heads=1,
        hidden_dim=8,
        intermediate_dim=16,
    )
    preprocessor = keras_hub.models.LlamaCausalLMPreprocessor(tokenizer, sequence_length=LENGTH)
    task = keras_hub.models.LlamaCausalLM(backbone, preprocessor)
    task.save_to_preset(str(folder), max_shard_size=1e-6)


def _sentence_pieces(pad: str, eos: str, bos: str, unk: str) -> bytes:
    """A model of `TEXT`, in which these pieces come first."""
    model = io.BytesIO()
    names = {k: v for k, v in (("pad", pad), ("eos", eos), ("bos", bos), ("unk", unk)) if v}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT),
        model_writer=model,
        vocab_size=26,
        hard_vocab_limit=False,
        minloglevel=2,
        **{f"{kind}_id": i for i, kind in enumerate(names)},
        **({} if pad else {"pad_id": -1}),
        **{f"{kind}_piece": piece for kind, piece in names.items()},
    )
    return model.getvalue()


def with_lora(preset: Path) -> keras_hub.models.CausalLM:
    """The task of a preset, about to be tuned."""
    # Keras's initializers draw their seeds from this, that of LoRA's first factors too. To seed
    # TensorFlow would free the model of a SentencePiece tokenizer that has run.
    random.seed(5)
    task = keras_hub.models.CausalLM.from_preset(str(preset))
    task.backbone.enable_lora(LORA_RANK)
    task.compile(
        keras.optimizers.Adam(0.1),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
        sampler="greedy",
        jit_compile=False,
    )
    return task


def tuned(task: keras_hub.models.CausalLM) -> dict[str, list[float]]:
    """What `fit` on strings returns."""
    return task.fit(TEXT, batch_size=4, epochs=2, shuffle=False, verbose=0).history


def generated(task: keras_hub.models.CausalLM) -> list[str]:
    return task.generate(PROMPTS, max_length=LENGTH)


def frozen(task: keras_hub.models.CausalLM) -> dict[str, np.ndarray]:
    """The weights of the backbone that LoRA leaves alone."""
    found = (w for w in task.backbone.weights if "lora" not in w.path)
    return {w.path: keras.ops.convert_to_numpy(w) for w in found}


_PLAIN = """
import json, sys
import keras_hub, numpy as np
assert "tfpar" not in sys.modules
for preset in sys.argv[1:]:
    task = keras_hub.models.CausalLM.from_preset(preset)
    fed, _, _ = task.preprocessor({text!r})
    print(json.dumps([np.asarray(task(fed)).tolist(), task.backbone.count_params()]))
"""


def logits(task: keras_hub.models.CausalLM) -> np.ndarray:
    """What the task says of `TEXT`."""
    fed, _, _ = task.preprocessor(TEXT)
    return keras.ops.convert_to_numpy(task(fed))


def plain_logits(*presets: Path) -> list[np.ndarray]:
    """`logits` of presets as a new process has them that knows nothing of tfpar."""
    quiet = {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        [sys.executable, "-c", _PLAIN.format(text=TEXT), *map(str, presets)],
        env={**os.environ, **quiet, "CUDA_VISIBLE_DEVICES": "-1"},
        capture_output=True,
        text=True,
        timeout=time_limit(200),
    )
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert len({params for _, params in told}) == 1  # LoRA's weights have gone into the kernels
    return [np.array(values) for values, _ in told]
