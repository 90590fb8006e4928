"""Hugging Face models: attention and masks through the public interfaces of transformers, one binding per model.

In: a causal model of transformers. A forward pre-hook reads the documents of the micro-batch, the mask function hands
their plan to the layers as a `MaskDescriptor`, and the attention function runs it. Outside of training the same names
run the model's own attention, or attention on this rank alone.
"""

from __future__ import annotations

import inspect
import logging
import sys
import types
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from deepspeed_cad.integrations.alternating import alternate
from deepspeed_cad.integrations.mask_check import check_mask
from deepspeed_cad.integrations.models import (
    describe,
    is_mixture,
    refuse_arguments,
    refuse_checkpointing,
    refuse_model,
    refuse_spanning,
)
from deepspeed_cad.integrations.padding import Padding, counts, find_padding
from deepspeed_cad.integrations.structure import (
    decoder_layers,
    default_attention,
    find_decoder,
    find_model,
    local_attention,
    masked_attention,
    training_device,
)
from deepspeed_cad.integrations.verify import (
    Alone,
    Check,
    can_run_alone,
    loss_of,
    loss_without,
    open_check,
    same_randomness,
)
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from deepspeed_cad.ahead.documents import Announcement, batch_shape, read_documents
from deepspeed_cad.attention.microbatch import MaskDescriptor, MicroBatch
from deepspeed_cad.autoload import when_imported
from deepspeed_cad.config import CADConfig
from deepspeed_cad.errors import CADDataError, CADError, CADUnsupportedError
from deepspeed_cad.kernels.interface import MaskRule
from deepspeed_cad.layout import LocalSegments
from deepspeed_cad.session import Session, current_session, open_session

logger = logging.getLogger("deepspeed_cad")

NAME = "cad"
"""The attention name; transformers gives special meaning to names with "flash", "sdpa", "flex" or "/" in them."""


@dataclass(eq=False)
class Scope:
    """One running forward of a bound model."""

    binding: Binding
    micro_batch: MicroBatch | None
    """None: the model runs the attention it had before CAD (generation with a cache)."""
    training: bool = False
    checkpointed: bool = False
    unread: _Unread | None = None
    empty: bool = False
    """This rank has no tokens: the model runs on one row of padding, which is taken out of its output."""
    alone: Check | None = None
    """The decoder runs without CAD, to be compared."""


@dataclass(eq=False)
class _Unread:
    """Positions that lie on the GPU and were taken for the announced ones: compared without waiting, read later."""

    differs: torch.Tensor
    event: torch.cuda.Event
    announced: Announcement


_scope: ContextVar[Scope | None] = ContextVar("deepspeed_cad_scope", default=None)


