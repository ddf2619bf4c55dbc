"""C++ GPT-2 and Llama against Hugging Face's, whole and in stages.

Tolerance: logits and gradients may differ by 1e-5 of the largest absolute value of the tensor
compared (fp32; the two add up in another order).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tenure import InputError
from tenure._C import (
    TrainConfig,
    TrainRopeScaling,
    TrainStage,
    train_loss,
    train_split_layers,
    train_write_safetensors,
)

# Of the 4 frequencies of a head 8 wide it keeps one, blends one and divides two.
SCALING = TrainRopeScaling(factor=8.0, low=1.0, high=4.0, original_context=256)


def config(kind: str, **more: object) -> TrainConfig:
    figures: dict[str, object] = {
        "layers": 3,
        "heads": 4,
        "kv_heads": 4 if kind == "gpt2" else 2,
        "width": 32,
        "hidden": 128 if kind == "gpt2" else 88,
        "vocab": 97,
        "context": 128,
    }
    return TrainConfig(kind=kind, **{**figures, **more})


CONFIGS = {
    "gpt2": config("gpt2"),
    "gpt2-untied": config("gpt2", tied=False),
    "llama": config("llama", tied=False),
    "llama-tied": config("llama", tied=True),
    "llama-ungrouped": config("llama", tied=False, kv_heads=4),
    "llama-scaled": config("llama", tied=False, rope_scaling=SCALING),
}
models = pytest.mark.parametrize("ours", CONFIGS.values(), ids=CONFIGS.keys())


def classes_of(kind: str) -> tuple[Any, Any]:
    """Theirs of a config and a model, which bring along all that compiles."""
    import transformers

    if kind == "gpt2":
        return transformers.GPT2Config, transformers.GPT2LMHeadModel
    return transformers.LlamaConfig, transformers.LlamaForCausalLM


def hugging_face(ours: TrainConfig, path: Path) -> Any:
    """A model of theirs, of random weights, from the config.json that we write."""
    torch.manual_seed(0)
    ours.write(str(path / "config.json"))
    classes = classes_of(ours.kind)
    model = classes[1](classes[0].from_pretrained(path))
    for parameter in model.parameters():  # biases and norms, too, must matter
        torch.nn.init.normal_(parameter, 0.5 if parameter.dim() == 1 else 0.0, 0.1)
    return model


def batch(ours: TrainConfig, length: int = 48) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(ours.vocab, (2, length + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[0, :5] = -100
    return tokens[:, :-1], targets


def stages_of(ours: TrainConfig, count: int) -> list[TrainStage]:
    return [
        TrainStage(ours, layers=layers, seed=1) for layers in train_split_layers(ours.layers, count)
    ]


def assert_close(actual: torch.Tensor, expected: torch.Tensor, what: str = "") -> None:
    assert actual.shape == expected.shape, what
    worst = (actual - expected).abs().max() / expected.abs().max()
    assert worst <= 1e-5, f"{what}: {worst:.1e} of its scale"


@models
def test_logits_and_gradients_are_hugging_faces(ours: TrainConfig, tmp_path: Path) -> None:
    theirs = hugging_face(ours, tmp_path)
    theirs.save_pretrained(tmp_path)
    stage = TrainStage(ours)
    stage.load(str(tmp_path))
    tokens, targets = batch(ours)

    expected = theirs(tokens).logits
    expected_loss = torch.nn.functional.cross_entropy(expected.flatten(0, 1), targets.flatten())
    expected_loss.backward()
    logits = stage(tokens)
    loss = train_loss(logits, targets)
    loss.backward()

    assert_close(logits, expected, "logits")
    assert_close(loss, expected_loss, "loss")
    gradients = dict(theirs.named_parameters())
    for name, weight in stage.named_weights():
        assert weight.grad is not None
        assert_close(weight.grad, gradients[name].grad, name)
    assert {name for name, _ in stage.named_weights()} == set(gradients)


@models
@pytest.mark.parametrize("count", [2, 3])
def test_stages_are_the_whole_bit_for_bit(ours: TrainConfig, count: int) -> None:
    tokens, targets = batch(ours)
    whole = TrainStage(ours, seed=1)
    logits = whole(tokens)
    train_loss(logits, targets).backward()

    stages = stages_of(ours, count)
    inputs, outputs = [], []
    x = tokens
    for stage in stages:
        inputs.append(x)
        outputs.append(stage(x))
        x = outputs[-1].detach().requires_grad_()
    loss = train_loss(outputs[-1], targets)
    loss.backward()
    for after, output in zip(reversed(inputs[1:]), reversed(outputs[:-1]), strict=True):
        output.backward(after.grad)
    tied = [stage.tied_weight() for stage in stages]
    if ours.tied:
        first, *middle, last = tied
        assert first is not None
        assert last is not None
        assert all(weight is None for weight in middle)
        first.grad = last.grad = first.grad + last.grad
    else:
        assert tied == [None] * count

    assert torch.equal(outputs[-1], logits)
    expected = dict(whole.named_weights())
    seen = set()
    for stage in stages:
        for name, weight in stage.named_weights():
            assert torch.equal(weight, expected[name]), name
            assert torch.equal(weight.grad, expected[name].grad), name
            seen.add(name)
    assert seen == set(expected)
    assert whole.tied_weight() is None


def test_a_model_that_was_evaluated_still_trains() -> None:
    stage = TrainStage(CONFIGS["llama"], seed=1)
    tokens, targets = batch(CONFIGS["llama"])
    with torch.inference_mode():
        evaluated = train_loss(stage(tokens), targets)
    loss = train_loss(stage(tokens), targets)
    loss.backward()
    assert torch.equal(loss, evaluated)


def test_shorter_rows_after_longer_ones_are_turned_the_same() -> None:
    ours = CONFIGS["llama"]
    tokens, _ = batch(ours)
    of_both, of_one = TrainStage(ours, seed=1), TrainStage(ours, seed=1)
    of_both(tokens)
    assert torch.equal(of_both(tokens[:, :17]), of_one(tokens[:, :17]))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_autocast_computes_in_bf16_and_keeps_weights_and_gradients_in_fp32(name: str) -> None:
    stage = TrainStage(CONFIGS[name], seed=1)
    tokens, targets = batch(CONFIGS[name])
    expected = train_loss(stage(tokens), targets)
    with torch.autocast("cpu", torch.bfloat16):
        logits = stage(tokens)
        loss = train_loss(logits, targets)
    loss.backward()
    assert logits.dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=1e-2)  # bf16 has 8 bits
    assert all(weight.grad.dtype == torch.float32 for _, weight in stage.named_weights())


def test_weights_depend_on_seed_and_name_alone() -> None:
    once, again, other = (
        dict(TrainStage(CONFIGS["llama"], seed=s).named_weights()) for s in (1, 1, 2)
    )
    for name, weight in once.items():
        assert torch.equal(weight, again[name])
        assert weight.dim() == 1 or not torch.equal(weight, other[name])
    first, second = (once[f"model.layers.{i}.mlp.up_proj.weight"] for i in (0, 1))
    assert not torch.equal(first, second)


def test_weights_begin_as_gpt2_does() -> None:
    weights = dict(TrainStage(config("gpt2", width=128, hidden=512), seed=1).named_weights())
    assert weights["transformer.wte.weight"].std().item() == pytest.approx(0.02, rel=0.03)
    assert weights["transformer.h.1.mlp.c_proj.weight"].std().item() == pytest.approx(
        0.02 / 6**0.5, rel=0.03
    )
    assert weights["transformer.h.1.ln_1.weight"].eq(1).all()
    assert weights["transformer.h.1.attn.c_attn.bias"].eq(0).all()


@models
def test_weights_go_to_hugging_face_and_back(ours: TrainConfig, tmp_path: Path) -> None:
    theirs = hugging_face(ours, tmp_path)
    theirs.save_pretrained(tmp_path)
    stage = TrainStage(ours)
    stage.load(str(tmp_path / "model.safetensors"))
    back = tmp_path / "back"
    back.mkdir()
    ours.write(str(back / "config.json"))
    train_write_safetensors(
        str(back / "model.safetensors"), stage.named_weights(), {"format": "pt"}
    )

    loaded, report = type(theirs).from_pretrained(back, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    expected = theirs.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())
    assert TrainConfig.read(str(back / "config.json")) == ours
    theirs.config.save_pretrained(tmp_path)
    assert TrainConfig.read(str(tmp_path / "config.json")) == ours


def test_a_stage_loads_its_part_of_sharded_files(tmp_path: Path) -> None:
    ours = CONFIGS["llama"]
    theirs = hugging_face(ours, tmp_path)
    theirs.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    expected = theirs.state_dict()
    for stage in stages_of(ours, 2):
        stage.load(str(tmp_path))
        for name, weight in stage.named_weights():
            assert torch.equal(weight, expected[name]), name


def test_files_of_bf16_without_prefix_and_with_masks_load(tmp_path: Path) -> None:
    """OpenAI's GPT-2 at Hugging Face has such names, and its causal masks."""
    ours = CONFIGS["gpt2"]
    state = {
        name.removeprefix("transformer."): value.detach().bfloat16()
        for name, value in TrainStage(ours, seed=5).named_weights()
    }
    state["h.0.attn.bias"] = torch.ones(1, 1, 4, 4)
    save_file(state, tmp_path / "model.safetensors")
    stage = TrainStage(ours)
    stage.load(str(tmp_path))
    for name, weight in stage.named_weights():
        assert torch.equal(weight, state[name.removeprefix("transformer.")].float())


