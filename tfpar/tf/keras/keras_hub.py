"""Single-writer hooks for KerasHub's files (presets, LoRA weights, exports) on ranks as processes.

Its models, preprocessors, tokenizers and converters open their files themselves. Here the first
rank does so, and the others hand it what they store of split weights.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from tfpar.tf.distributed.world import joined_world

_WRITERS = {
    "models.Backbone": ("save_to_preset", "save_lora_weights", "export_to_transformers"),
    "models.Task": ("save_to_preset", "save_task_weights", "export_to_transformers"),
    "models.Preprocessor": ("save_to_preset", "export_to_transformers"),
    "tokenizers.Tokenizer": ("save_to_preset", "export_to_transformers"),
    "layers.AudioConverter": ("save_to_preset",),
    "layers.ImageConverter": ("save_to_preset",),
    "layers.VideoConverter": ("save_to_preset",),
}
"""Methods whose first argument is where they write; also of classes that inherit from these."""


def install_keras_hub() -> None:
    """Wrap the methods that write; nothing where KerasHub is not imported. Idempotent."""
    keras_hub = sys.modules.get("keras_hub")
    if keras_hub is None or getattr(keras_hub, "_tfpar", False):
        return
    keras_hub._tfpar = True  # type: ignore[attr-defined]
    for name, methods in _WRITERS.items():
        module, _, cls = name.partition(".")
        base = getattr(getattr(keras_hub, module, None), cls, None)
        for owner in _family(base) if base is not None else ():
            for method in methods:
                if method in vars(owner):
                    setattr(owner, method, _once(vars(owner)[method]))


def _family(cls: type) -> set[type]:
    return {cls}.union(*map(_family, cls.__subclasses__()))


def _once(original: Any) -> Any:
    @functools.wraps(original)
    def write(self: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        world = joined_world()
        if world is None:
            original(self, path, *args, **kwargs)
        else:
            what = f"{original.__name__}({str(path)!r})"
            world.lead.write(str(path), what, lambda: original(self, path, *args, **kwargs))

    return write
