"""What opening a GGUF file computes, kept in the user's cache: config, tokenizer, where tensors lie.

transformers makes a config and a tokenizer from the header in 3 to 15 seconds. A file is known by its
identity (`indexes.verified`): a changed or moved one is converted anew.
"""

import hashlib
import json
import logging
import math
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import torch

from offload_decode.common.errors import ModelError, OffloadDecodeWarning
from offload_decode.common.memory import give_back
from offload_decode.common.slow_work import at_work
from offload_decode.hf.compat import class_of, text_of
from offload_decode.hf.meta_device import Unfilled
from offload_decode.hf.rope_scaling import scalable, state_rope
from offload_decode.indexes.verified import cache_folder, identity, settled
from offload_decode.models.fingerprints import tokenizer_hash
from offload_decode.models.gguf import Header, StoredTensor, read_header

LOG = logging.getLogger(__name__)
KEPT = 16
"""Most files whose headers are kept, of up to 15 MB each; the least recently used go first."""
_NOT_KEPT = (
    "What was made of a GGUF file's header cannot be kept in {} ({}), so that every command makes it anew: "
    "free some space there, or name another folder by XDG_CACHE_HOME."
)
_FREQUENCIES = "rope_freqs.weight"
_LLAMA_3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_YARN = {
    "attn_factor": 1,
    "yarn_attn_factor": 1,
    "yarn_ext_factor": 1,
    "yarn_beta_fast": 32,
    "yarn_beta_slow": 1,
}
"""What YaRN is scaled with, as its authors have it, unless a header states another."""
TABLE = "token_embd.weight"
"""The table of embeddings."""
# How llama.cpp's converter changes weights of these architectures; others are widened by transformers.
PERMUTED, NORMS_WITH_ONE = ("llama",), ("gemma2", "gemma3")
ARCHITECTURES = (*PERMUTED, *NORMS_WITH_ONE, "qwen2", "qwen3")
_FORM = 3
_LEFT_S = 3600.0
_CONFIG, _TOKENIZER, _RECORD = "config.json", "tokenizer.json", "gguf.json"
_OF_TOKENS = "tokenizer.ggml."
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
_ENDS_OF_TEXTS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
"""What models write behind a text. Headers name one end of texts, or of turns, as theirs."""
_SIDES = ("padding_side", "truncation_side", "clean_up_tokenization_spaces", "model_max_length")


class Converted:
    """The config and the tokenizer of a GGUF file as transformers makes them, and the header's tensors."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def config(self) -> Any:
        """transformers' config."""
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(self.folder, local_files_only=True)

    @cached_property
    def tokenizer(self) -> Any:
        """transformers' tokenizer."""
        from transformers import PreTrainedTokenizerFast

        file = str(self.folder / _TOKENIZER)
        return PreTrainedTokenizerFast(tokenizer_file=file, **self._record["tokenizer"])

    @property
    def tokenizer_hash(self) -> str:
        return str(self._record["tokenizer_hash"])

    @property
    def ends(self) -> tuple[int, ...]:
        """Tokens that end an answer: those that the file states, and its ends of texts."""
        return tuple(self._record["ends"])

    @property
    def architecture(self) -> str:
        """As the file names it."""
        return str(self._record["architecture"])

    @property
    def names(self) -> dict[str, str]:
        """The names of tensors by transformers' names of the weights."""
        return dict(self._record["names"])

    @cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        """The file's tensors by name."""
        stated = self._record["tensors"].items()
        return {name: StoredTensor(kind, tuple(shape), start) for name, (kind, shape, start) in stated}

    @cached_property
    def _record(self) -> dict[str, Any]:
        record: dict[str, Any] = json.loads((self.folder / _RECORD).read_text(encoding="utf-8"))
        return record


_known: dict[str, Converted] = {}


def converted(path: Path) -> Converted:
    """What is kept of a file, which is converted at first sight. Raises `ModelError` as `read_header`.

    Where the cache cannot be written, a folder that goes with this process takes its place.
    """
    seen = identity(path)
    if seen is None:
        raise ModelError(f"{path} cannot be read: give another file")
    versions = [*map(version, ("transformers", "tokenizers", "gguf")), _FORM]
    name = hashlib.sha256(json.dumps([versions, seen]).encode()).hexdigest()
    if name not in _known or not _whole(_known[name].folder):  # where somebody has cleared the cache
        folder = headers_folder() / name
        _known[name] = Converted(folder if _whole(folder) else _made(path, folder, settled(seen)))
    with suppress(OSError):  # a read-only cache
        os.utime(_known[name].folder)
    return _known[name]


