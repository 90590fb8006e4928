"""Hugging Face models: attention and masks through the public interfaces of transformers, one binding per model.

In: a causal model of transformers. A forward pre-hook reads the documents of the micro-batch, the mask function hands
their plan to the layers as a `MaskDescriptor`, and the attention function runs it. Outside of training the same names
run the model's own attention, or attention on this rank alone.
"""

import inspect
import logging
import sys
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

import torch
from deepspeed_cad.integrations import borders as borders_of
from deepspeed_cad.integrations import forward_only, models, structure
from deepspeed_cad.integrations.borders import Borders, find_borders
from deepspeed_cad.integrations.functions import NAME, Scope, cad_attention, cad_mask, running
from deepspeed_cad.integrations.interleaved import interleave
from deepspeed_cad.integrations.mask_check import is_due
from deepspeed_cad.integrations.padding import check_padding, tell_of_ones
from deepspeed_cad.integrations.positions import Unread, compare_later, no_rows, one_row, plain_mask
from deepspeed_cad.integrations.prepared import install_loader_hooks
from deepspeed_cad.integrations.recurrent import Ways, find_recurrent, keep_whole, watch_state
from deepspeed_cad.integrations.shares import find_replica, find_ulysses, refuse_parts_of_heads
from deepspeed_cad.integrations.spanning import why_not
from deepspeed_cad.integrations.trainer import install_trainer_hooks
from deepspeed_cad.integrations.verify import Check, loss_of, loss_without
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from _deepspeed_cad_waiter import when_imported
from deepspeed_cad.ahead.documents import MASK, Announcement, batch_shape, read_documents
from deepspeed_cad.ahead.feed import Feed
from deepspeed_cad.ahead.step import NOT_STATED, batch_rope, settle
from deepspeed_cad.attention.microbatch import MicroBatch
from deepspeed_cad.config import CADConfig
from deepspeed_cad.errors import CADDataError, CADError, CADUnsupportedError
from deepspeed_cad.layout import LocalSegments
from deepspeed_cad.session import Session, find_binding, open_session
from deepspeed_cad.shares import Replica

logger = logging.getLogger("deepspeed_cad")

# Also for models of a file (`torch.save`), whose config has our name.
AttentionInterface.register(NAME, cad_attention)
AttentionMaskInterface.register(NAME, cad_mask)

REPLACED = (
    "no layer of {} asked CAD for its attention: it was switched (set_attn_implementation) or replaced after CAD was "
    'turned on, and would attend only what lies on this rank. Switch or replace it before, or switch back to "cad"'
)


