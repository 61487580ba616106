"""`StepFunction`, the result of `tap.function`: a Python function that runs as steps on a mesh.

A call is bound to the function's parameters. Its tensors (and arrays) are what a step is fed;
everything else, Python numbers, strings, None and objects, is static: each set of such values is
traced by itself. Datasets and iterators are read outside of the steps (`data_loops`).
"""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfpar.ir.roles import changes_weights
from tfpar.plans import Plan
from tfpar.spec import TfparError
from tfpar.tf.capture.step import CapturedStep, argument_specs
from tfpar.tf.functions.call import CallArguments, fit_signature, is_tensor
from tfpar.tf.functions.data_loops import call_with_data
from tfpar.tf.keras.gradients import marked_gradients
from tfpar.tf.runtime.executable import Executable
from tfpar.tf.session import Session
from tfpar.tf.steps import CompiledFunction, SharedPlan
from tfpar.tf.steps.trials import try_plans

logger = logging.getLogger("tfpar")

_MANY_TRACES = 8


class StepFunction:
    """A function of tensors that runs on a mesh.

    As a method it binds its instance, and has its steps and its plan for each instance.

    Args:
        function: a Python function or a `tf.function`.
        input_signature: `tf.TensorSpec`s that the arguments have to fit, and are converted to.
        autograph: turn Python control flow on tensors into ops; of a `tf.function`, as it says.
        jit_compile: XLA compiles what is between collectives; None: as a `tf.function` says.

    Attributes:
        python_function: the function as it was written.
        elements_taken: by call, what a step reads of iterators; None for a loop (`data_loops`).
        jit_compile: whether XLA compiles what is between collectives.
        states: by step, what a loop over data hands on to its next pass (`data_loops`).
    """

    def __init__(
        self,
        session: Session,
        function: Callable[..., Any],
        *,
        input_signature: Sequence[Any] | None = None,
        autograph: bool = True,
        jit_compile: bool | None = None,
    ) -> None:
        self.session = session
        self.python_function = getattr(function, "python_function", function)
        self._plan: Plan | None = None
        self._program = SharedPlan(session)
        self._trains = False  # some trace changes weights
        self._traces: dict[Any, CompiledFunction] = {}
        self.elements_taken: dict[Any, tuple[int, ...] | None] = {}
        self.states: dict[Any, CallArguments] = {}
        self._bound: weakref.WeakKeyDictionary[Any, StepFunction] = weakref.WeakKeyDictionary()
        self._input_signature = input_signature
        if input_signature is None:
            self._input_signature = getattr(function, "input_signature", None)
        if jit_compile is None:
            jit_compile = getattr(function, "_jit_compile", None)
        self.jit_compile = bool(jit_compile)
        self._autograph = autograph and getattr(function, "_autograph", True)
        self._parameters = inspect.signature(self.python_function)
        functools.update_wrapper(self, self.python_function)

    @functools.cached_property
    def name(self) -> str:
        return getattr(self.python_function, "__name__", "step")

    @functools.cached_property
    def traced(self) -> Callable[..., Any]:
        """Function to trace: the Python function with control flow on tensors as ops."""
        if not self._autograph:
            return self.python_function
        context = tf.__internal__.autograph.control_status_ctx()
        converted = tf.__internal__.autograph.tf_convert(self.python_function, context)

        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                return converted(*args, **kwargs)
            except Exception as error:  # AutoGraph raises another in the place of ours
                own: BaseException | None = error
                while own is not None and not isinstance(own, TfparError):
                    own = own.__context__
                raise own or error from None

        return run

    def __get__(self, instance: Any, owner: type | None = None) -> StepFunction:
        if instance is None:
            return self
        known = self._bound.get(instance)
        if known is None:
            reference = weakref.ref(instance)  # which its steps do not keep alive

            def method(*args: Any, **kwargs: Any) -> Any:
                return self.traced(reference(), *args, **kwargs)

            method.__name__ = self.name
            method.__doc__ = self.__doc__
            own = list(self._parameters.parameters.values())[1:]
            method.__signature__ = self._parameters.replace(parameters=own)  # type: ignore[attr-defined]
            known = self._bound[instance] = StepFunction(
                self.session,
                method,
                input_signature=self._input_signature,
                autograph=False,
                jit_compile=self.jit_compile,
            )
        return known

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not tf.executing_eagerly():  # part of another step, or of a function of the user's
            return self.traced(*args, **kwargs)
        call = self._bind(args, kwargs)
        if call.sources:
            return call_with_data(self, call)
        return self._trace(call)(*call.tensors)

    def get_concrete_function(self, *args: Any, **kwargs: Any) -> ConcreteStep:
        """Compile the step for these arguments, tensors or `tf.TensorSpec`s of static shape."""
        call = self._bind(args, kwargs)
        specs = argument_specs(call.tensors)
        for spec in specs:
            if isinstance(spec, tf.TensorSpec) and not spec.shape.is_fully_defined():
                raise TfparError(
                    f"A step of {self.name!r} cannot be compiled for {spec}: steps have static "
                    f"shapes. Give the whole shape."
                )
        return ConcreteStep(self._trace(call).executable(specs), specs)

    def capture(self, *args: Any, **kwargs: Any) -> CapturedStep:
        """The step for these arguments, traced only."""
        call = self._bind(args, kwargs)
        return self._trace(call).capture(argument_specs(call.tensors))

    @property
    def plan(self) -> Plan:
        """The plan of the last step that was compiled.

        Raises:
            TfparError: there is none yet.
        """
        if self._plan is None:
            raise TfparError(
                f"{self.name!r} has no plan yet: it is made for the shapes of arguments, at the "
                f"first call."
            )
        return self._plan

    @property
    def executables(self) -> list[Executable]:
        """Executables of all steps that were compiled, in order."""
        return [e for trace in self._traces.values() for e in trace.executables.values()]

    # --- calls -------------------------------------------------------------------

    def _bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallArguments:
        try:
            bound = self._parameters.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.name}(): {error}") from None
        bound.apply_defaults()
        if self._input_signature is not None:
            fit_signature(self.name, bound, tuple(self._input_signature))
        return CallArguments.of(self.name, bound.args, bound.kwargs)

    def _trace(self, call: CallArguments) -> CompiledFunction:
        def run(*tensors: Any) -> Any:
            args, kwargs = call.with_tensors(tensors)
            return self.traced(*args, **kwargs)

        return self.step(call.key, run)

    def step(self, key: Any, run: Callable[..., Any]) -> CompiledFunction:
        """The steps under `key`; `run` is what they are traced from, if there are none yet."""
        known = self._traces.get(key)
        if known is None:

            def traced(*tensors: Any) -> Any:
                with marked_gradients():
                    return run(*tensors)

            known = self._traces[key] = _Trace(self, self._program, traced)
            if len(self._traces) == _MANY_TRACES:
                logger.warning(
                    "%s is traced and compiled for the %dth set of Python values: each number, "
                    "string or object that it is given counts. Give it tensors for what changes.",
                    self.name,
                    _MANY_TRACES,
                )
        return known

    def _remember(self, plan: Plan, executable: Executable) -> None:
        self._plan = plan