def test_what_does_not_fit_is_named_and_nothing_is_loaded(tmp_path: Path) -> None:
    ours = CONFIGS["llama"]
    file = tmp_path / "model.safetensors"
    state = {name: value.detach() for name, value in TrainStage(ours, seed=1).named_weights()}
    del state["model.norm.weight"]
    state["model.layers.7.mlp.up_proj.weight"] = torch.zeros(1)
    state["lm_head.weight"] = torch.zeros(3, 32)
    save_file(state, file)
    stage = TrainStage(ours, seed=2)
    before = [weight.clone() for _, weight in stage.named_weights()]
    with pytest.raises(InputError) as refused:
        stage.load(str(file))
    assert str(refused.value) == (
        f"{file} does not fit this llama: 1 weight missing (model.norm.weight); "
        "1 weight unexpected (model.layers.7.mlp.up_proj.weight); "
        "1 weight of another shape (lm_head.weight: [3, 32] for [97, 32])."
    )
    after = [weight for _, weight in stage.named_weights()]
    assert all(map(torch.equal, before, after))


def test_an_untied_head_does_not_load_into_a_tied_model(tmp_path: Path) -> None:
    ours = CONFIGS["gpt2"]
    state = {name: value.detach() for name, value in TrainStage(ours, seed=1).named_weights()}
    save_file(state | {"lm_head.weight": state["transformer.wte.weight"].clone()}, tmp_path / "a")
    TrainStage(ours).load(str(tmp_path / "a"))
    save_file(state | {"lm_head.weight": torch.zeros(97, 32)}, tmp_path / "b")
    with pytest.raises(InputError, match="has a head .* other than the embedding"):
        TrainStage(ours).load(str(tmp_path / "b"))


