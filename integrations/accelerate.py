"""Accelerate: `Accelerator(kwargs_handlers=[CADPlugin(tolerance=0.05)])` turns CAD on for the models it prepares.

Its class is wrapped when this module is imported: `__init__` takes our plugin out of the handlers (Accelerate rejects
classes that it does not know), `prepare` and `prepare_model` call `deepspeed_cad.apply` before the model is wrapped by
DDP or FSDP, or hand the plugin to DeepSpeed's JSON. An Accelerator without the plugin is left alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, KwargsHandler
from deepspeed_cad.integrations.active import ActivationCheck, give_deepspeed
from deepspeed_cad.integrations.forward_only import wrap_once
from deepspeed_cad.integrations.prepared import refuse_accelerator, refuse_loader

from deepspeed_cad.api import apply
from deepspeed_cad.config import CADConfig
from deepspeed_cad.errors import CADConfigError
from deepspeed_cad.launch.deepspeed_hook import install
from deepspeed_cad.request import agree

_PLUGIN = "_deepspeed_cad_plugin"
"""Attribute of an Accelerator: the plugin that it was given; of the class: the one that every one has."""


class CADPlugin(KwargsHandler):
    """Turns CAD on in an Accelerator. Takes the keys of the "cad" block as keywords; all have defaults.

    Raises CADConfigError for an unknown key or a value that is not allowed."""

    def __init__(self, **block: Any) -> None:
        self.config = CADConfig.from_dict(block)
        self.asked_by = "CADPlugin"
        self.watched = False
        """Whether an ActivationCheck watches for it."""

    @classmethod
    def of(cls, config: CADConfig, asked_by: str) -> CADPlugin:
        """The plugin for a config that was read elsewhere."""
        plugin = cls(**config.to_dict())
        plugin.asked_by = asked_by
        return plugin


def give_every_accelerator(plugin: CADPlugin) -> Callable[[], None]:
    """Every Accelerator from now on has the plugin, as if its script had passed it; gives what undoes this. An
    Accelerator that was given another plugin raises CADConfigError."""
    setattr(Accelerator, _PLUGIN, plugin)
    return lambda: delattr(Accelerator, _PLUGIN)


def _init(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    given = inspect.signature(original).bind(self, *args, **kwargs)
    handlers = list(given.arguments.get("kwargs_handlers") or [])
    ours = [one for one in handlers if isinstance(one, CADPlugin)]
    if len(ours) > 1:
        raise CADConfigError("kwargs_handlers holds more than one CADPlugin; pass one")
    plugin: CADPlugin | None = getattr(self, _PLUGIN, None)
    if ours:
        if plugin is not None:
            agree(plugin.config, plugin.asked_by, ours[0].config, "the script's CADPlugin")
        plugin = ours[0]
        given.arguments["kwargs_handlers"] = [one for one in handlers if one is not ours[0]] or None
    original(*given.args, **given.kwargs)
    if plugin is None:
        return
    setattr(self, _PLUGIN, plugin if plugin.config.enabled else None)
    if not plugin.config.enabled:
        return
    install()
    refuse_accelerator(self)
    if not plugin.watched:
        plugin.watched = True
        ActivationCheck(plugin.asked_by)


def _trains_a_copy(accelerator: Accelerator) -> bool:
    """Whether it compiles layer by layer: `prepare` then gives a copy, which is bound when it is there."""
    return bool(getattr(getattr(accelerator.state, "dynamo_plugin", None), "use_regional_compilation", False))


def _prepare(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    plugin = getattr(self, _PLUGIN, None)
    if plugin is not None and any(isinstance(one, torch.nn.Module) for one in args):
        if self.distributed_type == DistributedType.DEEPSPEED:
            give_deepspeed(self.state.deepspeed_plugin.deepspeed_config, plugin.config, plugin.asked_by)
        elif _trains_a_copy(self):
            result = original(self, *args, **kwargs)
            for one in result if isinstance(result, tuple) else (result,):
                _apply(one, plugin)
            return result
        elif getattr(self, "is_fsdp2", False):
            for one in args:
                _apply(one, plugin)
    return original(self, *args, **kwargs)


def _prepare_model(original: Callable[..., Any], self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    plugin = getattr(self, _PLUGIN, None)
    given = inspect.signature(original).bind(self, model, *args, **kwargs).arguments
    if plugin is None or given.get("evaluation_mode") or _trains_a_copy(self):
        return original(self, model, *args, **kwargs)
    if self.distributed_type == DistributedType.NO:
        # Nothing wraps it, and only now it is on its device.
        return _apply(original(self, model, *args, **kwargs), plugin)
    _apply(model, plugin)
    return original(self, model, *args, **kwargs)


def _apply(model: Any, plugin: CADPlugin) -> Any:
    """Turn CAD on for a model that is trained and contains one of transformers; others are left alone."""
    from transformers import PreTrainedModel

    if isinstance(model, torch.nn.Module) and any(isinstance(one, PreTrainedModel) for one in model.modules()):
        if any(one.requires_grad for one in model.parameters()):
            apply(model, plugin.config)
    return model


def _prepare_data_loader(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    loader = original(self, *args, **kwargs)
    if getattr(self, _PLUGIN, None) is not None:
        refuse_loader(loader)
    return loader


wrap_once(Accelerator, "__init__", _init)
wrap_once(Accelerator, "prepare", _prepare)
wrap_once(Accelerator, "prepare_model", _prepare_model)
wrap_once(Accelerator, "prepare_data_loader", _prepare_data_loader)