class Binding:
    """CAD on one model: its hooks, its feed of micro-batches, and the attention it had before."""

    def __init__(self, model: PreTrainedModel, session: Session, reference: bool = False) -> None:
        """`reference`: it is only looked at, and keeps its attention where it is trained."""
        self.session, self.reference = session, reference
        decoder = structure.find_decoder(model)
        self.model, self.decoder = weakref.ref(model), weakref.ref(decoder)
        before = model.config._attn_implementation
        # The config of a copy of a model for which CAD is on has our name.
        self.original = structure.default_attention(model.config) if before in (None, NAME) else before
        self.chunked = structure.has_chunks(structure.text_part(model).config)
        """Some of its layers attend in chunks."""
        if self.chunked:
            models.refuse_beside_chunks(session)
        self.ulysses = find_ulysses(self.original) if session.shares.pieces else None
        description = models.describe(model)
        self.feed = Feed(session.plans, description, None) if reference else session.open_feed(description)
        if not reference:
            settle(self.feed, model, NOT_STATED)
        self.forwards = 0
        """Training forwards so far."""
        self.called_with: dict[str, Any] = {}
        """Arguments of the whole model while its forward runs; empty where only its decoder is called."""
        self.looked = 0
        """Forwards without backward so far that all ranks ran together."""
        self.follows: MicroBatch | None = None
        """What other ranks have and this one attends without rows of its own."""
        self.last_read: LocalSegments | None = None
        """Documents of this rank in the last training forward."""
        self.announcer: Any = None
        """The iterator of a prepared loader that announces its batches now."""
        self.in_turn: str | None = None
        """Why its nano-batches do not alternate; empty where they do, None before its first forward."""
        self._check: Check | None = None
        """Of the micro-batch whose forward runs."""
        self.borders: Borders | None = None
        """Of the running forward, where layers carry state."""
        self.comparing = False
        """The model runs once more, to compare its loss."""
        layers, recurrent = structure.decoder_layers(decoder) or torch.nn.ModuleList(), find_recurrent(decoder)
        self._checkpointed = weakref.WeakSet([decoder, *layers[:1]])
        """Modules of which one says whether activation checkpointing is on."""
        if self.ulysses is not None and recurrent:
            raise CADUnsupportedError(
                f"{type(model).__name__} has layers that carry state from token to token, and with Ulysses each rank "
                "has a piece of the tokens: the state would have to travel. Train it without sequence parallelism"
            )
        self.ways = Ways(self.feed.fail) if recurrent else None
        """How its layers that carry state are run; None where it has none."""
        self.state_stays = why_not(session, recurrent) if recurrent else ""
        """Why state cannot travel with documents that span ranks; empty where it can."""
        whole = self.ways or batch_rope(decoder.config) or session.config.verify
        self.feed.cuts = not whole and session.config.overlap_used != "interleave"
        self._switch(structure.text_part(model))
        if decoder is not model:
            model.register_forward_pre_hook(_Hook(self, "model", Binding._before_model), with_kwargs=True)
            model.register_forward_hook(_Hook(self, "model", Binding._after_model), always_call=True)
        self._hooks = (
            decoder.register_forward_pre_hook(_Hook(self, "decoder", Binding._before_decoder), with_kwargs=True),
            decoder.register_forward_hook(_Hook(self, "decoder", Binding._after_decoder), always_call=True),
        )
        if session.config.overlap_used == "interleave":
            interleave(decoder)
        if self.ways is not None:
            keep_whole(decoder)
            watch_state(decoder, layers)
        session.decoders.add(decoder)
        if not reference:
            forward_only.watch_for_references(decoder, bind_reference)
            session.bindings[model] = self

    @staticmethod
    def _switch(part: PreTrainedModel) -> None:
        part.set_attn_implementation(NAME)
        for module in part.modules():
            config = getattr(module, "config", None) if "Attention" in type(module).__name__ else None
            if config is not None and getattr(config, "_attn_implementation", NAME) != NAME:
                raise CADUnsupportedError(
                    f"{type(module).__name__} keeps its attention "
                    f'"{config._attn_implementation}" and cannot be switched to CAD'
                )

    def remove(self) -> None:
        """Give a reference its own attention back."""
        if (model := self.model()) is not None:
            for hook in self._hooks:
                hook.remove()
            structure.text_part(model).set_attn_implementation(self.original)

    def enter(self, decoder: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Before the decoder's forward: find the micro-batch and its plan."""
        names = inspect.signature(decoder.forward).parameters
        given = dict(zip(names, args, strict=False)) | kwargs
        if (weights := given.get("output_attentions")) is None:
            weights = getattr(getattr(decoder, "config", None), "output_attentions", False)
        training, unread = decoder.training and torch.is_grad_enabled(), None
        if self.reference and training:
            # It is trained without CAD after all, and what is computed again in backward must attend likewise.
            self.session.references.pop(decoder, None)
            self.remove()
            return {}
        cached = structure.has_cache(given) or forward_only.generating.get()
        # Whoever asks for a cache goes on with it, token by token, and perhaps on this rank only.
        asks = bool(given.get("use_cache"))
        follows = self.follows is not None
        even = follows or (not asks and forward_only.are_shared(self, given))
        shared = training or (even and not cached)
        switched = getattr(getattr(decoder, "config", None), "_attn_implementation", NAME) != NAME
        own = self.reference and (weights or forward_only.keeps_its_own(decoder, given, self.session.device.type))
        if own or (switched and not training):  # for a while, as continuous batching does
            running.set(Scope(self, None))
            return {}
        if not shared and (cached or self.ulysses is not None):
            running.set(Scope(self, None, in_pieces=self.ulysses is not None))
            return {}
        if weights:
            raise CADUnsupportedError("output_attentions=True: attention that runs elsewhere has no weights to return")
        if training:
            micro_batch, unread = self._take(decoder, given)
        elif shared:
            self.looked += 1
            forward_only.given_out(None, ())  # what looks at this batch again may be one rank by itself
            following, self.follows = self.follows, None
            micro_batch = self.feed.look(self._read(given)) if following is None else following
        else:
            try:
                micro_batch = self.session.plans.open_local(read_documents(given).local)
            except CADError:
                if not self.reference:
                    raise
                # Nobody asked for CAD here, and its own attention may well know what this is.
                running.set(Scope(self, None))
                return {}
        if shared:
            self.session.count(micro_batch, training)
            if micro_batch.layout.segments.begin.any():
                models.refuse_spanning(getattr(decoder, "config", None), self.state_stays)
        empty = 0 in batch_shape(given)
        if not (empty or follows) and self.ulysses is None:
            check_padding(self, micro_batch, given)
            tell_of_ones(self, micro_batch, given)
        shown = int(micro_batch.local().end.max(initial=0)) if getattr(given.get(MASK), "ndim", 2) == 4 else 0
        running.set(Scope(self, micro_batch, training, shared, unread, empty, shown=shown))
        if training and self.forwards < self.session.config.verify:
            self._check = micro_batch.check = Check(
                micro_batch, self.forwards, self.session.config.verify, self.feed.fail
            )
        changed = plain_mask(given)
        if (shared or (decoder.training and not asks)) and "use_cache" in names:
            changed["use_cache"] = False
        if self.ways is not None:
            changed |= self._hand_borders(micro_batch, (1, 1) if empty else batch_shape(given))
        return changed | (one_row(given) if empty or follows else {})

    def _before_decoder(self, decoder: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        changed = self.enter(decoder, args, kwargs)
        names = list(inspect.signature(decoder.forward).parameters)
        kept = tuple(changed.pop(name, value) for name, value in zip(names, args, strict=False))
        given = {**kwargs, **changed}
        self.run_alone(decoder, kept, given)
        return kept, given

    def _before_model(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.called_with = dict(zip(inspect.signature(model.forward).parameters, args, strict=False)) | kwargs

    def _after_model(self, model: torch.nn.Module, args: Any, output: Any) -> None:
        self.end_model(output)
        self.called_with = {}

    def _take(self, decoder: torch.nn.Module, given: dict[str, Any]) -> tuple[MicroBatch, Unread | None]:
        """The micro-batch of a training forward, and what is compared later where it was not read."""
        if any(getattr(m, "gradient_checkpointing", False) for m in self._checkpointed):
            models.refuse_checkpointing(decoder)
        announced = self.feed.next_announced
        unread = None if announced is None or self.feed.draws_more else compare_later(given, announced)
        if announced is None or unread is None:
            announced = self._read(given)
            micro_batch = self.feed.take(announced)
        else:
            micro_batch = self.feed.take(None)
        self.last_read = announced.local
        return micro_batch, unread

    def _read(self, given: dict[str, Any]) -> Announcement:
        try:
            return self.feed.read(given)
        except CADError as error:
            self.feed.fail(error)

    def looks_at_loader(self) -> bool:
        """Whether a pass over a loader that begins now is one of forwards without backward."""
        model = self.model()
        return model is not None and not (model.training and torch.is_grad_enabled())

    def follow(self) -> None:
        forward_only.follow(self)

    def _hand_borders(self, micro_batch: MicroBatch, shape: tuple[int, int]) -> dict[str, Any]:
        """Arguments by which layers that carry state learn where documents begin."""
        due = self.session.config.check == "sampled" and is_due(self.forwards)
        begin = find_borders(micro_batch.local(), *shape)
        self.borders = Borders(begin, *shape, due=due, spanning=micro_batch.spanning())
        given = {borders_of.NAME: (self.borders, self.ways)}
        # A cache of packed documents is of no use, and in evaluation it is on by default.
        return given if self.borders.are_batch_rows else {**given, "use_cache": False}

    def run_alone(self, decoder: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Where this micro-batch is verified: run the decoder without CAD, before it runs with it."""
        scope = running.get()
        if scope is None or scope.micro_batch is None or scope.micro_batch.check is None:
            return
        check: Check = scope.micro_batch.check
        if not check.runs_alone:
            return
        alone = Scope(self, scope.micro_batch, scope.training, scope.shared, alone=check)
        with forward_only.within(running, alone):
            if borders_of.NAME in kwargs:
                found, ways = kwargs[borders_of.NAME]
                kwargs = {**kwargs, borders_of.NAME: (found.alone(), ways)}
            # Not by calling it: hooks of host frameworks on the decoder itself belong to the run that is trained.
            check.output = check.run_without(lambda: decoder.forward(*args, **kwargs), self.session.device)

    def end_model(self, output: Any) -> None:
        """After the whole model's forward, where a micro-batch is verified: compare its loss."""
        model, decoder, check = self.model(), self.decoder(), self._check
        if check is None or model is None or decoder is None or output is None:
            return
        if (loss := loss_of(output)) is not None:
            without = None
            if check.output is not None:
                self.comparing = True
                try:
                    without = loss_of(loss_without(check, model, decoder, self.called_with))
                finally:
                    self.comparing = False
            check.end_model(loss, without)
        check.output = self._check = None
        check.say()

    def refuse(self, reason: str) -> NoReturn:
        """Stop on every rank: this one announced its micro-batch and cannot train it."""
        self.feed.fail(CADDataError(reason))

    def _after_decoder(self, decoder: torch.nn.Module, args: Any, output: Any) -> Any:
        """Also after an error; gives the output where it changed."""
        scope = running.get()
        running.set(None)
        if scope is None or scope.micro_batch is None:
            return None
        borders, self.borders = self.borders, None
        if borders is not None and output is not None and not borders.arrived:
            raise CADUnsupportedError(
                f"{type(decoder).__name__} does not hand arguments on to its layers, so those that carry state "
                "cannot learn where documents begin. Use transformers 5 or newer, or train without CAD"
            )
        if scope.micro_batch.check is not None and output is not None:
            scope.micro_batch.check.end_forward(output, models.is_mixture(getattr(decoder, "config", None)))
            if not self.called_with:
                self.end_model(output)
        if output is None and scope.shared:  # the forward raised
            self.feed.raised(f"the forward of micro-batch {scope.micro_batch.turn} (counted from 0)", sys.exc_info()[1])
        if scope.shared:
            self.feed.learn(scope.micro_batch.layers)
        if scope.training:
            self.forwards += 1
            if output is not None:
                if not scope.micro_batch.layers:
                    self.feed.fail(CADUnsupportedError(REPLACED.format(type(decoder).__name__)))
                self.session.say_first()
        if scope.unread is not None:
            scope.unread.event.synchronize()
            if bool(scope.unread.differs):
                self.refuse(
                    f"rank {self.session.rank}: the positions that reached the model are not those that the loader "
                    'announced. Set "look_ahead": 0 if batches are changed between loader and model'
                )
        return no_rows(output) if scope.empty else None


class _Hook:
    """A hook on the bound model or decoder. On a copy of it (a DPO reference), or of a file, the hook does nothing."""

    def __init__(self, binding: Binding | None = None, part: str = "", run: Callable[..., Any] | None = None) -> None:
        self._binding, self._part, self._run = binding, part, run

    @torch.compiler.disable
    def __call__(self, module: torch.nn.Module, *given: Any) -> Any:
        binding = self._binding
        if binding is None or self._run is None or module is not getattr(binding, self._part)() or binding.comparing:
            return None
        return self._run(binding, module, *given)

    def __reduce__(self) -> Any:
        return _Hook, ()


def bind(model: torch.nn.Module, config: CADConfig, replica: Replica | None = None) -> Binding:
    """Turn CAD on for a model (a PEFT or other wrapper around one is looked through). Idempotent. `replica`: the ranks
    that divide its heads; None: those that its parameters say."""
    inner = models.find_model(model)
    models.refuse_model(inner)
    replica = replica or find_replica(inner)
    if replica is not None:
        refuse_parts_of_heads(inner, len(replica.ranks))
    session = open_session(config, structure.training_device(inner), replica)
    bound: Binding | None = session.bindings.get(inner)
    if bound is not None:
        return bound
    if (reference := session.references.pop(structure.find_decoder(inner), None)) is not None:
        reference.remove()
    models.warn_of_others(model, inner)
    binding = Binding(inner, session)
    when_imported("transformers.trainer", install_trainer_hooks)
    when_imported("accelerate.data_loader", install_loader_hooks)
    when_imported("transformers.generation.utils", forward_only.install_generation_hooks)
    when_imported("transformers.generation.continuous_batching.continuous_api", install_batching_hooks)
    when_imported("torch.distributed.fsdp.fully_sharded_data_parallel", forward_only.install_root_hooks)
    return binding


def bind_reference(decoder: torch.nn.Module, session: Session) -> None:
    """Give a model that is only looked at the attention of CAD. Raises CADUnsupportedError where it has none."""
    if isinstance(decoder, PreTrainedModel):
        models.refuse_model(decoder)
        session.references[decoder] = Binding(decoder, session, reference=True)


def install_batching_hooks(module: ModuleType) -> None:
    """Let continuous batching begin with a model's own attention; it gives back what it found. Idempotent."""

    def switch(original: Callable[..., Any], self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        binding = find_binding(model) if model.config._attn_implementation == NAME else None
        if binding is not None:
            model.set_attn_implementation(binding.original)
        original(self, model, *args, **kwargs)
        if binding is not None:
            self._original_attn_impl = NAME

    if hasattr(module.ContinuousBatchingManager, "switch_to_cb_friendly_attn"):
        forward_only.wrap_once(module.ContinuousBatchingManager, "switch_to_cb_friendly_attn", switch)