def test_a_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has neither model.safetensors nor model.safetensors.ind"):
        TrainStage(CONFIGS["gpt2"]).load(str(tmp_path))


@pytest.mark.parametrize(
    ("index", "complaint"),
    [
        ({}, 'it has no "weight_map"'),
        ({"weight_map": {"a": "../x"}}, '"a" is not in a file beside it'),
        ({"weight_map": {"a": "gone"}}, "gone cannot be read: No such file"),
        ({"weight_map": {"a": "one"}}, '"a" is in one, which has no such tensor'),
    ],
)
def test_a_wrong_index(tmp_path: Path, index: object, complaint: str) -> None:
    save_file({"b": torch.zeros(1)}, tmp_path / "one")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match=complaint):
        TrainStage(CONFIGS["gpt2"]).load(str(tmp_path))


@pytest.mark.parametrize(
    ("kind", "size", "count"),
    [
        ("gpt2", "124M", 124_439_808),
        ("gpt2", "350M", 354_823_168),
        ("gpt2", "774M", 774_030_080),
        ("gpt2", "1558M", 1_557_611_200),
        ("llama", "1B", 1_235_814_400),
        ("llama", "3B", 3_212_749_824),
        ("llama", "8B", 8_030_261_248),
    ],
)
def test_named_sizes_have_the_weights_they_should(
    kind: str, size: str, count: int, tmp_path: Path
) -> None:
    named = TrainConfig.named(kind, size)
    stage = TrainStage(named, device=torch.device("meta"))
    assert sum(weight.numel() for _, weight in stage.named_weights()) == count
    named.write(str(tmp_path / "config.json"))
    classes = classes_of(kind)
    with torch.device("meta"):
        theirs = classes[1](classes[0].from_pretrained(tmp_path))
    assert {name: value.shape for name, value in theirs.named_parameters()} == {
        name: value.shape for name, value in stage.named_weights()
    }