def _whole(folder: Path) -> bool:
    """Whether all of it is there: not where it was removed in part, or a crash left empty files."""
    try:
        sizes = json.loads((folder / _RECORD).read_text(encoding="utf-8"))["sizes"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def headers_folder() -> Path:
    """Where the headers of GGUF files are kept."""
    return cache_folder() / "gguf"


def _made(path: Path, folder: Path, keep: bool) -> Path:
    """Where the file is converted now: in `folder`, or in one that goes with this process."""
    made = tempfile.TemporaryDirectory(prefix="offload-decode-")
    with _quick_reader(), at_work(f"reading the header of {path.name}"):
        _convert(path, Path(made.name))
    give_back()  # hundreds of MB of what was read, which a plan would take for the program's own
    if keep and _kept(Path(made.name), folder):
        made.cleanup()
        return folder
    _temporary.append(made)
    return Path(made.name)


def _kept(converted: Path, folder: Path) -> bool:
    """Whether what was converted is now in `folder`; warns where the cache is read-only or full."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _beside(folder) as made:
            for file in converted.iterdir():  # copytree would hide why it failed in a list
                shutil.copy(file, made)
            with suppress(OSError):  # another process was faster, or left it in part
                made.rename(folder)
            if not _whole(folder):
                shutil.rmtree(folder, ignore_errors=True)
                with suppress(OSError):
                    made.rename(folder)
        _forget(folder.parent)
        return _whole(folder)
    except OSError as error:
        text = _NOT_KEPT.format(folder.parent, error.strerror or error)
        warnings.warn(OffloadDecodeWarning(text), stacklevel=2)
        return False


@contextmanager
def _beside(folder: Path) -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix=".", dir=folder.parent))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


_temporary: list[tempfile.TemporaryDirectory[str]] = []  # each removed as the process ends


def _forget(parent: Path) -> None:
    """Remove the folders used longest ago, and what killed conversions left."""
    found: list[tuple[float, Path]] = []
    left: list[tuple[float, Path]] = []
    for own in parent.iterdir():
        with suppress(OSError):  # another process removed it
            (left if own.name[0] == "." else found).append((own.stat().st_mtime, own))
    old = [own for seen, own in left if seen < time.time() - _LEFT_S]
    for oldest in [*old, *(own for _, own in sorted(found)[:-KEPT])]:
        shutil.rmtree(oldest, ignore_errors=True)


@contextmanager
def _quick_reader() -> Iterator[None]:
    """Inside, gguf's reader, by which transformers makes a config, takes the slices of a mapped file as plain
    arrays: those of its own class take four times as long, and twice the memory.
    """
    import gguf

    class Reader(gguf.GGUFReader):
        @property
        def data(self) -> Any:
            return self._plain

        @data.setter
        def data(self, mapped: Any) -> None:
            self._plain = np.asarray(mapped)

    module: Any = gguf
    before, module.GGUFReader = gguf.GGUFReader, Reader
    try:
        yield
    finally:
        module.GGUFReader = before


@contextmanager
def _named(path: Path, fields: dict[str, Any]) -> Iterator[None]:
    """`ModelError` where transformers looks up a special token that the vocabulary does not have."""
    try:
        yield
    except IndexError as error:
        tokens = fields.get(f"{_OF_TOKENS}tokens")
        for key, number in fields.items():
            special = key.startswith(_OF_TOKENS) and key.endswith("_token_id") and type(number) is int
            if special and type(tokens) is int and number >= tokens:
                raise ModelError(
                    f"{path} names token {number} as its {key.removeprefix(_OF_TOKENS)}, and has {tokens:,} "
                    "tokens: fetch another conversion of the model"
                ) from error
        raise


def _convert(path: Path, folder: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    header = read_header(path)
    LOG.info("reading the header of %s, once on this machine: three to fifteen seconds …", path.name)
    given = {"pretrained_model_name_or_path": str(path.absolute().parent), "gguf_file": path.name}
    config = AutoConfig.from_pretrained(**given)
    with _named(path, header.fields):
        tokenizer = AutoTokenizer.from_pretrained(**given, trust_remote_code=False)
    text, architecture = text_of(config), header.fields["general.architecture"]
    names = _names(header, text)
    if architecture in ARCHITECTURES:
        _check_all(path, header, names)
    _state_scaling(config, header.fields, architecture)
    if _FREQUENCIES in header.tensors:
        _state_frequencies(config, path, header.tensors[_FREQUENCIES])
    config.to_json_file(folder / _CONFIG)
    (folder / _TOKENIZER).write_text(tokenizer.backend_tokenizer.to_str(), encoding="utf-8")
    arguments = {name: getattr(tokenizer, name) for name in _SIDES if hasattr(tokenizer, name)}
    arguments |= {**tokenizer.special_tokens_map, "chat_template": tokenizer.chat_template}
    fields = (header.fields.get(_OF_TOKENS + name) for name in _ENDS)
    ends = {end for end in fields if type(end) is int and 0 <= end < len(tokenizer)}
    special = tokenizer.added_tokens_decoder.items()
    ends |= {number for number, token in special if token.special and str(token) in _ENDS_OF_TEXTS}
    record = {
        "architecture": architecture,
        "names": names,
        "sizes": {name: (folder / name).stat().st_size for name in (_CONFIG, _TOKENIZER)},
        "ends": sorted(ends),
        "tensors": header.tensors,
        "tokenizer": arguments,
        "tokenizer_hash": tokenizer_hash(tokenizer),
    }
    (folder / _RECORD).write_text(json.dumps(record), encoding="utf-8")


def _check_all(path: Path, header: Header, names: dict[str, str]) -> None:
    """`ModelError` for tensors that transformers knows nothing of: they would be left out without a word."""
    if unknown := sorted(header.tensors.keys() - {*names.values(), _FREQUENCIES}):
        raise ModelError(
            f"{path} holds {len(unknown)} tensors that transformers does not read, {unknown[0]} among them, "
            "and its numbers would be others without: give the checkpoint with safetensors"
        )


def _state_scaling(config: Any, fields: dict[str, Any], architecture: str) -> None:
    """The scaling of RoPE that a header states, where transformers has left it out; a factor alone is of a
    linear one, as in llama.cpp.
    """
    stated_factor, older = (
        fields.get(f"{architecture}.rope.{n}") for n in ("scaling.factor", "scale_linear")
    )
    factor = stated_factor or older  # 0 states none
    kind = fields.get(f"{architecture}.rope.scaling.type", "none" if factor in (None, 0, 1) else "linear")
    if kind == "none" or (kind == "linear" and not factor):
        return
    length = fields.get(f"{architecture}.rope.scaling.original_context_length")
    if kind not in ("linear", "yarn") or not _is_factor(factor):
        raise ModelError(f"its RoPE is scaled by '{kind!s:.40}': give the checkpoint with safetensors")
    if scalable(config).get("rope_type", "default") != "default":
        return
    for name, usual in _YARN.items():
        if (other := fields.get(f"{architecture}.rope.scaling.{name}", usual)) != usual:
            raise ModelError(
                f"its RoPE is scaled with {name}={other!s:.40}: give the checkpoint with safetensors"
            )
    stated = {"original_max_position_embeddings": length} if isinstance(length, int) else {}
    state_rope(config, rope_type=kind, factor=float(factor), **stated)


def _is_factor(factor: Any) -> TypeGuard[float]:
    return type(factor) in (int, float) and 0 < factor < math.inf


def _state_frequencies(config: Any, path: Path, tensor: StoredTensor) -> None:
    """Llama 3's scaling, of which a file holds what each frequency is divided by: with the parameters of its
    makers and the largest of the divisors as factor, transformers must come to the same.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    count = int(np.prod(tensor.shape, dtype=np.int64))
    plain = (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads) // 2
    if tensor.kind == 0 and count == plain:
        divisors = np.fromfile(path, np.float32, count, offset=tensor.start)
        scaled, base = deepcopy(config), float(scalable(config)["rope_theta"])
        state_rope(scaled, **_LLAMA_3, factor=float(divisors.max(initial=1.0)))
        frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](scaled, torch.device("cpu"))
        if np.allclose(base ** (-np.arange(count) / count) / frequencies.numpy(), divisors, rtol=1e-3):
            config.rope_parameters = scaled.rope_parameters
            return
    raise ModelError(
        f"{path} scales its RoPE in a way of its own ({_FREQUENCIES}): give the checkpoint with safetensors"
    )


def _names(header: Header, config: Any) -> dict[str, str]:
    """gguf's own table of names, asked for those of transformers' weights."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    architectures = {name: number for number, name in MODEL_ARCH_NAMES.items()}
    number = architectures.get(header.fields["general.architecture"])
    if number is None:
        return {}
    with Unfilled(), torch.device("meta"):
        model = class_of(config)(config)
    known = get_tensor_name_map(number, config.num_hidden_layers)
    found = {}
    for name in model.state_dict():
        stem, _, suffix = name.rpartition(".")
        own = f"{known.get_name(stem)}.{suffix}"
        if own in header.tensors:
            found[name] = own
    return found
