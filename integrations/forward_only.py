"""Forwards without backward: which of them all ranks run together, and models that are only looked at.

All ranks run them together with `"forward_only": "balanced"`, and by themselves where all are known to run as many: in
a step or an evaluation of the Hugging Face Trainer, and of a prepared loader of Accelerate that gives every rank as
many batches. Generation is never shared: answers differ in length, or only one rank generates. References of a
preference loss get CAD's attention by themselves: log-probabilities of two models can only be compared to the last bit
if the same kernel computed them.
"""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from deepspeed_cad.errors import CADUnsupportedError
from deepspeed_cad.session import Session, current_session

if TYPE_CHECKING:
    from deepspeed_cad.integrations.transformers import Binding

logger = logging.getLogger("deepspeed_cad")

_MARK = "__deepspeed_cad__"
in_step: ContextVar[bool] = ContextVar("deepspeed_cad_in_step", default=False)
"""All ranks run the same forwards now."""
generating: ContextVar[bool] = ContextVar("deepspeed_cad_generating", default=False)
"""`generate` of a model runs."""
_roots: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
"""Outermost wrappers of FSDP1 that ran."""
_even_batch: ContextVar[tuple[Any, Sequence[Binding]]] = ContextVar("deepspeed_cad_even_batch", default=(None, ()))
"""Token ids that every rank's loader gave out last, and the models that look at them once, on every rank."""


def wrap_once(owner: Any, name: str, run: Callable[..., Any]) -> None:
    """Put `run(original, self, …)` in the place of a method of another package's class, if that was not done yet."""
    original = getattr(owner, name)
    if not hasattr(original, _MARK):
        wrapped = wraps(original)(lambda self, *args, **kwargs: run(original, self, *args, **kwargs))
        setattr(wrapped, _MARK, True)
        setattr(owner, name, wrapped)


def are_shared(binding: Binding, given: Mapping[str, Any]) -> bool:
    """Whether a forward without backward that is given this, and no cache, is run by all ranks together."""
    session, (even, looking) = binding.session, _even_batch.get()
    if session.group_ranks == 1 or generating.get() or session.config.forward_only == "local":
        return False
    of_even_loader = binding in looking and even is not None and even() is given.get("input_ids")
    return session.config.forward_only == "balanced" or in_step.get() or of_even_loader


@contextmanager
def within(what: ContextVar[Any], value: Any = True) -> Iterator[None]:
    token = what.set(value)
    try:
        yield
    finally:
        what.reset(token)


def given_out(batch: Any, looking: Sequence[Binding]) -> None:
    """A loader gave this out, at which these look on every rank, as often: they train nothing in this epoch."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    _even_batch.set((weakref.ref(ids) if isinstance(ids, torch.Tensor) else None, looking))


def install_generation_hooks(module: ModuleType) -> None:
    """Wrap `generate` of the module `transformers.generation.utils`. Idempotent."""

    def generate(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        with within(generating):
            return original(self, *args, **kwargs)

    wrap_once(module.GenerationMixin, "generate", generate)


def install_root_hooks(module: ModuleType) -> None:
    """Wrap FSDP1 of the module `torch.distributed.fsdp.fully_sharded_data_parallel`. Idempotent."""

    def forward(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(self, *args, **kwargs)
        if self._is_root:
            _roots.add(self)
        return output

    wrap_once(module.FullyShardedDataParallel, "forward", forward)


def follow(binding: Binding) -> None:
    """This rank has no further forward without backward: attend for ranks that have, until none has any."""
    model = binding.model()
    if model is None or binding.session.config.forward_only != "balanced" or binding.session.group_ranks == 1:
        return
    # Of no document: what a model computes beside attention may know no rows without tokens, or need a mask.
    token = torch.zeros(1, 1, dtype=torch.long, device=binding.session.device)
    given = {"input_ids": token, "attention_mask": torch.ones_like(token)}
    with torch.no_grad():
        while (said := binding.feed.others_look()) is not None:
            looks = binding.session.find_number(next(one.model for one in said if len(one.payload)))
            if looks is None or (model := looks.model()) is None:
                binding.refuse(
                    f"rank {binding.session.rank} has no further forward without backward, and others run a model "
                    "that it never ran, so it cannot attend for them: turn CAD on for it with "
                    "deepspeed_cad.apply(model), or run it at least once on every rank"
                )
            looks.follows = looks.feed.follow(partial(list, said))
            # OpenRLHF's critic gives values of actions, or this.
            takes = inspect.signature(model.forward).parameters
            # What has to be called to run a model: the outermost wrapper of FSDP1, or the model itself.
            root = next((one for one in _roots if any(part is model for part in one.modules())), model)
            root(**given, **({"return_output": True} if "return_output" in takes else {}))


def install_worker_hooks(module: ModuleType) -> None:
    """Wrap `execute_batch` of all workers of the module `openrlhf.trainer.ray.launcher`: its experience maker runs
    forwards without backward by it, and no other place knows where a worker's own end. Idempotent."""

    def execute_batch(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        results = original(self, *args, **kwargs)
        session = current_session()
        binding = None if session is None else next(iter(session.bindings.values()), None)
        if binding is not None:  # of whichever model: it follows all
            binding.follow()
        return results

    workers = [one.__ray_metadata__.modified_class for one in vars(module).values() if hasattr(one, "__ray_metadata__")]
    for cls in (module.BaseModelActor, *workers):  # Ray gave these copies of what they inherit
        wrap_once(cls, "execute_batch", execute_batch)


def watch_for_references(decoder: torch.nn.Module, bind: Callable[[torch.nn.Module, Session], None]) -> None:
    """From now on call `bind` for each other decoder of this class, before its first forward without gradients. A
    session says which decoders it knows. Idempotent."""

    def call(original: Callable[..., Any], self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and not torch.is_grad_enabled():
            _look(self, bind)
        return original(self, *args, **kwargs)

    wrap_once(_class_of(decoder), "__call__", call)


def _class_of(decoder: torch.nn.Module) -> type:
    """Its class of transformers: FSDP2 puts one of its own in front."""
    return next(one for one in type(decoder).__mro__ if "forward" in vars(one))


def _look(decoder: torch.nn.Module, bind: Callable[[torch.nn.Module, Session], None]) -> None:
    session = current_session()
    # The class is watched for good; a later session of this process may train others, or stages of a pipeline.
    if session is None or decoder in session.decoders:
        return
    if not any(isinstance(one, _class_of(decoder)) for one in session.decoders):
        return
    session.decoders.add(decoder)
    try:
        bind(decoder, session)
    except CADUnsupportedError as error:
        logger.info("a %s that is not trained keeps its attention: %s", type(decoder).__name__, error)


def keeps_its_own(decoder: torch.nn.Module, given: Mapping[str, Any], device: str) -> bool:
    """Whether a reference attends by itself: where it is trained, lies on another device (offloaded), or is in fp32
    on a GPU, where no kernel is but plain operations of torch."""
    of = given["inputs_embeds"] if given.get("input_ids") is None else given["input_ids"]
    in_fp32 = next(decoder.parameters()).dtype == torch.float32 and not torch.is_autocast_enabled(device)
    return torch.is_grad_enabled() or of.device.type != device or (device == "cuda" and in_fp32)