def test_an_unknown_name_lists_those_there_are() -> None:
    with pytest.raises(InputError, match="gpt2 has no size .13B.: its sizes are tiny, 124M, 350M"):
        TrainConfig.named("gpt2", "13B")
    with pytest.raises(InputError, match="no model .bert.: the models are gpt2 and llama"):
        TrainConfig.named("bert", "tiny")


@pytest.mark.parametrize(
    ("ours", "complaint"),
    [
        (config("llama", heads=5), "width 32 cannot be divided into 5 heads"),
        (config("llama", kv_heads=3), "4 heads cannot be divided into 3 groups"),
        (config("gpt2", kv_heads=2), "GPT-2 has no groups of heads"),
        (config("llama", width=36, kv_heads=4), "a head is 9 wide"),
        (config("gpt2", layers=0), "at least 1 layers, not 0"),
    ],
)
def test_figures_that_make_no_model(ours: TrainConfig, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        TrainStage(ours)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"model_type": "mixtral"}, 'type "mixtral": Tenure trains gpt2 and llama'),
        ({"attention_bias": True}, "biases in a Llama"),
        ({"hidden_act": "gelu"}, "the activation gelu"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "RoPE of type yarn"),
        ({"num_hidden_layers": "3"}, '"num_hidden_layers" must be an integer'),
        ({"head_dim": 64}, "heads that are together not as wide"),
    ],
)
def test_a_config_of_another_model(
    tmp_path: Path, change: dict[str, object], complaint: str
) -> None:
    file = tmp_path / "config.json"
    CONFIGS["llama"].write(str(file))
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(InputError, match=complaint):
        TrainConfig.read(str(file))


@pytest.mark.parametrize("type_key", ["rope_type", "type"])
def test_a_config_as_transformers_4_wrote_it(tmp_path: Path, type_key: str) -> None:
    file = tmp_path / "config.json"
    ours = CONFIGS["llama-scaled"]
    ours.write(str(file))
    old = json.loads(file.read_text())
    old["rope_scaling"] = old.pop("rope_parameters")
    del old["rope_scaling"]["rope_theta"]
    old["rope_scaling"][type_key] = old["rope_scaling"].pop("rope_type")
    file.write_text(json.dumps(old))
    assert TrainConfig.read(str(file)) == ours


@pytest.mark.parametrize(
    ("x", "complaint"),
    [
        (torch.zeros(2, 3), "takes tokens .* of int64, not .2, 3. of Float"),
        (torch.zeros(2, 129, dtype=torch.int64), "129 tokens is longer than the model's context"),
    ],
)
def test_input_that_is_none(x: torch.Tensor, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        TrainStage(CONFIGS["gpt2"], seed=1)(x)


def test_hidden_states_of_another_width() -> None:
    with pytest.raises(InputError, match="takes hidden states .batch, length, 32."):
        TrainStage(CONFIGS["gpt2"], layers=(1, 2), seed=1)(torch.zeros(2, 3, 31))


@pytest.mark.parametrize("layers", [(0, 0), (2, 4), (-1, 2)])
def test_a_stage_of_layers_that_are_not_there(layers: tuple[int, int]) -> None:
    with pytest.raises(InputError, match="cannot be made of a model with 3 layers"):
        TrainStage(CONFIGS["gpt2"], layers=layers)


def test_files_of_ours_open_elsewhere(tmp_path: Path) -> None:
    stage = TrainStage(CONFIGS["gpt2"], seed=1)
    train_write_safetensors(str(tmp_path / "x"), stage.named_weights(), {})
    loaded = load_file(tmp_path / "x")
    assert all(torch.equal(loaded[name], value) for name, value in stage.named_weights())