class Binding:
    """CAD on one model: its hooks, its feed of micro-batches, and the attention it had before."""

    def __init__(self, model: PreTrainedModel, session: Session) -> None:
        self.session = session
        self.model = weakref.ref(model)
        self.decoder = weakref.ref(find_decoder(model))
        self.original = model.config._attn_implementation or default_attention(model.config)
        self.feed = session.open_feed(describe(model))
        self.forwards = 0
        self.called_with: dict[str, Any] = {}
        """Arguments of the whole model while its forward runs; empty where only its decoder is called."""
        self.verified = 0
        self._check: Check | None = None
        """Of the micro-batch whose forward runs."""
        self.comparing = False
        """The model runs once more, to compare its loss."""
        layers = decoder_layers(find_decoder(model))
        self._checkpointed = weakref.WeakSet([find_decoder(model), *(layers or ())[:1]])
        """Modules of which one says whether activation checkpointing is on."""

    def install(self) -> None:
        """Switch the attention name, hook the decoder and cut its layers."""
        model, decoder = self.model(), self.decoder()
        assert model is not None and decoder is not None
        AttentionInterface.register(NAME, cad_attention)
        AttentionMaskInterface.register(NAME, cad_mask)
        model.set_attn_implementation(NAME)
        for module in model.modules():
            config = getattr(module, "config", None) if "Attention" in type(module).__name__ else None
            if config is not None and getattr(config, "_attn_implementation", NAME) != NAME:
                raise CADUnsupportedError(
                    f"{type(module).__name__} keeps its attention "
                    f'"{config._attn_implementation}" and cannot be switched to CAD'
                )
        if decoder is not model:
            model.register_forward_pre_hook(_make_call(self), with_kwargs=True)
            model.register_forward_hook(_make_return(self), always_call=True)
        decoder.register_forward_pre_hook(_make_enter(self), with_kwargs=True)
        decoder.register_forward_hook(_make_leave(self), with_kwargs=True, always_call=True)
        if self.session.config.overlap == "pingpong":
            for layer in decoder_layers(decoder) or ():
                alternate(layer)
        if self.session.tracer is not None:
            self.session.tracer.watch_layers(decoder_layers(decoder) or ())
        self.session.bind(model, self)

    def enter(self, decoder: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Before the decoder's forward: find the micro-batch and its plan."""
        names = inspect.signature(decoder.forward).parameters
        given = dict(zip(names, args, strict=False)) | kwargs
        if given.get("output_attentions"):
            raise CADUnsupportedError("output_attentions=True: attention that runs elsewhere has no weights to return")
        training = decoder.training
        if not training and given.get("past_key_values") is not None:
            _scope.set(Scope(self, None))
            return {}
        checkpointed = training and any(getattr(m, "gradient_checkpointing", False) for m in self._checkpointed)
        if checkpointed:
            refuse_checkpointing(decoder)
        unread = None
        if not training:
            micro_batch = self.session.plans.open_local(read_documents(given).local)
        else:
            # Without gradients it is another look at data that is trained, or none of it: a reference's answer in DPO.
            queued = torch.is_grad_enabled()
            announced = self.feed.next_announced if queued else None
            if announced is not None and (unread := _compare_later(given, announced)) is not None:
                micro_batch = self.feed.take(None)
            else:
                try:
                    mine = read_documents(given)
                except CADError as error:
                    self.feed.fail(error)
                micro_batch = self.feed.take(mine, queued)
            self.session.count(micro_batch)
        if training and micro_batch.layout.segments.begin.any():
            refuse_spanning(getattr(decoder, "config", None))
        empty = 0 in batch_shape(given)
        if not empty:
            self._look_at_padding(micro_batch, given)
        _scope.set(Scope(self, micro_batch, training, checkpointed, unread, empty))
        if training and torch.is_grad_enabled() and self.verified < self.session.config.verify:
            of = self.session.config.verify
            self._check = micro_batch.check = open_check(micro_batch, self.verified, of, self.feed.fail)
            self.verified += 1
        changed: dict[str, Any] = {"use_cache": False} if training and "use_cache" in names else {}
        return changed | (_one_row(given) if empty else {})

    def run_alone(self, decoder: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Where this micro-batch is verified: run the decoder without CAD, before it runs with it."""
        scope = _scope.get()
        if scope is None or scope.micro_batch is None or scope.micro_batch.check is None:
            return
        check: Check = scope.micro_batch.check
        if not can_run_alone(scope.micro_batch):
            return
        _scope.set(Scope(self, scope.micro_batch, scope.training, scope.checkpointed, alone=check))
        try:
            with same_randomness(self.session.device):
                # Not by calling it: hooks of host frameworks on the decoder itself belong to the run that is trained.
                check.output = decoder.forward(*args, **kwargs)
        finally:
            _scope.set(scope)

    def end_model(self, output: Any) -> None:
        """After the whole model's forward, where a micro-batch is verified: compare its loss."""
        model, decoder, check = self.model(), self.decoder(), self._check
        if check is None or model is None or decoder is None or output is None:
            return
        loss = loss_of(output)
        if loss is not None and check.output is not None:
            self.comparing = True
            try:
                without = loss_of(loss_without(check, model, decoder, self.called_with))
            finally:
                self.comparing = False
            if without is not None:
                check.end_model(loss, without)
        check.output = self._check = None
        check.say()

    def _look_at_padding(self, micro_batch: MicroBatch, given: dict[str, Any]) -> None:
        """Have rows of padding computed where their output may count and the model's attention gives them one."""
        real = find_padding(micro_batch, *batch_shape(given))
        if real is None:
            return
        model, rank = self.model(), self.session.rank
        counted = counts(real, self.called_with)
        if given.get("attention_mask") is None:
            # Behind cumulative lengths: kernels that take those leave such rows undefined.
            if counted:
                rows = np.flatnonzero(~real)
                self._refuse(
                    f"rank {rank}: {len(rows)} tokens from row {rows[0]} on lie behind cu_seq_lens_q and in no "
                    "document, but some of their labels are not -100. Set these to -100, or make them a document"
                )
            return
        # A router's auxiliary loss may count rows that have no label.
        routed = getattr(getattr(model, "config", None), "output_router_logits", False)
        if "flash" in self.original or (counted is False and not routed):
            return
        eager = self.original == "eager"
        if eager and len(micro_batch.ticks) == 2 and len(real) == 1 and not real[0, 0]:
            self._refuse(
                f"rank {rank}: its only row begins with padding whose output may count. Eager attention gives that the "
                "mean of all values of the row, but the row is cut into nano-batches and values behind the cut are not "
                'there yet. Set "overlap": "local_first", or pad on the right'
            )
        micro_batch.padding = Padding(real, eager, self.session.device)

    def _refuse(self, reason: str) -> NoReturn:
        """Stop on every rank: this one announced its micro-batch and cannot train it."""
        self.feed.fail(CADDataError(reason))

    def leave(self, output: Any) -> Any:
        """After the decoder's forward, also after an error; gives the output where it changed."""
        scope = _scope.get()
        _scope.set(None)
        if scope is None or scope.micro_batch is None:
            return None
        scope.micro_batch.in_forward = False
        if scope.micro_batch.check is not None and output is not None:
            scope.micro_batch.check.end_forward(output, is_mixture(getattr(self.decoder(), "config", None)))
            if not self.called_with:
                self.end_model(output)
        if output is None and scope.training:  # the forward raised
            self.feed.forward_raised(scope.micro_batch, sys.exc_info()[1])
        if scope.training:
            self.forwards += 1
            for key in scope.micro_batch.keys:
                self.feed.learn(key)
            if output is not None:
                self.session.say_first()
        if scope.unread is not None:
            scope.unread.event.synchronize()
            if bool(scope.unread.differs):
                self._refuse(
                    f"rank {self.session.rank}: the positions that reached the model are not those that the loader "
                    'announced. Set "look_ahead": 0 if batches are changed or skipped between loader and model'
                )
        return _no_rows(output) if scope.empty else None


def _one_row(given: dict[str, Any]) -> dict[str, Any]:
    """Arguments for one row of padding instead of none: transformers cannot make masks for an empty batch."""
    changed: dict[str, Any] = {"attention_mask": None}
    for name in ("input_ids", "inputs_embeds", "position_ids"):
        value = given.get(name)
        if value is not None:
            changed[name] = value.new_zeros(1, 1, *value.shape[2:])
    if given.get("inputs_embeds") is not None:
        # Keeps the graph: the embedding takes part in the backward on every rank.
        changed["inputs_embeds"] = changed["inputs_embeds"] + given["inputs_embeds"].sum()
    return changed


def _no_rows(output: Any) -> Any:
    """The output without its row of padding."""
    if isinstance(output, torch.Tensor):
        return output[:, :0] if output.ndim >= 2 and output.shape[:2] == (1, 1) else output
    if isinstance(output, tuple):
        return tuple(_no_rows(item) for item in output)
    if isinstance(output, dict):
        for name, value in output.items():
            output[name] = _no_rows(value)
    return output


def _make_enter(binding: Binding) -> Callable[..., Any]:
    @torch.compiler.disable
    def enter(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # A copied model (a DPO reference) carries the hook along but is not the bound one.
        if module is binding.decoder() and not binding.comparing:
            changed = binding.enter(module, args, kwargs)
            names = list(inspect.signature(module.forward).parameters)
            kept = [changed.pop(name, value) for name, value in zip(names, args, strict=False)]
            given = {**kwargs, **changed}
            binding.run_alone(module, tuple(kept), given)
            return tuple(kept), given
        return None

    return enter


def _make_call(binding: Binding) -> Callable[..., Any]:
    @torch.compiler.disable
    def call(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module is binding.model():
            binding.called_with = dict(zip(inspect.signature(module.forward).parameters, args, strict=False)) | kwargs

    return call


def _make_return(binding: Binding) -> Callable[..., Any]:
    @torch.compiler.disable
    def give_back(module: torch.nn.Module, args: Any, output: Any) -> None:
        if module is binding.model():
            binding.end_model(output)
            binding.called_with = {}

    return give_back


def _make_leave(binding: Binding) -> Callable[..., Any]:
    @torch.compiler.disable
    def leave(module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        return binding.leave(output) if module is binding.decoder() and not binding.comparing else None

    return leave


def bind(model: torch.nn.Module, config: CADConfig) -> Binding:
    """Turn CAD on for a model (a PEFT or other wrapper around one is looked through). Idempotent."""
    inner = find_model(model)
    refuse_model(inner)
    session = open_session(config, training_device(inner))
    bound: Binding | None = session.bindings.get(inner)
    if bound is not None:
        return bound
    binding = Binding(inner, session)
    binding.install()
    when_imported("transformers.trainer", _install_trainer_hooks)
    return binding


def _install_trainer_hooks(trainer: types.ModuleType) -> None:
    from deepspeed_cad.integrations.trainer import install_trainer_hooks

    install_trainer_hooks(trainer)


def find_binding(model: torch.nn.Module) -> Binding | None:
    """The binding of a model, through any wrapper; None where CAD is off for it."""
    session = current_session()
    found: Binding | None = None if session is None else session.find_binding(model)
    return found


def _compare_later(given: dict[str, Any], announced: Announcement) -> _Unread | None:
    """Compare positions on the GPU with the announced ones without waiting; None where they must be read now."""
    positions, mask = given.get("position_ids"), given.get("attention_mask")
    if not isinstance(positions, torch.Tensor) or positions.device.type != "cuda" or mask is not None:
        return None
    batch, width = batch_shape(given)
    if given.get("cu_seq_lens_q") is not None or positions.shape != (batch, width):
        return None
    if announced.local.tokens != batch * width:
        return None
    expected = np.full(batch * width, -1, np.int64)
    local: LocalSegments = announced.local
    for begin, end, offset in zip(local.begin, local.end, local.offset, strict=True):
        expected[offset : offset + end - begin] = np.arange(begin, end)
    wanted = torch.from_numpy(expected).pin_memory().to(positions.device, non_blocking=True)
    differs = torch.empty((), dtype=torch.bool, pin_memory=True)
    differs.copy_((wanted != positions.reshape(-1)).any(), non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return _Unread(differs, event, announced)


# The functions that transformers calls


@torch.compiler.disable
def cad_mask(*args: Any, **kwargs: Any) -> Any:
    """The mask function: the running forward's descriptor, or the model's own mask outside of one."""
    scope = _scope.get()
    if scope is None or scope.micro_batch is None:
        name = scope.binding.original if scope is not None else default_attention(kwargs.get("config"))
        known = name in ALL_MASK_ATTENTION_FUNCTIONS._global_mapping
        return ALL_MASK_ATTENTION_FUNCTIONS[name if known else "sdpa"](*args, **kwargs)
    window = kwargs.get("local_size")
    if scope.alone is not None:
        return Alone(scope.alone.documents, window, scope.binding.original, scope.micro_batch.padding)
    session = scope.binding.session
    if session.config.check == "sampled" and (scope.training or not scope.binding.forwards):
        try:
            check_mask(scope.micro_batch.layout, scope.micro_batch.rank, window, kwargs, scope.binding.forwards)
        except CADError as error:
            scope.binding.feed.fail(error)
    return session.descriptor(scope.micro_batch, window, scope.checkpointed)


@torch.compiler.disable
def cad_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function. query [B, H, S, D], key and value [B, K, S, D]; gives [B, S, H, V]."""
    if isinstance(attention_mask, Alone):
        given = {"scaling": scaling, "dropout": dropout, "softcap": softcap, "s_aux": s_aux, **kwargs}
        return attention_mask.attend(module, query, key, value, **given), None
    if not isinstance(attention_mask, MaskDescriptor):
        scope = _scope.get()
        if scope is not None and scope.micro_batch is not None:
            raise CADUnsupportedError(
                f"{type(module).__name__} got no mask from the mask function: this model bypasses it, so CAD cannot "
                "know its documents"
            )
        name = scope.binding.original if scope is not None else default_attention(getattr(module, "config", None))
        return local_attention(module, name)(
            module, query, key, value, attention_mask,
            scaling=scaling, dropout=dropout, softcap=softcap, s_aux=s_aux, **kwargs,
        )  # fmt: skip
    if dropout:
        raise CADUnsupportedError(
            f"attention dropout is {dropout}; CAD needs 0 (set attention_dropout=0.0 in the model's config)"
        )
    rule = MaskRule(query.shape[-1] ** -0.5 if scaling is None else scaling, attention_mask.window, softcap)
    label = f"{type(module).__name__} of layer {getattr(module, 'layer_idx', '?')}"
    refuse_arguments(label, kwargs)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention_mask.attend(module, q, k, v, rule, s_aux, label)

    check: Check | None = attention_mask.micro_batch.check
    if check is None:
        o = run(query, key, value)
    else:
        o = check.attend(run, query, key, value, rule, s_aux, label)
    padding: Padding | None = attention_mask.micro_batch.padding
    if padding is not None:
        own = masked_attention(
            module, padding.eager, scaling=rule.scale, dropout=0.0, softcap=softcap, s_aux=s_aux, **kwargs
        )
        o = padding.fill(id(module), attention_mask, query, key, value, o, own)
    return o, None