class _Trace(CompiledFunction):
    """The steps for one set of static values. The plan of a trace that trains serves the others."""

    def __init__(
        self, owner: StepFunction, program: SharedPlan, function: Callable[..., Any]
    ) -> None:
        super().__init__(
            program,
            function,
            name=owner.name,
            on_plan=owner._remember,
            several=True,
            jit_compile=owner.jit_compile,
        )
        self._owner = owner

    def __call__(self, *arguments: Any) -> Any:
        try_plans(self, arguments)
        return super().__call__(*arguments)

    def capture(self, specs: Sequence[Any]) -> CapturedStep:
        captured = super().capture(specs)
        trains = changes_weights(captured.graph)
        if trains and not self._owner._trains:
            self._owner._trains = True
            self.program.use(None)  # a plan that was made without the backward pass
        self._part = self.program.plan is not None and not trains
        return captured


class ConcreteStep:
    """A step that is compiled for one set of shapes and static values.

    It is called with the arguments that it was compiled for; of these only tensors count.
    """

    def __init__(self, executable: Executable, specs: Sequence[Any]) -> None:
        self.executable = executable
        self._specs = specs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves = tf.nest.flatten((args, kwargs))
        tensors = tuple(leaf for leaf in leaves if is_tensor(leaf))
        given = argument_specs(tensors)
        if given != self._specs:
            raise TfparError(
                f"This step was compiled for {self._specs}, and is called with {given}. Call the "
                f"function itself, which compiles a step for each set of shapes."
            )
        return self.executable(tensors)
