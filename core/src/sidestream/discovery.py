"""From a pipeline of any make to its components: what they are called, what they are for, how they are entered.

Looks and touches nothing. A pipeline is a mapping of names to modules, something with `.components` (diffusers), a
module whose children are components, a plain object that holds modules, or a single component.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs
from torch import nn

from sidestream.errors import OffloadWarning, UnsupportedModelError
from sidestream.plan import ComponentKind, OffloadPlan

#: Methods through which components are entered in practice; any other way in is caught at the module it calls.
ENTRY_METHOD = re.compile(
    r"(tiled_|spatial_tiled_|temporal_tiled_|batch_)?(encode|decode|generate|sample|embed|quantize|predict)(_\w+)?"
    r"|get_(text|image|video|audio|multimodal|qformer)_features"
)

_KIND_BY_NAME: tuple[tuple[re.Pattern[str], ComponentKind], ...] = (
    (
        re.compile(r"(text_encoder|mllm|language_encoder|prompt_encoder)(_\d+)?|.*_text_encoder|text_model"),
        ComponentKind.TEXT_ENCODER,
    ),
    (re.compile(r"text_encoder_\w+"), ComponentKind.TEXT_ENCODER),
    (
        re.compile(r"(image_encoder|vision_encoder|image_embedder|vision_model)(_\w+)?|.*_(image|vision)_encoder"),
        ComponentKind.IMAGE_ENCODER,
    ),
    (re.compile(r"(vae|vqvae|vqgan|movq|autoencoder)(_\w+)?|.*_vae"), ComponentKind.VAE),
    (
        re.compile(r"(transformer|unet|dit|denoiser|sr_dit|diffusion_model)(_\w+)?|.*_(dit|unet|transformer|denoiser)"),
        ComponentKind.DIT,
    ),
    (re.compile(r"language_model|model|prior|decoder"), ComponentKind.DIT),
)

_KIND_BY_CLASS: tuple[tuple[re.Pattern[str], ComponentKind], ...] = (
    (
        re.compile(
            r"ControlNet|Adapter|SafetyChecker|Watermark|Vocoder|Upsampler|Connector|(?<!With)Projection(Model|Layer)?$"
        ),
        ComponentKind.OTHER,
    ),
    (re.compile(r"Autoencoder|VAE|VQModel|VQGAN"), ComponentKind.VAE),
    (
        re.compile(
            r"UNet|UVit|DiT\b|DiTModel|DiT\w*Model|Transformer\w*[123]DModel|Transformer2DModel|DiffusionTransformer"
        ),
        ComponentKind.DIT,
    ),
    (re.compile(r"Vision(Model|Transformer)|ImageEncoder|Dino|Siglip\w*Vision"), ComponentKind.IMAGE_ENCODER),
    (
        re.compile(r"Text(Model|Encoder)|T5|Bert|Llama|Gemma|Qwen|Mistral|GPT2|Glm|Phi\d?|SmolLM"),
        ComponentKind.TEXT_ENCODER,
    ),
)

#: Bases of other libraries whose methods are no entries of a component.
_LIBRARY_BASES = re.compile(
    r"torch\.nn\.modules\.module|diffusers\.(models\.modeling_utils|configuration_utils|loaders\b.*)"
)


@attrs.frozen(kw_only=True, eq=False)
class Component:
    """One module of a pipeline that is loaded and used as a whole.

    `name` is its dotted path from the pipeline ("" for the pipeline's own leftovers), `entry_methods` the names of
    the methods it may be entered by, `forward` included; `on_demand` says that the pipeline moves it itself.
    """

    name: str
    kind: ComponentKind
    module: nn.Module
    entry_methods: tuple[str, ...]
    on_demand: bool = False


def plan_of(pipeline: Any) -> OffloadPlan | None:
    """Return what the pipeline declares as `_offload_plan`; `UnsupportedModelError` if it is something else."""
    plan = getattr(pipeline, "_offload_plan", None)
    if plan is not None and not isinstance(plan, OffloadPlan):
        raise UnsupportedModelError(
            f"{_class_name(pipeline)}._offload_plan is a {type(plan).__name__}; it must be a sidestream.OffloadPlan"
        )
    return plan


def discover(pipeline: Any) -> tuple[Component, ...]:
    """Return the components of `pipeline`, each module once, in the order in which they are found.

    Raises `UnsupportedModelError` if there is none, naming what was looked at and how to say it instead. A declared
    component that is missing, None or not a module is left out with a warning.
    """
    plan = plan_of(pipeline)
    found: dict[int, Component] = {}
    for name, module, declared in _named_modules(pipeline):
        if id(module) in found:
            continue
        kind = declared or kind_of(name, module, plan)
        found[id(module)] = Component(
            name=name,
            kind=kind,
            module=module,
            entry_methods=entry_methods(module, plan.entry_methods.get(name, ()) if plan else ()),
            on_demand=plan is not None and name in plan.on_demand_component_paths,
        )
    if not found:
        raise UnsupportedModelError(
            f"no module found in {_class_name(pipeline)}: pass an nn.Module, a pipeline with .components, or a mapping "
            "of names to modules, for instance {'transformer': model}"
        )
    _refuse_nested(found.values())
    return tuple(found.values())


def loose_modules(pipeline: Any, components: Iterable[Component]) -> tuple[tuple[str, nn.Module], ...]:
    """Return the modules of a pipeline that belong to no component but hold tensors of their own, with their names.

    A pipeline that is a module may have parameters beside its components; they have to be on the device too.
    """
    if not isinstance(pipeline, nn.Module):
        return ()
    owned = {id(child) for component in components for child in component.module.modules()}
    return tuple(
        (name, module)
        for name, module in pipeline.named_modules()
        if id(module) not in owned and (module._parameters or module._buffers)
    )


def kind_of(name: str, module: nn.Module, plan: OffloadPlan | None = None) -> ComponentKind:
    """Return what a component is for: as the plan says, else by the last segment of its name, else by its class."""
    if plan is not None:
        if name in plan.encoder_component_types:
            return ComponentKind(plan.encoder_component_types[name])
        if name in plan.block_attrs or name in plan.resident_dit_paths:
            return ComponentKind.DIT
        if name in plan.encoder_block_attrs:
            return ComponentKind.TEXT_ENCODER
    segment = name.rpartition(".")[2].lower()
    by_name = next((kind for pattern, kind in _KIND_BY_NAME if pattern.fullmatch(segment)), None)
    by_class = _kind_by_class(module)
    # A name such as "model" or "decoder" says little; there the class knows better.
    if by_name is not None and not (_KIND_BY_NAME[-1][0].fullmatch(segment) and by_class is not None):
        return by_name
    return by_class or ComponentKind.OTHER


def _kind_by_class(module: nn.Module) -> ComponentKind | None:
    for base in type(module).__mro__:
        if base is nn.Module:
            return None
        for pattern, kind in _KIND_BY_CLASS:
            if pattern.search(base.__name__):
                return kind
    return None


def entry_methods(module: nn.Module, declared: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the methods that `module` may be entered by: `forward`, those declared, those its class names like one.

    Raises `UnsupportedModelError` for a declared method that the module lacks.
    """
    declared = tuple(declared)
    for name in declared:
        if not callable(getattr(module, name, None)):
            raise UnsupportedModelError(f"declared entry method {name!r} is no method of {type(module).__name__}")
    found = ["forward", *declared]
    for base in type(module).__mro__:
        if base is nn.Module or base is object:
            continue
        if _LIBRARY_BASES.fullmatch(base.__module__):
            continue
        for name, value in vars(base).items():
            if (
                callable(value)
                and not isinstance(value, (staticmethod, classmethod, type))
                and ENTRY_METHOD.fullmatch(name)
            ):
                found.append(name)
    return tuple(dict.fromkeys(found))


def _named_modules(pipeline: Any) -> Iterator[tuple[str, nn.Module, ComponentKind | None]]:
    """Yield (path, module, declared kind) for everything that may be a component."""
    declared = list(_declared(pipeline))
    if declared:
        yield from declared
        for name, module in _children(pipeline):
            # What was not listed is somebody's all the same; without a kind of its own it stays on the device.
            if not any(module is other or _contains(module, other) for _, other, _ in declared):
                yield name, module, ComponentKind.OTHER
        return
    if isinstance(pipeline, nn.Module) and not _is_pipeline_module(pipeline):
        kind = _kind_by_class(pipeline)
        yield "model" if kind is None else _LONE_NAME.get(kind, "model"), pipeline, kind or ComponentKind.DIT
        return
    for name, module in _children(pipeline):
        yield name, module, None


_LONE_NAME = {
    ComponentKind.DIT: "transformer",
    ComponentKind.TEXT_ENCODER: "text_encoder",
    ComponentKind.IMAGE_ENCODER: "image_encoder",
    ComponentKind.VAE: "vae",
}


def _declared(pipeline: Any) -> Iterator[tuple[str, nn.Module, ComponentKind | None]]:
    for attribute, kind in (
        ("_dit_modules", ComponentKind.DIT),
        ("_encoder_modules", None),
        ("_vae_modules", ComponentKind.VAE),
        ("_resident_modules", ComponentKind.OTHER),
    ):
        for path in getattr(pipeline, attribute, None) or ():
            try:
                module = _follow(pipeline, path)
            except AttributeError as error:
                _warn(pipeline, f"declares {path!r} in {attribute}, which is missing: {error}")
                continue
            if module is None:
                continue  # optional components are None in many pipelines
            if not isinstance(module, nn.Module):
                _warn(
                    pipeline,
                    f"declares {path!r} in {attribute}, which is a {type(module).__name__} and no module",
                )
                continue
            if kind is None:
                named = kind_of(path, module, plan_of(pipeline))
                encoders = (ComponentKind.TEXT_ENCODER, ComponentKind.IMAGE_ENCODER)
                yield path, module, named if named in encoders else ComponentKind.TEXT_ENCODER
            else:
                yield path, module, kind


def _follow(root: Any, path: str) -> Any:
    for segment in path.split("."):
        root = root[segment] if isinstance(root, Mapping) else getattr(root, segment)
    return root


def _children(pipeline: Any, prefix: str = "", seen: frozenset[int] = frozenset()) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules one level down, then those of pipelines and containers nested in it, with dotted names.

    `seen` are those on the way down: a pipeline may point back at what holds it.
    """
    nested = []
    seen = seen | {id(pipeline)}
    for name, value in _members(pipeline):
        path = f"{prefix}{name}"
        if isinstance(value, nn.Module) and not _is_pipeline_module(value):
            yield path, value
        elif id(value) not in seen and (
            isinstance(value, (nn.Module, Mapping, list, tuple)) or _is_plain_pipeline(value)
        ):
            nested.append((path, value))
    for path, value in nested:
        yield from _children(value, f"{path}.", seen)


def _members(pipeline: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(pipeline, Mapping):
        yield from ((str(name), value) for name, value in pipeline.items())
    elif isinstance(pipeline, (list, tuple)):
        yield from ((str(index), value) for index, value in enumerate(pipeline))
    elif isinstance(pipeline, nn.Module):
        yield from pipeline.named_children()
        # A pipeline may keep nested pipelines that are no modules.
        yield from ((n, v) for n, v in vars(pipeline).items() if not n.startswith("_") and _is_plain_pipeline(v))
    elif isinstance(getattr(pipeline, "components", None), Mapping):
        yield from pipeline.components.items()
    elif hasattr(pipeline, "__dict__"):
        yield from ((n, v) for n, v in vars(pipeline).items() if not n.startswith("_"))


def _is_plain_pipeline(value: Any) -> bool:
    if isinstance(value, (nn.Module, type, str)) or not hasattr(value, "__dict__"):
        return False
    if isinstance(getattr(value, "components", None), Mapping):
        return True
    return any(isinstance(member, nn.Module) for member in vars(value).values())


def _is_pipeline_module(module: nn.Module) -> bool:
    """Return whether a module is a pipeline of components and not a component itself."""
    if _kind_by_class(module) not in (None, ComponentKind.OTHER) or isinstance(module, (nn.ModuleList, nn.Sequential)):
        return False
    named = [
        name
        for name, child in module.named_children()
        if any(pattern.fullmatch(name) for pattern, _ in _KIND_BY_NAME[:-1]) or _kind_by_class(child) is not None
    ]
    return bool(named) and not hasattr(module, "save_pretrained")


def _contains(module: nn.Module, other: nn.Module) -> bool:
    return any(child is other for child in module.modules())


def _refuse_nested(components: Iterable[Component]) -> None:
    by_id = {id(component.module): component for component in components}
    for component in by_id.values():
        for child in component.module.modules():
            inner = by_id.get(id(child))
            if inner is not None and inner is not component:
                raise UnsupportedModelError(
                    f"component {inner.name!r} lies inside component {component.name!r}: its weights would have two "
                    "owners; declare only one of them"
                )


def _warn(pipeline: Any, text: str) -> None:
    warnings.warn(f"{_class_name(pipeline)} {text}", OffloadWarning, stacklevel=4)


def _class_name(pipeline: Any) -> str:
    return f"{type(pipeline).__module__}.{type(pipeline).__qualname__}"
