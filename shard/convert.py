"""GGUF → Hugging Face folder, once: ``python -m shard.convert model.gguf folder``.

transformers reads the GGUF (names, config, tokenizer, dequantization) through its public
`from_pretrained(gguf_file=…)`; what is added here is everything around it: the result appears under its
name only when it is complete, a checkpoint with missing tensors is refused, and the end-of-generation
ids that llama.cpp derives from token texts are written down, since a GGUF names only one of them.

Peak memory is the model in the stored dtype, the mapped file and one tensor in float32.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from shared import parent_watch
from shared.cli.display import open_display
from shared.models.errors import ModelUnavailable
from shared.models.progress import Progress, ProgressSink, ignore_progress

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

STORED_DTYPES: Final = ("bfloat16", "float16", "float32")
DEFAULT_DTYPE: Final = "bfloat16"
"""Half the bytes of float32 for a rounding far below that of the quantization; docs/decisions holds figures."""

END_OF_GENERATION_TOKENS: Final = frozenset(
    {
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|eom_id|>",
        "<|eot|>",
        "</s>",
        "<EOT>",
        "_<EOT>",
        "<|end_of_sentence|>",
        "<｜end▁of▁sentence｜>",  # noqa: RUF001 - DeepSeek spells its token with these characters
    }
)
"""Special tokens that end an answer whatever the metadata says, as in llama.cpp's `special_eog_ids`."""

_PARTIAL = ".partial"


def convert_gguf(
    source: Path,
    destination: Path,
    *,
    dtype: str = DEFAULT_DTYPE,
    sampling: Mapping[str, float | None] | None = None,
    progress: ProgressSink = ignore_progress,
) -> None:
    """Write the model of a GGUF file as config, tokenizer and safetensors into a new folder.

    Callers make sure that nobody else converts to the same destination (`shared.models` holds a lock).
    An interrupted conversion leaves only a `.partial` folder, which the next one removes.

    Args:
        source: The GGUF file.
        destination: The folder to create; its parent must exist.
        dtype: Element type of the stored weights, one of `STORED_DTYPES`.
        sampling: `temperature` and `top_p` that the model's authors recommend, for `generation_config.json`.
        progress: Told about each phase.

    Raises:
        ModelUnavailable: `conversion_failed`, with transformers' reason.
    """
    _remove_stale(destination)
    partial = destination.with_name(f".{destination.name}.{os.getpid()}{_PARTIAL}")
    partial.mkdir()
    try:
        _write_folder(source, partial, dtype, sampling or {}, progress)
        _make_durable(partial)
        partial.rename(destination)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _write_folder(
    source: Path, folder: Path, dtype: str, sampling: Mapping[str, float | None], progress: ProgressSink
) -> None:
    """Tokenizer first: it is what fails soonest when transformers does not know the model."""
    progress(Progress("Reading tokenizer", unit="steps"))
    try:
        tokenizer = _read_tokenizer(source)
        progress(Progress.finished("Reading tokenizer"))
        progress(Progress("Reading weights", unit="tensors"))
        with _tqdm_as_progress(progress):
            model = _read_model(source, dtype)
        progress(Progress.finished("Reading weights"))
    except (ValueError, OSError, KeyError, NotImplementedError, RuntimeError) as error:
        raise ModelUnavailable(
            "conversion_failed", f"transformers cannot read {source.name}: {error}", path=str(source)
        ) from error
    model.generation_config.eos_token_id = end_of_generation_ids(tokenizer)
    recommended = {name: value for name, value in sampling.items() if value is not None}
    for name, value in recommended.items():
        setattr(model.generation_config, name, value)
    model.generation_config.do_sample = True if recommended else None
    tokenizer.model_max_length = min(tokenizer.model_max_length, model.config.max_position_embeddings)
    progress(Progress("Writing safetensors", unit="steps"))
    tokenizer.save_pretrained(folder)
    with _tqdm_as_progress(ignore_progress):
        model.save_pretrained(folder)
    progress(Progress.finished("Writing safetensors"))


