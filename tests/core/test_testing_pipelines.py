"""The tiny pipelines: real classes, the same bits every time, no idle component, nothing downloaded."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("transformers")

from sidestream.testing.pipelines import PIPELINES, build, run  # noqa: E402

BLOCK_LISTS = {
    "flux": {"transformer.transformer_blocks": 3, "transformer.single_transformer_blocks": 4},
    "hunyuan_video": {
        "transformer.context_embedder.token_refiner.refiner_blocks": 2,
        "transformer.transformer_blocks": 3,
        "transformer.single_transformer_blocks": 4,
    },
    "ltx": {"transformer.transformer_blocks": 3},
    "qwenimage": {"transformer.transformer_blocks": 3},
    "sd3": {"transformer.transformer_blocks": 4},
    "sdxl": {
        "unet.down_blocks.1.attentions.0.transformer_blocks": 2,
        "unet.down_blocks.2.attentions.0.transformer_blocks": 3,
        "unet.mid_block.attentions.0.transformer_blocks": 3,
        "unet.up_blocks.0.attentions.1.transformer_blocks": 3,
        "unet.up_blocks.1.attentions.1.transformer_blocks": 2,
    },
    "wan": {"transformer.blocks": 3},
    "wan22": {"transformer.blocks": 3, "transformer_2.blocks": 3},
}
"""Per pipeline: where its denoisers keep their blocks, and how many there are."""

TIED_ENCODERS = {
    "flux": "text_encoder_2",
    "ltx": "text_encoder",
    "sd3": "text_encoder_3",
    "wan": "text_encoder",
    "wan22": "text_encoder",
}
"""Per pipeline that has one: its T5 or UMT5 encoder."""

every_pipeline = pytest.mark.parametrize("name", PIPELINES)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The last bits of a sum depend on how many threads share it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def modules_of(pipe: Any) -> dict[str, Any]:
    return {name: part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)}


def find(pipe: Any, path: str) -> Any:
    component, _, inner = path.partition(".")
    return getattr(pipe, component).get_submodule(inner)


@contextmanager
def other_weights(module: Any) -> Iterator[None]:
    """Inside, every parameter of `module` is a little different."""
    kept = [(parameter, parameter.detach().clone()) for parameter in module.parameters()]
    with torch.no_grad():
        for parameter, value in kept:
            parameter.copy_(1.1 * value + 0.02)
    yield
    with torch.no_grad():
        for parameter, value in kept:
            parameter.copy_(value)


def test_the_eight_pipelines_are_there_sorted() -> None:
    assert PIPELINES == ("flux", "hunyuan_video", "ltx", "qwenimage", "sd3", "sdxl", "wan", "wan22")


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown pipeline 'fluxx'; known: flux, .*, wan22"):
        build("fluxx")
    with pytest.raises(ValueError, match=r"unknown pipeline 'fluxx'; known: flux, .*, wan22"):
        run("fluxx", None)


@pytest.mark.parametrize(("package", "wanted"), [("diffusers", "'diffusers'"), ("transformers", "'transformers>=5'")])
def test_a_missing_library_is_named_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, package: str, wanted: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=f"'flux' needs {package}: pip install {wanted}"):
        build("flux")


def test_importing_the_module_loads_no_library() -> None:
    program = (
        "import sys, sidestream.testing.pipelines\n"
        "print(sorted({'torch', 'diffusers', 'transformers'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@every_pipeline
def test_nothing_is_downloaded(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def refuse(*_args: Any, **_kwargs: Any) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", refuse)
    run(name, build(name))


@every_pipeline
def test_the_picture_is_finite_and_shows_something(name: str) -> None:
    """Plain float32 on the CPU, values in 0..1, neither constant nor mostly cut off at the ends."""
    picture = run(name, build(name))
    assert picture.dtype == torch.float32
    assert picture.device.type == "cpu"
    assert not picture.requires_grad
    assert picture.dim() == (5 if name in {"hunyuan_video", "ltx", "wan", "wan22"} else 4)
    assert torch.isfinite(picture).all()
    assert picture.std() > 0.05
    assert ((picture > 0) & (picture < 1)).float().mean() > 0.5


@every_pipeline
def test_same_seeds_give_the_same_bits(name: str) -> None:
    """Run again, built again, whatever the global generator stands at."""
    pipe = build(name)
    picture = run(name, pipe)
    assert torch.equal(run(name, pipe), picture)
    torch.rand(3)
    assert torch.equal(run(name, build(name)), picture)


@every_pipeline
def test_other_seeds_and_prompts_give_other_pictures(name: str) -> None:
    pipe = build(name)
    picture = run(name, pipe)
    assert not torch.equal(run(name, pipe, prompt="two green nines"), picture)
    assert not torch.equal(run(name, pipe, seed=2), picture)
    assert not torch.equal(run(name, pipe, steps=4), picture)
    assert not torch.equal(run(name, build(name, seed=1)), picture)


@every_pipeline
def test_building_leaves_global_state_alone(name: str) -> None:
    generator, grad, dtype = torch.get_rng_state(), torch.is_grad_enabled(), torch.get_default_dtype()
    device = torch.get_default_device()
    build(name)
    assert torch.equal(torch.get_rng_state(), generator)
    assert (torch.is_grad_enabled(), torch.get_default_dtype()) == (grad, dtype)
    assert torch.get_default_device() == device


@every_pipeline
def test_weights_are_cpu_float32_in_eval_mode(name: str) -> None:
    for module in modules_of(build(name)).values():
        assert not any(part.training for part in module.modules())
        assert {(weight.device.type, weight.dtype) for weight in module.parameters()} == {("cpu", torch.float32)}


@every_pipeline
def test_every_component_matters(name: str) -> None:
    """Other weights in any one component give another picture; its own weights back, the same one."""
    pipe = build(name)
    picture = run(name, pipe, steps=2)
    for component, module in modules_of(pipe).items():
        with other_weights(module):
            assert not torch.equal(run(name, pipe, steps=2), picture), component
    assert torch.equal(run(name, pipe, steps=2), picture)


@every_pipeline
def test_every_block_of_the_denoisers_matters(name: str) -> None:
    """The lists are where the table says, as long as it says, and no block is idle."""
    pipe = build(name)
    picture = run(name, pipe, steps=2)
    for path, length in BLOCK_LISTS[name].items():
        blocks = find(pipe, path)
        assert len(blocks) == length
        for index, block in enumerate(blocks):
            with other_weights(block):
                assert not torch.equal(run(name, pipe, steps=2), picture), f"{path}.{index}"


@pytest.mark.parametrize(("name", "component"), TIED_ENCODERS.items())
def test_t5_embeddings_are_one_parameter_in_two_modules(name: str, component: str) -> None:
    encoder = getattr(build(name), component)
    assert encoder.shared.weight is encoder.encoder.embed_tokens.weight


@pytest.mark.parametrize("name", ["flux", "hunyuan_video"])
def test_double_and_single_blocks_are_unequal(name: str) -> None:
    transformer = build(name).transformer
    double, single = transformer.transformer_blocks[0], transformer.single_transformer_blocks[0]
    assert sum(w.nbytes for w in double.parameters()) > sum(w.nbytes for w in single.parameters())


@pytest.mark.parametrize(("name", "blocks"), [("wan", "blocks"), ("ltx", "transformer_blocks")])
def test_tables_belong_to_the_root_and_to_each_block(name: str, blocks: str) -> None:
    transformer = build(name).transformer
    for owner in (transformer, *getattr(transformer, blocks)):
        assert "scale_shift_table" in dict(owner.named_parameters(recurse=False))


def test_wan_keeps_its_rotary_buffers_out_of_the_state_dict() -> None:
    transformer = build("wan").transformer
    buffers = {"rope.freqs_cos", "rope.freqs_sin"}
    assert buffers <= set(dict(transformer.named_buffers()))
    assert not buffers & set(transformer.state_dict())


def test_wan22_enters_its_transformers_one_after_the_other() -> None:
    pipe = build("wan22")
    entered: list[str] = []
    for component in ("transformer", "transformer_2"):
        getattr(pipe, component).register_forward_pre_hook(
            lambda _module, _args, component=component: entered.append(component)
        )
    run("wan22", pipe)
    assert entered == ["transformer"] * 2 + ["transformer_2"] * 4
    assert {name for name, _ in pipe.transformer.named_parameters()} == {
        name for name, _ in pipe.transformer_2.named_parameters()
    }


def test_sd3_has_a_saved_position_buffer_and_blocks_of_three_kinds() -> None:
    """The first two blocks attend twice; the last drops the text stream."""
    transformer = build("sd3").transformer
    assert "pos_embed.pos_embed" in dict(transformer.named_buffers())
    assert "pos_embed.pos_embed" in transformer.state_dict()
    sizes = [sum(w.nbytes for w in block.parameters()) for block in transformer.transformer_blocks]
    assert sizes[0] == sizes[1] > sizes[2] > sizes[3]


def test_qwenimage_holds_complex_tensors_as_plain_attributes() -> None:
    embed = build("qwenimage").transformer.pos_embed
    for attribute in ("pos_freqs", "neg_freqs"):
        assert getattr(embed, attribute).is_complex()
        assert attribute not in {**embed._parameters, **embed._buffers}


def test_ltx_reads_buffers_of_its_vae_outside_any_forward() -> None:
    pipe = build("ltx")
    picture = run("ltx", pipe)
    for buffer in (pipe.vae.latents_mean, pipe.vae.latents_std):
        buffer.mul_(2)
        assert not torch.equal(run("ltx", pipe), picture)
        buffer.div_(2)
    assert {"latents_mean", "latents_std"} <= set(pipe.vae.state_dict())
