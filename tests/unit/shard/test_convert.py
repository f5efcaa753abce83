"""GGUF to Hugging Face folder: the same logits, the same tokens, all or nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from shard import convert
from shard.convert import convert_gguf, end_of_generation_ids
from shared.models.errors import ModelUnavailable
from shared.models.fingerprint import stored_tensors
from shared.models.folder import check_folder, read_config
from shared.models.progress import Progress
from tests.conftest import TinyModels
from tests.support.default_model import default_model_folder
from tests.support.model_files import write_gguf

TEXTS = (
    "The mesh serves a model.",
    "Wie schön! 你好 😀",
    "<|im_start|>user\nx<|im_end|>\n",
    "def add(a, b):\n    return a",
)


@pytest.fixture(scope="module")
def original(tiny_model: TinyModels) -> Path:
    """The folder that the GGUF was made from."""
    return tiny_model("qwen2")


@pytest.fixture(scope="module")
def gguf(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 GGUF of it."""
    return write_gguf(original, tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def converted(gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That GGUF as a folder again, without loss."""
    folder = tmp_path_factory.mktemp("converted") / "tiny"
    convert_gguf(gguf, folder, dtype="float32")
    return folder


def logits_of(folder: Path) -> torch.Tensor:
    """What the model makes of a few tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return torch.as_tensor(model(torch.tensor([[5, 17, 101, 33, 250]])).logits)


def test_the_converted_model_computes_the_same(original: Path, converted: Path):
    """Bit for bit: a float32 GGUF stored as float32 loses nothing on either way."""
    assert torch.equal(logits_of(converted), logits_of(original))


def test_a_tied_head_stays_tied(converted: Path):
    """No second copy of the embedding is stored."""
    names = {tensor.name for tensor in stored_tensors(converted)}
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


def test_the_tokenizer_gives_the_same_tokens(original: Path, converted: Path):
    """Vocabulary, merges and special tokens survive; the rule for splitting words is the one the file names."""
    before, after = (PreTrainedTokenizerFast.from_pretrained(folder) for folder in (original, converted))
    before.backend_tokenizer.pre_tokenizer = after.backend_tokenizer.pre_tokenizer
    for text in TEXTS:
        assert after(text).input_ids == before(text).input_ids
        assert after.decode(after(text).input_ids) == text
    assert after.eos_token == "<|im_end|>"


def test_the_chat_template_renders_the_same(original: Path, converted: Path):
    """It travels inside the GGUF."""
    before, after = (PreTrainedTokenizerFast.from_pretrained(folder) for folder in (original, converted))
    messages = [{"role": "user", "content": "hello"}]
    rendered = [t.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) for t in (before, after)]
    assert rendered[0] == rendered[1]
    assert rendered[0].endswith("<|im_start|>assistant\n")


def test_every_token_that_ends_an_answer_is_written_down(converted: Path):
    """A GGUF names one; llama.cpp, and we, also stop at others that end answers by name."""
    assert read_config(converted).eos_ids == {0, 2}
    generation = json.loads((converted / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [2, 0]
    assert not {"temperature", "top_p", "do_sample"} & set(generation), "a GGUF recommends nothing"


def test_ordinary_tokens_never_end_an_answer(original: Path):
    """Only special tokens count, whatever their text."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(original)
    tokenizer.add_tokens(["</s>"])
    assert len(tokenizer) - 1 not in end_of_generation_ids(tokenizer)


@pytest.mark.parametrize("dtype", convert.STORED_DTYPES)
def test_the_stored_dtype_is_what_was_asked_for(gguf: Path, tmp_path: Path, dtype: str):
    """In the weights, and in the config that nodes read."""
    convert_gguf(gguf, tmp_path / "out", dtype=dtype)
    names = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
    assert {tensor.dtype for tensor in stored_tensors(tmp_path / "out")} == {names[dtype]}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == dtype
    check_folder(tmp_path / "out")


def test_progress_counts_tensors(gguf: Path, tmp_path: Path):
    """Every phase is announced, and the long one is counted to its end."""
    seen: list[Progress] = []
    convert_gguf(gguf, tmp_path / "out", progress=seen.append)
    assert {"Reading tokenizer", "Reading weights", "Writing safetensors"} == {progress.task for progress in seen}
    assert any(progress.unit == "tensors" and progress.is_finished for progress in seen)


def test_a_file_that_lacks_a_tensor_is_refused(original: Path, tmp_path: Path):
    """Transformers would fill it with random numbers."""
    path = write_gguf(original, tmp_path / "lacking.gguf", leave_out="blk.3.ffn_up.weight")
    with pytest.raises(ModelUnavailable, match=r"lacks 1 of the model's tensors, among them .*layers\.3\.mlp\.up_proj"):
        convert_gguf(path, tmp_path / "out")
    assert [entry.name for entry in tmp_path.iterdir()] == ["lacking.gguf"]


def test_an_interrupted_conversion_leaves_nothing(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Ctrl-C while files are being written."""

    def interrupted(folder: Path) -> None:
        assert any(folder.iterdir())
        raise KeyboardInterrupt

    monkeypatch.setattr(convert, "_make_durable", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert_gguf(gguf, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_conversion_left_is_removed(gguf: Path, tmp_path: Path):
    """SIGKILL leaves a folder of another name, which the next conversion clears away."""
    stale = tmp_path / ".out.4711.partial"
    stale.mkdir()
    (stale / "model.safetensors").write_bytes(b"half")
    convert_gguf(gguf, tmp_path / "out")
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_the_command_leaves_an_existing_folder_alone(gguf: Path, tmp_path: Path):
    """Nothing is overwritten."""
    result = CliRunner().invoke(convert.main, [str(gguf), str(tmp_path)])
    assert result.exit_code == 1
    assert "exists already" in result.output


@pytest.fixture(scope="module")
def default_tokenizer() -> PreTrainedTokenizerFast:
    """The converted default model's tokenizer, loaded as the gateway does."""
    return PreTrainedTokenizerFast.from_pretrained(default_model_folder())


@pytest.mark.real_model
def test_template_and_token_ids_are_qwens(default_tokenizer: PreTrainedTokenizerFast):
    """The ids that Qwen2.5's own tokenizer gives for its own template's output."""
    messages = [{"role": "user", "content": "Hello, world! 123"}]
    text = default_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nHello, world! 123<|im_end|>\n<|im_start|>assistant\n"
    )
    system = [151644, 8948, 198, 2610, 525, 1207, 16948, 11, 3465, 553, 54364, 14817, 13, 1446, 525, 264, 10950]
    rest = [17847, 13, 151645, 198, 151644, 872, 198, 9707, 11, 1879, 0, 220, 16, 17, 18, 151645, 198]
    assert default_tokenizer(text, add_special_tokens=False).input_ids == [*system, *rest, 151644, 77091, 198]


@pytest.mark.real_model
def test_text_is_composed_before_it_is_cut(default_tokenizer: PreTrainedTokenizerFast):
    """Qwen's normalizer, which a GGUF does not carry: a letter and its accent are one character."""
    assert default_tokenizer("cafe\u0301").input_ids == default_tokenizer("café").input_ids