def _read_tokenizer(source: Path) -> PreTrainedTokenizerBase:
    """The tokenizer, with the normalizer that its class has and a GGUF does not mention."""
    from tokenizers.normalizers import NFC  # noqa: PLC0415 - comes with transformers
    from transformers import AutoTokenizer  # noqa: PLC0415 - seconds of imports, not needed for --help

    tokenizer: Any = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    if type(tokenizer).__name__ == "Qwen2Tokenizer" and tokenizer.backend_tokenizer.normalizer is None:
        tokenizer.backend_tokenizer.normalizer = NFC()
    result: PreTrainedTokenizerBase = tokenizer
    return result


def _read_model(source: Path, dtype: str) -> PreTrainedModel:
    """Every tensor dequantized in float32 and stored as `dtype`.

    Raises:
        ValueError: If the file lacks tensors of the model, which transformers would fill at random.
    """
    import torch  # noqa: PLC0415 - as above
    from transformers import AutoModelForCausalLM, GgufConfig  # noqa: PLC0415 - as above

    loaded: Any = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=getattr(torch, dtype),
        output_loading_info=True,
    )
    model: PreTrainedModel = loaded[0]
    lacking = sorted(str(key) for key in (*loaded[1]["missing_keys"], *loaded[1]["mismatched_keys"]))
    if lacking:
        raise ValueError(f"the file lacks {len(lacking)} of the model's tensors, among them {lacking[0]}")
    return model


def end_of_generation_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokenizer's EOS first, then its special tokens that end an answer by name."""
    ids = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    for token_id, token in sorted(tokenizer.added_tokens_decoder.items()):
        if token.special and token.content in END_OF_GENERATION_TOKENS and token_id not in ids:
            ids.append(int(token_id))
    return ids


@contextlib.contextmanager
def _tqdm_as_progress(progress: ProgressSink) -> Iterator[None]:
    """Route transformers' bars to `progress`: tqdm documents `display` as the method for other front ends."""
    tqdm: Any = importlib.import_module("tqdm.std").tqdm  # comes with transformers, without types

    def display(bar: Any, *_: Any, **__: Any) -> bool:
        values = bar.format_dict
        if values["total"]:
            progress(Progress("Reading weights", int(values["n"]), int(values["total"]), "tensors"))
        return True

    def close(bar: Any) -> None:
        display(bar)
        bar.disable = True

    originals = tqdm.display, tqdm.close
    tqdm.display, tqdm.close = display, close
    try:
        yield
    finally:
        tqdm.display, tqdm.close = originals


def _remove_stale(destination: Path) -> None:
    for partial in destination.parent.glob(f".{destination.name}.*{_PARTIAL}"):
        shutil.rmtree(partial)


def _make_durable(folder: Path) -> None:
    """Readable like any other file, and on disk before the folder gets its name."""
    for path in folder.iterdir():
        path.chmod(0o644)
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _option(flag: str, variable: str, help: str, **settings: Any) -> Callable[[Any], Any]:  # noqa: A002 - click's word
    return click.option(flag, envvar=f"MESHNET_CONVERT_{variable}", show_envvar=True, help=help, **settings)


@click.command(context_settings={"show_default": True})
@click.argument("source", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("destination", type=click.Path(path_type=Path))
@_option("--dtype", "DTYPE", "Element type of the weights.", type=click.Choice(STORED_DTYPES), default=DEFAULT_DTYPE)
@_option("--temperature", "TEMPERATURE", "What its authors recommend, for generation_config.json.", type=float)
@_option("--top-p", "TOP_P", "What its authors recommend, for generation_config.json.", type=float)
@_option("--progress-json", "PROGRESS_JSON", "Print progress as JSON lines, for a parent process.", is_flag=True)
@_option("--exit-with-parent", "EXIT_WITH_PARENT", "End when the process that started this one is gone.", is_flag=True)
def main(
    source: Path, destination: Path, *, dtype: str, progress_json: bool, exit_with_parent: bool, **sampling: Any
) -> None:
    """Turn the GGUF file SOURCE into the Hugging Face folder DESTINATION.

    The folder appears only when it is complete. An existing one is left alone.
    """
    if exit_with_parent:
        parent_watch.exit_with_parent()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if destination.exists():
        raise click.ClickException(f"{destination} exists already")
    destination.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open_display(as_json=progress_json) as display:
            convert_gguf(source, destination, dtype=dtype, sampling=sampling, progress=display.show)
    except ModelUnavailable as error:
        raise click.ClickException(error.message) from error


if __name__ == "__main__":
    sys.exit(main())
