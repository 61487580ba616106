"""The seam to Keras: the one place that touches Keras's own classes.

Keras calls `make_train_function`, `make_test_function` and `make_predict_function`, and KerasHub
`make_generate_function`; a model may have its own: an adopted model gets them as attributes. To
learn of models that are made or compiled inside an `auto_parallel` block, the trainer's `__init__`
and `compile` are wrapped, once, when tfpar and Keras are loaded, and so is what loads and saves;
outside of a block, and on ordinary models, they do as before. What copies models is wrapped too: a
copy runs on the mesh of its original; and `fit`, for what is to be done where it fails.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import keras
import tensorflow as tf

from tfpar.scopes import enclosing, open_elsewhere
from tfpar.spec import TfparError
from tfpar.spec.arguments import argument_error
from tfpar.tf.distributed.world import World, joined_world
from tfpar.tf.interop.keras_internals import (
    TensorFlowTrainer,
    Trainer,
    cloning,
    legacy_h5_format,
    saving_lib,
)
from tfpar.tf.interop.variables import write_plainly
from tfpar.tf.interop.written_graphs import change_written_graphs, wrap_writer
from tfpar.tf.keras import saving
from tfpar.tf.keras.callbacks import install_callbacks
from tfpar.tf.keras.files import SAVING, ModelFileMethods, complete
from tfpar.tf.keras.layer_sources import install_sources
from tfpar.tf.keras.model import ParallelModel
from tfpar.tf.keras.streamed_weights import streamed_weights
from tfpar.tf.session import Session
from tfpar.tf.steps import SharedPlan
from tfpar.tf.variables.parallel_variable import ParallelVariable

logger = logging.getLogger("tfpar")

_reduce = keras.Model.__reduce__

_parallel: weakref.WeakKeyDictionary[keras.Model, ParallelModel] = weakref.WeakKeyDictionary()
_files: weakref.WeakKeyDictionary[keras.Model, ModelFileMethods] = weakref.WeakKeyDictionary()

STEPS = ("train", "test", "predict", "generate")


def install() -> None:
    """Wrap the trainer's `__init__`, and the functions that load and save models; idempotent.

    Raises:
        TfparError: Keras runs on another backend than TensorFlow.
    """
    if keras.backend.backend() != "tensorflow":
        raise TfparError(
            f"tfpar needs Keras on the TensorFlow backend; it runs on "
            f"{keras.backend.backend()!r}. Set KERAS_BACKEND=tensorflow before importing keras."
        )
    install_keras_hub()
    original = TensorFlowTrainer.__init__
    if getattr(original, "_tfpar", False):
        return

    @functools.wraps(original)
    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        session = enclosing()
        if session is not None:
            install_keras_hub()  # which may have been imported since
            adopt(self, session)

    init._tfpar = True  # type: ignore[attr-defined]
    TensorFlowTrainer.__init__ = init
    _install_fitting()
    _install_compiling()
    _install_copying()
    _install_loading()
    _install_saving(saving_lib, "save_model")
    _install_saving(saving_lib, "save_weights_only")
    _install_saving(legacy_h5_format, "save_model_to_hdf5")
    install_saved_models()
    install_callbacks(parallel_model)
    install_sources()


def _install_fitting() -> None:
    """Wrap `fit` so that checkpoints, timelines and held objects are settled however it ends.

    If it fails, a checkpoint that is being written is completed, and a timeline that is being
    recorded is dropped.
    """
    original = TensorFlowTrainer.fit

    @functools.wraps(original)
    def fit(self, *args, **kwargs):
        try:
            return original(self, *args, **kwargs)
        except BaseException:
            saving.leave()
            state = parallel_model(self)
            if state is not None:
                state.session.recorder.drop()
            raise
        finally:
            state = parallel_model(self)
            if state is not None:
                state.fitting.close()

    TensorFlowTrainer.fit = fit


def _install_compiling() -> None:
    """Adopt a model that is compiled inside a block."""
    original = Trainer.compile

    @functools.wraps(original)
    def compile_model(self, *args, **kwargs):
        original(self, *args, **kwargs)
        session, unreached = enclosing(), open_elsewhere()
        if session is not None and self not in _parallel:
            adopt_all(self, session)
        elif unreached is not None and self not in _parallel:
            unreached.warn_unreached(self.name)

    Trainer.compile = compile_model


def _install_copying() -> None:
    """Let clones and copies of a parallel model be parallel; say that pickles are not."""
    for module in (cloning, keras.models):
        for name in ("_clone_sequential_model", "_clone_functional_model", "clone_model"):
            if hasattr(module, name):
                setattr(module, name, _on_the_same_mesh(getattr(module, name)))

    @functools.wraps(_reduce)
    def reduce_model(self):
        if self in _parallel:
            logger.warning(
                "A pickle of %s holds its weights, not its mesh: what is read from it runs on one "
                "device. Unpickle it inside of auto_parallel, or give it to tap.parallelize.",
                self.name,
            )
        return _reduce(self)

    keras.Model.__reduce__ = reduce_model


def _on_the_same_mesh(copy: Callable[..., keras.Model]) -> Callable[..., keras.Model]:
    """`copy`, whose result runs on the mesh of its first argument."""

    @functools.wraps(copy)
    def call(model, *args, **kwargs):
        state = _parallel.get(model)
        if state is None:
            return copy(model, *args, **kwargs)
        with state.session.scope():
            return copy(model, *args, **kwargs)

    return call


def _deepcopied(model: keras.Model | None, memo: dict[int, Any]) -> keras.Model:
    """Make the copy of a parallel model that `copy.deepcopy` returns."""
    assert model is not None  # it is being copied
    restore, arguments = _reduce(model)
    with _parallel[model].session.scope():
        copied = restore(*arguments)
    memo[id(model)] = copied
    return copied


def _install_loading() -> None:
    """Let a model that is loaded inside a block, and weights of parallel models, be read by shards.

    All that loads weights, KerasHub's presets too, comes to one of these two.
    """
    load_model, load_weights = saving_lib.load_model, saving_lib.load_weights_only

    @functools.wraps(load_model)
    def load_model_streamed(*args, **kwargs):
        with contextlib.nullcontext() if enclosing() is None else streamed_weights():
            return load_model(*args, **kwargs)

    @functools.wraps(load_weights)
    def load_weights_streamed(model, *args, **kwargs):
        with streamed_weights() if model in _parallel else contextlib.nullcontext():
            return load_weights(model, *args, **kwargs)

    saving_lib.load_model = load_model_streamed
    saving_lib.load_weights_only = load_weights_streamed


def _install_saving(module: ModuleType, name: str) -> None:
    """Let what `tf.keras.saving` calls write a parallel model once, as its own methods do."""
    original = getattr(module, name)

    @functools.wraps(original)
    def save(model, filepath, *args, **kwargs):
        files = _files.get(model)
        if files is None or files.writing:
            return original(model, filepath, *args, **kwargs)
        return files.write(original, filepath, args, kwargs)

    setattr(module, name, save)


def parallel_model(model: keras.Model) -> ParallelModel | None:
    """Return the parallel state of `model`, or None if it is an ordinary model."""
    return _parallel.get(model)


def state_of(model: Any, *, compiled: bool = False) -> ParallelModel:
    """Return the parallel state of a model that has to be parallel.

    Args:
        compiled: it has to be that too.

    Raises:
        ArgumentError: not a model.
        TfparError: an ordinary model, or one that is not compiled.
    """
    if not isinstance(model, keras.Model):
        raise argument_error("model", model, "a keras.Model that is parallel")
    state = parallel_model(model)
    if state is None:
        raise TfparError(
            f"Model {model.name!r} is not parallel: build it inside tap.auto_parallel(...), or "
            f"pass it to tap.parallelize."
        )
    if compiled and not model.compiled:
        raise TfparError(f"Model {model.name!r} is not compiled: call model.compile(...) first.")
    return state


def adopt_all(model: keras.Model, session: Session) -> None:
    """Put a model that is built already, and the models in it, on the session's mesh."""
    for layer in model._flatten_layers():
        if isinstance(layer, keras.Model):
            adopt(layer, session)
    for variable in model.variables:
        if isinstance(variable._value, tf.Variable):
            ParallelVariable.adopt(variable._value).on_outside_read = session.warn_outside


