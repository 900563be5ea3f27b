"""Which causal language models of the installed transformers replay: `python -m bench models --plot docs/models.md`.

    every class of AutoModelForCausalLM -> a tiny random model -> replay of five rows  <->  its own forward of each row

packed                  all layers run packed rows
packed, rows in mixers  layers that carry state run their mixer on rows, everything else is packed
refused                 replay raises; the reason is in the table
not compared            no tiny model could be made by the rules below, or its own forward does not run

A class passes if log-probs and gradients of all weights are those of each row alone. That a leak would be seen is
checked as well: behind other tokens log-probs must differ. Float32, on the CPU.

The page also has the table of refusals. `python -m bench.cases.models` writes that table alone, in a second.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import logging
import re
import signal
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tensordict import TensorDict
from torch import Tensor
from transformers.models.auto import configuration_auto, modeling_auto

from bench.harness.measure import NotExact, progress, torch_threads
from bench.harness.registry import case
from bench.harness.report import Row, RowGroups
from maskpack.adapters.transformers import refusals, replayable
from maskpack.errors import ReplayError
from maskpack.replay import response_log_probs

ROWS = ((2, 3), (5, 6), (1, 1), (3, 4), (4, 5))
"""Tokens of each prompt and response."""
LIMIT, GRADIENT_LIMIT = 2e-5, 1e-4
"""Of log-probs, times the largest one; of a gradient, relative. Wider than in tests, because weights are large."""
VISIBLE = 1e-3  # what a leak has to change
PATIENCE = 60  # seconds for a class
MOST = 20_000_000  # weights
VOCABULARY = 97
SMALL: Mapping[str, Any] = {
    "vocab_size": VOCABULARY, "max_position_embeddings": 64, "n_positions": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "d_ff", "ffn_hidden_size"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads", "attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "multi_query_group_num"), 2),
    **dict.fromkeys(("head_dim", "kv_channels", "v_head_dim", "qk_nope_head_dim", "rotary_dim"), 8),
    "qk_rope_head_dim": 8, "q_lora_rank": 16, "kv_lora_rank": 16,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_top_k", "num_experts_per_token", "moe_topk"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_hidden_size"), 16),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts"), 1),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "num_mamba_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), 8),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size", "mamba_d_ssm"), 8),
    **dict.fromkeys(("mamba_n_groups", "n_groups", "mamba_ngroups"), 1),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 8), "mamba_expand": 2, "expand": 2, "mamba_dt_rank": 4,
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_num_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 8),
    "full_attention_interval": 2,
    **dict.fromkeys(("attention_dropout", "hidden_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "dropout"), 0.0),
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY,
}  # fmt: skip
"""Options by name. Those of each class that are none of its own are left out."""
_ZAMBA = {"hybrid_layer_ids": [1, 3], "layers_block_type": ["mamba", "hybrid"] * 2}
_LFM2 = {"layer_types": ["conv", "full_attention"] * 2}
_GEMMA = {"num_kv_shared_layers": 0}
SPECIAL: Mapping[str, Mapping[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 48, "moe_top_k": 2},
    },
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n": _GEMMA, "gemma3n_text": _GEMMA, "gemma4": _GEMMA, "gemma4_text": _GEMMA, "gemma4_unified": _GEMMA,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": _LFM2, "lfm2_moe": _LFM2,
    "longcat_flash": {"ffn_hidden_size": 48, "expert_ffn_hidden_size": 16, "zero_expert_num": 2},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "nemotron_h": {"hybrid_override_pattern": "M*M*"},
    "recurrent_gemma": {"lru_width": 32, "attention_window_size": 16, "conv1d_width": 4},
    "reformer": {"is_decoder": True},
    "xmod": {"default_language": "en_XX", "is_decoder": True},
    "zamba": _ZAMBA, "zamba2": _ZAMBA,
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
"""Options of some kinds, which the rules by name do not find."""
LEFT_OUT: Sequence[Sequence[str]] = ((), ("head_dim",), ("num_key_value_heads",), ("head_dim", "num_key_value_heads"))
"""Options that are left out one way after the other, until the model of a class runs."""


@dataclass(frozen=True)
class Found:
    """What became of a class: its way, the reason if it did not pass, how far log-probs are off."""

    name: str
    way: str
    reason: str = ""
    off: float = 0.0


PACKED, MIXED, REFUSED, UNKNOWN, WRONG = (
    "packed", "packed, rows in mixers", "refused", "not compared", "wrong",
)  # fmt: skip


def classes(names: Sequence[str] = ()) -> Iterator[tuple[str, Any, Any]]:
    """(kind, configuration class, model class) of all causal language models, or of those with such class names."""
    for kind, name in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        for one in (name,) if isinstance(name, str) else name:
            if not names or one in names:
                config = configuration_auto.CONFIG_MAPPING_NAMES.get(kind)
                yield kind, getattr(transformers, str(config), None), getattr(transformers, one, None)


def tiny(kind: str, config_class: Any, model_class: Any, left_out: Sequence[str]) -> Any:
    """A small random model, in eval mode, whose weights are large enough that tokens differ. Of a class for text alone
    that comes with the configuration of a model for images, too, the configuration of its text."""
    text = getattr(config_class, "sub_configs", {}).get("text_config")
    config_class = text if text and not hasattr(config_class, "vocab_size") else config_class
    known = {field.name for field in dataclasses.fields(config_class)} - {*left_out}
    given = {name: value for name, value in {**SMALL, **SPECIAL.get(kind, {})}.items() if name in known}
    config = config_class(**given)
    with torch.device("meta"):
        size = sum(weight.numel() for weight in model_class(copy.deepcopy(config)).parameters())
    if size > MOST:
        raise ValueError(f"the rules leave {size:,} weights")
    torch.manual_seed(1)
    model = model_class(config).float().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4 if weight.dim() > 1 else 1)
    return model


def batch_of(rows: Sequence[tuple[int, int]] = ROWS) -> TensorDict:
    """Prompts padded on the left, responses on the right."""
    source = torch.Generator().manual_seed(0)
    prompt, response = (max(row[side] for row in rows) for side in (0, 1))
    mask = torch.zeros(len(rows), prompt + response, dtype=torch.int64)
    for row, (p, r) in enumerate(rows):
        mask[row, prompt - p : prompt + r] = 1
    ids = torch.randint(3, VOCABULARY, mask.shape, generator=source) * mask
    return TensorDict({"input_ids": ids, "attention_mask": mask, "responses": ids[:, prompt:]}, [len(rows)])


def alone(model: Any, batch: TensorDict, before: int = 0) -> Tensor:
    """Log-probs of all response tokens, each row in a forward pass of its own, or behind `before` other tokens."""
    out: list[Tensor] = []
    width = batch["responses"].shape[1]
    for ids, mask in zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True):
        row, scored = ids[mask], int(mask[-width:].sum())
        row = torch.cat([torch.arange(5, 5 + before), row])
        scores = model(input_ids=row[None], use_cache=False).logits[0].float().log_softmax(-1)
        out.append(scores[-1 - scored : -1].gather(-1, row[-scored:, None])[:, 0])
    return torch.cat(out)


def gradients(model: Any, log_probs: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    (log_probs * torch.linspace(0.3, 1.3, log_probs.numel())).sum().backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def look_at(kind: str, config_class: Any, model_class: Any) -> Found:
    """Makes a model of the class, and compares its replay with each row alone."""
    name, batch, why = getattr(model_class, "__name__", kind), batch_of(), ""
    for left_out in LEFT_OUT:
        try:
            model = tiny(kind, config_class, model_class, left_out)
            plain = copy.deepcopy(model)
            truth = alone(plain, batch)
            with torch.no_grad():
                visible = float((alone(plain, batch, before=4) - truth).abs().max())
            break
        except TimeoutError:
            raise
        except Exception as error:  # any of 200 classes, at sizes that nobody promised
            why = why or f"{type(error).__name__}: {error}"
    else:
        return Found(name, UNKNOWN, why)
    if not truth.isfinite().all() or not visible > VISIBLE:
        return Found(name, UNKNOWN, f"a leak would change log-probs by {visible:.1g}")
    try:
        ready = replayable(model)
        seen: Any = response_log_probs(ready, batch)
    except ReplayError as error:
        return Found(name, REFUSED, str(error))
    off = float((seen.values() - truth).detach().abs().max())
    want, got = gradients(plain, truth), gradients(model, seen.values())
    zero = 1e-6 * max(float(one.norm()) for one in want.values())  # a bias of keys has none but rounding
    far = [
        name for name, one in want.items()
        if name not in got or float((got[name] - one).norm()) > GRADIENT_LIMIT * float(one.norm()) + zero
    ]  # fmt: skip
    if off > LIMIT * max(1.0, float(truth.detach().abs().max())) or far or want.keys() != got.keys():
        return Found(name, WRONG, f"log-probs are off by {off:.2g}, gradients of {far[:3]}", off)
    return Found(name, MIXED if getattr(ready, "mixers", None) else PACKED, "", off)


def sweep(names: Sequence[str] = ()) -> list[Found]:
    found: dict[str, Found] = {}  # several kinds may have one class
    for kind, config_class, model_class in classes(names):
        with _patience(kind):
            one = Found(kind, UNKNOWN, "its own code takes too long")
            with contextlib.suppress(TimeoutError):
                one = look_at(kind, config_class, model_class)
        if one.name not in found or found[one.name].way == UNKNOWN:
            found[one.name] = one
        progress(f"{one.name}: {one.way} {one.reason[:150]}")
        gc.collect()
    return [found[name] for name in sorted(found)]


@contextlib.contextmanager
def _patience(kind: str) -> Iterator[None]:
    def late(*_: Any) -> None:
        raise TimeoutError(kind)

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(PATIENCE)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


PAGE = Path(__file__).parents[2] / "docs/models.md"


def page(found: Sequence[Found]) -> str:
    """Both tables in Markdown."""
    counts = Counter(one.way for one in found)
    total = ", ".join(f"{counts[way]} {way}" for way in (PACKED, MIXED, REFUSED, UNKNOWN, WRONG))
    lines = [
        "# Models",
        "",
        f"What [replay](replay.md) does with the {len(found)} causal language models of transformers "
        f"{transformers.__version__}, each as a tiny random model whose log-probs and gradients are compared with "
        f"those of its own forward, each row alone, in float32: {total}.",
        "",
        "Made by `python -m bench models --plot docs/models.md`. *Rows in mixers*: layers that carry state run "
        "on rows, and everything else is packed. *Not compared*: the script makes no small model that runs; the "
        "self-check of the first batch tells. [Refusals](#refusals) has the messages; those about rows are in "
        "[Replay](replay.md#rows).",
        "",
        "| class | way | why not |",
        "|---|---|---|",
    ]
    lines += [f"| `{one.name}` | {one.way} | {_short(one.reason)} |" for one in found]
    return with_refusals("\n".join([*lines, ""]))


def with_refusals(text: str) -> str:
    """The page with the table of refusals that the code raises now."""
    about = (
        "The messages with which [replay](replay.md) refuses a model or a set-up, as "
        "`maskpack/adapters/transformers/refusals.py` has them. Words in *italics* stand for what a message names."
    )
    models = text.partition("\n## Refusals\n")[0]
    return f"{models}\n## Refusals\n\n{about}\n\n{refusals.table()}\n"


def _short(reason: str) -> str:
    first = re.sub(r"\s+", " ", reason).split("; expected")[0].removeprefix("replayable: ")
    return first[:160].replace("|", "\\|")


@case(
    "models",
    help="which causal language models of transformers replay",
    on="cpu",
    rows=None,
    plots="the page of all models",
    tiny={"only": ("Qwen3ForCausalLM", "BloomForCausalLM", "MusicgenForCausalLM")},
)
def run(rounds: int, *, only: Sequence[str] = (), plot: Path | None = None) -> RowGroups:
    """How many there are of each way; `rounds` is not used. Raises NotExact if a class passes with other numbers."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), torch_threads(1):
            warnings.simplefilter("ignore")
            found = sweep(only)
    finally:
        logging.disable(logging.NOTSET)
    if plot is not None:
        plot.write_text(page(found))
    if wrong := [one.name for one in found if one.way == WRONG]:
        raise NotExact(f"models: replay of {', '.join(wrong)} has other numbers than each row alone.")
    counts = Counter(one.way for one in found)
    yield [Row("models", way, count, "classes") for way, count in counts.items()]


if __name__ == "__main__":
    PAGE.write_text(with_refusals(PAGE.read_text()))
