"""A stage of a pipeline: a contiguous range of a finished model's layers, cut out from outside.

The first stage begins with token ids, every other one with the hidden states of the stage before; the last
one ends with logits, every other one with hidden states for the stage after. A family is served so if its
decoder has `layers` and a `norm` and takes hidden states in place of token ids. What more it does at its ends
(some scale what they take in) the self-check finds out, which compares the whole pipeline with the uncut
model.

A stage does not wait until what it sent has arrived: it computes the next chunk meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from base.errors import ConfigError

MAX_SENT = 2
"""Number of chunks that are sent and not yet received, whose memory is kept."""


def split_layers(num_layers: int, num_stages: int, wanted: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Return how many layers each stage has: as many as `wanted`, or if that is empty, as equal as can be.

    The last ones have less, because the last stage also samples.

    Raises ConfigError if `wanted` is not such a split, or a stage would have no layer."""
    if num_stages > num_layers:
        raise ConfigError(
            f"pipeline_parallel: {num_stages} stages of {num_layers} layers; choose {num_layers} at most"
        )
    if not wanted:
        share, rest = divmod(num_layers, num_stages)
        return tuple(share + (stage < rest) for stage in range(num_stages))
    if len(wanted) != num_stages or sum(wanted) != num_layers or min(wanted) < 1:
        raise ConfigError(
            f"stage_layers: {list(wanted)} is not a split of {num_layers} layers into {num_stages} stages; "
            f"their sum has to be {num_layers}"
        )
    return wanted


class StageLink:
    """Owns one direction between two ranks. Both use it in the same order."""

    def __init__(self, group: dist.ProcessGroup, peer: int, device: torch.device) -> None:
        """Link to rank `peer` by a process group of the two alone."""
        self._group = group
        self._peer = peer
        self.device = device
        self._sent: deque[tuple[dist.Work | None, torch.Tensor]] = deque()

    def send(self, tensor: torch.Tensor) -> None:
        """Begin to send; on a GPU, after what its stream holds. Raises RuntimeError: the peer is lost."""
        if len(self._sent) == MAX_SENT:
            work, _ = self._sent.popleft()
            if work is not None:
                work.wait()
        tensor = tensor.contiguous()
        self._sent.append((dist.isend(tensor, self._peer, group=self._group), tensor))

    def receive(self, tensor: torch.Tensor) -> torch.Tensor:
        """Fill `tensor`; on a GPU, in order with its stream. Raises RuntimeError: the peer is lost."""
        dist.recv(tensor, self._peer, group=self._group)
        return tensor


class Stage:
    """One stage, as one of its ranks sees it. Belongs to the device thread."""

    def __init__(self, index: int, before: StageLink | None, after: StageLink | None) -> None:
        """Link to the ranks of the stages before and after; None at the ends."""
        self.index = index
        self._before = before
        self._after = after
        self.on_taken_in: Callable[[], None] = lambda: None
        """Called when a chunk's hidden states are there; on a GPU, in order with its stream."""

    @property
    def is_last(self) -> bool:
        return self._after is None

    def try_links(self) -> None:
        """Send something through the whole pipeline once, which is when links are made."""
        if self._before is not None:
            self._before.receive(torch.zeros(1, device=self._before.device))
        if self._after is not None:
            self._after.send(torch.zeros(1, device=self._after.device))

    def take_in(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """Return the hidden states of the stage before; None: this is the first."""
        if self._before is None:
            return None
        hidden = self._before.receive(torch.empty(shape, dtype=dtype, device=self._before.device))
        self.on_taken_in()
        return hidden

    def hand_on(self, hidden: torch.Tensor) -> None:
        assert self._after is not None
        self._after.send(hidden)


def run_stage(
    model: PreTrainedModel,
    stage: Stage | None,
    token_ids: torch.Tensor,
    arguments: dict[str, Any],
    keep: torch.Tensor | int,
) -> torch.Tensor:
    """Run a model, or a stage of it between those before and after; return the last stage's logits.

    Args:
        token_ids: [1, num_tokens] int64; a stage that is not the first takes hidden states instead.
        arguments: More of the model's own.
        keep: Rows whose logits are wanted; 0: all.
    """
    hidden = None
    if stage is not None:
        hidden_size: int = model.config.get_text_config().hidden_size
        hidden = stage.take_in((*token_ids.shape, hidden_size), model.dtype)
    arguments |= {"input_ids": token_ids} if hidden is None else {"inputs_embeds": hidden}
    if stage is not None and not stage.is_last:
        handed_on: torch.Tensor = model.base_model(**arguments).last_hidden_state
        stage.hand_on(handed_on)
        return handed_on[0, :0]
    logits: torch.Tensor = model(**arguments, logits_to_keep=keep).logits[0]
    return logits


def layers_of(model: PreTrainedModel) -> nn.ModuleList:
    """Return the decoder layers of a causal model that can be cut.

    Raises ConfigError if the family's decoder has no `layers` and `norm`."""
    layers = plain_layers(model)
    if not layers:
        raise ConfigError(
            f"pipeline parallel: model family {model.config.model_type!r} has no `layers` and `norm`"
        )
    return layers


def plain_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return the decoder layers of a causal model; none, of a family without `layers` and `norm`."""
    layers: object = getattr(model.base_model, "layers", None)
    has_norm = isinstance(getattr(model.base_model, "norm", None), nn.Module)
    return layers if has_norm and isinstance(layers, nn.ModuleList) else nn.ModuleList()


def cut_to_stage(model: PreTrainedModel, layers: range) -> None:
    """Keep these layers of a causal model, in place, and of its ends what they need.

    Raises ConfigError if the family's decoder has no `layers` and `norm`."""
    decoder = model.base_model
    config = model.config.get_text_config()
    num_layers: int = config.num_hidden_layers
    decoder.layers = layers_of(model)[layers.start : layers.stop]
    for module in decoder.layers.modules():
        if isinstance(layer := getattr(module, "layer_idx", None), int):
            module.layer_idx = layer - layers.start
    config.num_hidden_layers = len(layers)
    if kinds := getattr(config, "layer_types", None):
        config.layer_types = kinds[layers.start : layers.stop]
    if layers.start:
        model.set_input_embeddings(nn.Identity())
    if layers.stop < num_layers:
        decoder.norm = nn.Identity()
        model.set_output_embeddings(nn.Identity())