def adopt(model: keras.Model, session: Session) -> ParallelModel:
    """Make `model` train, evaluate and predict on the session's mesh."""
    for kind in _kinds(model):  # one that was made before runs elsewhere
        if getattr(model, f"{kind}_function", None) is not None:
            setattr(model, f"{kind}_function", None)
    known = _parallel.get(model)
    if known is not None:
        known.program = SharedPlan(session)
        known.plan = None
        return known
    state = ParallelModel(model, session)
    _parallel[model] = state
    for kind in _kinds(model):
        _replace_maker(model, state, kind)
    files = _files[model] = ModelFileMethods(state)
    for method in SAVING:
        _replace(model, method, getattr(files, method))
    reference = weakref.ref(model)
    object.__setattr__(model, "__deepcopy__", lambda memo: _deepcopied(reference(), memo))
    return state


def _kinds(model: keras.Model) -> list[str]:
    """List the functions that the model makes for a batch, KerasHub's generate included."""
    return [k for k in STEPS if hasattr(type(model), f"make_{k}_function")]


def _replace_maker(model: keras.Model, state: ParallelModel, kind: str) -> None:
    reference = weakref.ref(model)
    attribute = f"{kind}_function"
    original = getattr(type(model), f"make_{kind}_function")

    def make(force: bool = False):
        model = reference()
        assert model is not None  # its own method is running
        if getattr(model, attribute, None) is not None and not force:
            return getattr(model, attribute)
        if kind == "generate" and model.run_eagerly:
            return original(model)
        if kind != "predict" and model.run_eagerly:
            logger.warning("run_eagerly=True: %s runs on one device, not on the mesh.", model.name)
            state.gather()
            return original(model, force)
        setattr(model, attribute, getattr(state, f"make_{kind}_function")())
        return getattr(model, attribute)

    object.__setattr__(model, f"make_{kind}_function", make)


