"""A spec is a zoo name, a Hugging Face config, or a factory; whatever is wrong with it is said in one sentence."""

from __future__ import annotations

import json
import sys
import textwrap

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tierwise import zoo
from tierwise.errors import BadFile, BadInput, UnknownName

LLAMA = {"model_type": "llama", "vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
GPT2 = {"model_type": "gpt2", "vocab_size": 50, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "bos_token_id": 0, "eos_token_id": 0}
BERT = {
    "model_type": "bert", "vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 32,
}  # fmt: skip
T5 = {"model_type": "t5", "vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "is_encoder_decoder": True}
VIT = {
    "model_type": "vit", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty current directory; modules written there are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]


def write_config(here, config) -> str:
    (here / "config.json").write_text(json.dumps(config))
    return "config.json"


def write_factory(here, body: str, name: str = "users_code") -> str:
    (here / f"{name}.py").write_text("import torch\nfrom torch import nn\n" + textwrap.dedent(body))
    return f"{name}:make"


def test_a_zoo_name(here):
    built = zoo.resolve("llama-tiny", batch=3, seq=8, dtype="bf16")
    assert (built.name, built.samples_per_step, built.tokens_per_step, built.dtype) == ("llama-tiny", 3, 24, "bf16")


def test_an_unknown_name_names_the_nearest(here):
    with pytest.raises(UnknownName, match="unknown model 'gtp2-xl'; did you mean 'gpt2-xl'"):
        zoo.resolve("gtp2-xl")


# Hugging Face


@pytest.mark.parametrize(
    "config, kind, tokens",
    [
        (LLAMA, "LlamaForCausalLM", 2 * 16),
        (GPT2, "GPT2LMHeadModel", 2 * 16),
        (BERT, "BertForMaskedLM", 2 * 16),
        (BERT | {"architectures": ["BertForSequenceClassification"]}, "BertForSequenceClassification", 2 * 16),
        (BERT | {"architectures": ["BertForTokenClassification"]}, "BertForTokenClassification", 2 * 16),
        (T5, "T5ForConditionalGeneration", 2 * 2 * 16),
        (VIT, "ViTForImageClassification", 0),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_config_file_trains_on_real_and_on_fake_tensors(here, config, kind, tokens):
    pytest.importorskip("transformers")
    spec = write_config(here, config)
    options = {"batch": 2} | ({"seq": 16} if tokens else {})
    built = zoo.resolve(spec, **options)
    loss = zoo.loss_of(built.model(**built.batch))
    loss.backward()
    assert type(built.model).__name__ == kind
    assert loss.isfinite()
    assert (built.samples_per_step, built.tokens_per_step, built.dtype) == (2, tokens, "fp32")
    with FakeTensorMode(), torch.device("cpu"):
        fake = zoo.resolve(spec, **options, dtype="bf16")
        zoo.loss_of(fake.model(**fake.batch)).backward()
    assert all(isinstance(tensor, FakeTensor) for tensor in (*fake.model.parameters(), *fake.model.buffers()))
    assert {parameter.dtype for parameter in fake.model.parameters()} == {torch.bfloat16}


def test_the_number_format_is_the_configs_own(here):
    pytest.importorskip("transformers")
    assert zoo.resolve(write_config(here, LLAMA | {"dtype": "bfloat16"}), batch=1, seq=4).dtype == "bf16"


def test_a_folder_with_a_config_and_adapters_on_it(here):
    pytest.importorskip("transformers")
    write_config(here, LLAMA)
    built = zoo.resolve(str(here), batch=1, seq=4, lora=2)
    zoo.loss_of(built.model(**built.batch)).backward()
    assert {name.split(".")[-2] for name, parameter in built.model.named_parameters() if parameter.grad is not None} == {"thin", "wide"}


@pytest.mark.parametrize(
    "config, words",
    [
        ({"model_type": "lamma"}, "does not know the model_type 'lamma'"),
        ({"hidden_size": 16}, 'has no "model_type"'),
        ([1, 2], 'has no "model_type"'),
        (LLAMA | {"num_attention_heads": "two"}, "config.json"),
        ({"model_type": "whisper"}, "trained for no task that a batch can be made up for"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(here, config, words):
    pytest.importorskip("transformers")
    with pytest.raises(BadInput, match=words) as caught:
        zoo.resolve(write_config(here, config))
    assert "\n" not in str(caught.value)


def test_a_text_longer_than_the_config_allows_is_refused(here):
    pytest.importorskip("transformers")
    with pytest.raises(BadInput, match="max_position_embeddings 32, and seq is 33"):
        zoo.resolve(write_config(here, GPT2), seq=33)


def test_files_that_are_no_config(here):
    with pytest.raises(BadFile, match=r"cannot read missing\.json: No such file"):
        zoo.resolve("missing.json")
    (here / "broken.json").write_text("{")
    with pytest.raises(BadFile, match=r"broken\.json is not JSON"):
        zoo.resolve("broken.json")
    with pytest.raises(BadFile, match="someone/model is no file here"):
        zoo.resolve("someone/model")


def test_without_transformers_the_package_to_install_is_named(here, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(BadInput, match=r"pip install tierwise\[huggingface\]"):
        zoo.resolve(write_config(here, LLAMA))


# factories

GOOD = """
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
            nn.init.trunc_normal_(self.layers[0].weight)

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return {"loss": x.square().mean()}

    def make(batch=3):
        return Model(), {"x": torch.randn(batch, 8)}
"""


def test_a_factory_in_the_current_directory(here):
    spec = write_factory(here, GOOD)
    path = list(sys.path)
    assert zoo.resolve(spec).samples_per_step == 3
    built = zoo.resolve(spec, batch=5, dtype="bf16", lora=2)
    zoo.loss_of(built.model(**built.batch)).backward()
    assert (built.samples_per_step, built.tokens_per_step, built.dtype) == (5, 0, "bf16")
    assert sys.path == path


def test_a_factory_on_fake_tensors_may_truncate_normals_and_convert(here):
    spec = write_factory(here, GOOD.replace("return Model(),", "return Model().half(),"))
    with FakeTensorMode(), torch.device("cpu"):
        assert zoo.resolve(spec).dtype == "fp16"
        built = zoo.resolve(spec, dtype="bf16")
        zoo.loss_of(built.model(**built.batch)).backward()
    assert all(isinstance(tensor, FakeTensor) for tensor in built.model.parameters())
    assert {parameter.dtype for parameter in built.model.parameters()} == {torch.bfloat16}


def test_a_model_wrapped_by_peft(here):
    pytest.importorskip("peft")
    spec = write_factory(here, GOOD.replace("return Model(), {", 'return peft.get_peft_model(Model(), config), {').replace(
        "    def make", '    import peft\n    config = peft.LoraConfig(r=2, target_modules=["0", "1"])\n\n    def make'))  # fmt: skip
    built = zoo.resolve(spec)
    zoo.loss_of(built.model(**built.batch)).backward()
    assert len([parameter for parameter in built.model.parameters() if parameter.grad is not None]) == 4


@pytest.mark.parametrize(
    "body, words",
    [
        ("def make():\n    helper()\n\ndef helper():\n    raise ValueError('size')", "users_code:make raised ValueError: size at users_code.py:7"),
        ("def make():\n    return nn.Linear('a', 2), {}", r"raised TypeError: .* at users_code.py:4"),
        ("def make():\n    return 3", r"users_code.py:3 returned int; return \(model, batch\)"),
        ("def make():\n    return 1, 2, 3", "returned a tuple of 3"),
        ("def make():\n    return 'model', {}", "returned str as its model"),
        ("def make():\n    return nn.Linear(2, 2), [1]", "returned a list as its batch"),
        ("def make():\n    return nn.Linear(2, 2), {}", "returned an empty dict as its batch"),
        ("def make():\n    return nn.Linear(2, 2), {'x': 1}", "returned a batch with 'x': int"),
        ("def make(size):\n    return size", "cannot be called as it stands: missing a required argument: 'size'"),
        ("make = 3", "users_code:make is a int, not a function"),
        ("def maker():\n    pass", "users_code has no 'make'; did you mean 'maker'"),
        ("import not_a_package", "needs 'not_a_package', which is not installed, at users_code.py:3"),
        ("1 / 0", "importing users_code for users_code:make raised ZeroDivisionError: division by zero at users_code.py:3"),
        ("def make(:", "raised SyntaxError: .* at users_code.py:3"),
    ],
)  # fmt: skip
def test_a_factory_that_does_not_work_is_named_with_its_place(here, body, words):
    with pytest.raises(BadInput, match=words) as caught:
        zoo.resolve(write_factory(here, body))
    assert "\n" not in str(caught.value)


def test_a_factory_that_reads_values_is_told_so_on_fake_tensors(here):
    spec = write_factory(here, "def make():\n    rate = torch.linspace(0, 1, 3)[1].item()\n    return rate")
    with FakeTensorMode(), torch.device("cpu"), pytest.raises(BadInput, match=r"at users_code.py:4; .* without \.item\(\)"):
        zoo.resolve(spec)


def test_options_that_a_factory_has_no_parameter_for(here):
    with pytest.raises(BadInput, match=r"seq was given, and users_code:make at users_code.py:15 has no parameter 'seq'"):
        zoo.resolve(write_factory(here, GOOD), seq=8)


def test_a_module_that_is_not_there(here):
    with pytest.raises(BadInput, match=r"there is no module 'nowhere' for nowhere.at_all:make; looked in"):
        zoo.resolve("nowhere.at_all:make")