def _replace(model: keras.Model, method: str, replacement: Callable[..., Any]) -> None:
    @functools.wraps(getattr(type(model), method))
    def call(*args: Any, **kwargs: Any) -> Any:
        return replacement(*args, **kwargs)

    object.__setattr__(model, method, call)


# --- Single-writer hooks for KerasHub's files: presets, adapters, exports ---
#
# Its models, preprocessors, tokenizers and converters open their files themselves. Here the first
# rank does so, and the others hand it what they store of split weights.

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


# --- tf.saved_model.save of objects with sharded variables ---


def install_saved_models() -> None:
    """Wrap the function that `tf.saved_model.save` ends in, and what makes graphs for it; once."""
    wrap_writer(_writes_once)
    change_written_graphs(write_plainly)


def _writes_once(original: Callable[..., Any]) -> Callable[..., Any]:
    """`original`, which is given whole values, by the process that leads."""

    def save(obj: Any, export_dir: Any, *args: Any, **kwargs: Any) -> Any:
        variables = [v for v in _variables(obj) if not v.is_whole]
        if not variables:
            return original(obj, export_dir, *args, **kwargs)
        path = os.fspath(export_dir)

        def write() -> None:
            file = contextlib.nullcontext(path) if "://" in path else complete(path)
            with contextlib.ExitStack() as stack:
                for variable in variables:
                    stack.enter_context(variable.whole())
                original(obj, stack.enter_context(file), *args, **kwargs)

        world = _world(variables)
        if world is None:
            return write()
        return world.lead.write(path, f"tf.saved_model.save({path!r})", write)

    return save


def _variables(obj: Any) -> list[ParallelVariable]:
    """The parallel variables that `obj` tracks, itself or within Keras's."""
    tracked = tf.train.TrackableView(obj).descendants()
    held = [t._value if isinstance(t, keras.Variable) else t for t in tracked]
    return [v for v in held if isinstance(v, ParallelVariable)]


def _world(variables: Sequence[ParallelVariable]) -> World | None:
    """The processes among which the variables are split."""
    return next((v.world for v in variables if v.world is not None), None)
