"""What attention and each kernel compute, written to be read: one sequence, one row, one block at a time.

Tests hold the fast code of `engine/`, on a CPU or in a kernel, to these definitions.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from base.kv_layout import Spread
from engine.attention import AttentionRule
from engine.kernels.decode_parts import JOINED_PIECES, PIECE_UNITS, UNIT, PartCounts
from engine.kernels.sample_rows import TILE
from engine.kernels.sum_words import KEY_STEP, OTHER_KEY
from engine.step_memory import POSITION

_LOW = 0xFFFFFFFF


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rule: AttentionRule,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention of one sequence's last queries over all of its keys.

    Args:
        query: [num_queries, num_heads, head_dim]; the last positions of the sequence.
        key, value: [context_len, num_kv_heads, head_dim], context_len >= num_queries.
        sinks: [num_heads] or None.

    Returns:
        [num_queries, num_heads, head_dim], dtype of `query`; computed in float32.
    """
    num_queries, num_heads, _ = query.shape
    context_len, num_kv_heads, _ = key.shape
    key = key.float().repeat_interleave(num_heads // num_kv_heads, dim=1)
    value = value.float().repeat_interleave(num_heads // num_kv_heads, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query.float(), key) * rule.scale
    if rule.soft_cap:
        scores = rule.soft_cap * torch.tanh(scores / rule.soft_cap)
    key_at = torch.arange(context_len, device=query.device)
    query_at = key_at[context_len - num_queries :, None]
    seen = key_at <= query_at
    if rule.sliding_window:
        seen &= key_at > query_at - rule.sliding_window
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        column = sinks.float()[:, None, None].expand(num_heads, num_queries, 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(-1)[..., :context_len]
    return torch.einsum("hqk,khd->qhd", weights, value).to(query.dtype)


def gathered(kv_cache: torch.Tensor, block_table: torch.Tensor, context_len: int) -> torch.Tensor:
    """Return one sequence's K and V out of a paged layer, [2, context_len, num_kv_heads, head_dim]."""
    block_size = kv_cache.shape[2]
    blocks = block_table[: -(-context_len // block_size)].long()
    return kv_cache[blocks].transpose(0, 1).flatten(1, 2)[:, :context_len]


def write_kv_definition(
    key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """The readable definition; arguments as `write_kv`."""
    block_size = kv_cache.shape[2]
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, block_size)
            kv_cache[block, 0, offset] = key[token]
            kv_cache[block, 1, offset] = value[token]


def paged_decode_definition(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    rule: AttentionRule,
    sinks: torch.Tensor | None = None,
    added: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """The readable definition; arguments and result as `paged_decode`."""
    output = torch.zeros_like(query)
    for seq, length in enumerate(context_lens.tolist()):
        if length and added is not None:
            block, offset = divmod(length - 1, kv_cache.shape[2])
            kv_cache[block_tables[seq, block], :, offset] = torch.stack([rows[seq] for rows in added])
        if length:
            key, value = gathered(kv_cache, block_tables[seq], length)
            output[seq] = attend(query[seq, None], key, value, rule, sinks)[0]
    return output


def paged_prefill_definition(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    rule: AttentionRule,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The readable definition; arguments and result as `paged_prefill`."""
    output = torch.zeros_like(query)
    starts = query_starts.tolist()
    for seq, length in enumerate(context_lens.tolist()):
        chunk = slice(starts[seq], starts[seq + 1])
        key, value = gathered(kv_cache, block_tables[seq], length)
        output[chunk] = attend(query[chunk], key, value, rule, sinks)
    return output


def decode_parts_definition(
    context_lens: torch.Tensor, counts: PartCounts, window: int = 0, groups: torch.Tensor | None = None
) -> torch.Tensor:
    """The readable definition of a row; arguments and result as `decode_parts`."""
    lens = context_lens.tolist()
    rows = [[0] * len(lens)] * 4 if groups is None or window else groups[:4].tolist()
    read, group_at, group_ends = rows[0], rows[1], [end for end in rows[3] if end]
    units, begins, total = [], [], 0
    for length, first in zip(lens, read, strict=True):
        first = max(length - window, 0) // UNIT.value * UNIT.value if window else first
        begins.append(total)
        units.append(-(-(length - first) // UNIT.value))
        total += units[-1]
    ends = [begin + each for begin, each in zip(begins, units, strict=True)]
    shared = max(group_ends, default=0)
    everything = shared + max(total, 1)
    for_groups = (counts.all * shared + everything // 2) // everything
    for_groups = min(max(for_groups, 1), counts.all - 1) if shared else 0
    used = min(for_groups, shared)
    cut_groups = [min(part, used) * shared // max(used, 1) for part in range(for_groups)]
    count = counts.all - for_groups
    counts = PartCounts(count, max(1, counts.apart * count // counts.all))
    if (shares := _shares(units, counts)) is not None:
        cut = [
            begin + piece * each // share
            for begin, each, share in zip(begins, units, shares, strict=True)
            for piece in range(share)
        ]
        cut += [total] * (count + 1 - len(cut))
    else:
        used = min(max(total, 1), count)
        cut = [min(part, used) * total // used for part in range(count + 1)]
    firsts = [sum(end <= begin for end in group_ends) for begin in cut_groups]
    firsts += [sum(end <= begin for end in ends) for begin in cut[:-1]]
    cut = cut_groups + [shared + begin for begin in cut]
    begins = [shared + begin for begin in begins]
    of_group = _pieces(
        cut, group_at, [at + each // UNIT.value for at, each in zip(group_at, read, strict=True)]
    )
    own = _pieces(cut, begins, [shared + end for end in ends])
    pieces = [len(one) + len(other) for one, other in zip(of_group, own, strict=True)]
    slots = [sum(pieces[:seq]) for seq in range(len(pieces))]
    own_slots = [
        slot + len(one) - min(other, default=0) for slot, one, other in zip(slots, of_group, own, strict=True)
    ]
    group_slots = [slot - min(one, default=0) for slot, one in zip(slots, of_group, strict=True)]
    numbers = [*cut, *firsts, shared, *begins, *slots, *pieces, *own_slots, *group_slots]
    return torch.tensor(numbers, dtype=torch.int32)


def _pieces(cut: list[int], begins: list[int], ends: list[int]) -> list[list[int]]:
    """Return the parts that have a piece of each region."""
    return [
        [part for part in range(len(cut) - 1) if max(cut[part], begin) < min(cut[part + 1], end)]
        for begin, end in zip(begins, ends, strict=True)
    ]


def _shares(units: list[int], counts: PartCounts) -> list[int] | None:
    """Return the pieces of each sequence if it is cut for itself."""
    total, num_cut = max(sum(units), 1), max(sum(map(bool, units)), 1)
    most = max(counts.all // 2, 1)
    shares = [min(max(each * counts.apart // total, 1), most, each) for each in units]
    longest = max(-(-each // max(share, 1)) for each, share in zip(units, shares, strict=True))
    equal = -(-total // min(total, counts.all))
    added = PIECE_UNITS.value + counts.all // (JOINED_PIECES.value * num_cut)
    return shares if sum(shares) <= counts.all and longest <= equal + added else None


def merge_part_definition(
    output: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The readable definition; arguments as `merge_part`. Returns output and lse, changes nothing."""
    weight = torch.sigmoid(part_lse - lse).transpose(0, 1)[..., None]  # [num_rows, num_heads, 1]
    merged = output.float() * (1 - weight) + part.float() * weight
    return merged.to(output.dtype), torch.logaddexp(lse, part_lse)


def thin_product_definition(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The readable definition; arguments and result as `thin_product`."""
    return (rows.float() @ weight.float().t()).to(rows.dtype)


def sum_words_definition(
    words: torch.Tensor,
    block_ids: torch.Tensor,
    first_word: int,
    num_words: int,
    places: Spread | None = None,
) -> torch.Tensor:
    """The readable definition; arguments and result as `sum_words`."""
    places = places or Spread(first_word, num_words, 1, 0, num_words)
    part = words[block_ids.long(), first_word : first_word + num_words]
    index = torch.arange(num_words, device=words.device)
    place = places.start + places.column + index // places.run * places.stride + index % places.run
    key = place * KEY_STEP & _LOW
    low = (part & _LOW) + key & _LOW
    high = (part >> 32 & _LOW) + (key ^ OTHER_KEY) & _LOW
    return (low * high + part).sum(1)  # int64 wraps


def noise_definition(seed: int, position: int, vocab_size: int) -> NDArray[np.float64]:
    """Return the exponential noise of each token, [vocab_size]; Philox-4x32-10 written out."""
    groups = np.arange(-(-vocab_size // TILE) * TILE // 4, dtype=np.uint64)
    words = [groups, np.full_like(groups, position), np.zeros_like(groups), np.zeros_like(groups)]
    low = np.uint64(0xFFFFFFFF)
    keys = [np.uint64(seed & 0xFFFFFFFF), np.uint64(seed >> 32 & 0xFFFFFFFF)]
    for _ in range(10):
        first, second = words[0] * np.uint64(0xD2511F53), words[2] * np.uint64(0xCD9E8D57)
        words = [
            (second >> np.uint64(32)) ^ words[1] ^ keys[0],
            second & low,
            (first >> np.uint64(32)) ^ words[3] ^ keys[1],
            first & low,
        ]
        keys = [keys[0] + np.uint64(0x9E3779B9) & low, keys[1] + np.uint64(0xBB67AE85) & low]
    by_tile = np.stack(words).reshape(4, -1, TILE // 4).transpose(1, 0, 2).reshape(-1)[:vocab_size]
    return -np.log1p(-(by_tile.astype(np.float64) + 0.5) / 2**32)


def sample_rows_definition(logits: torch.Tensor, sampling: torch.Tensor) -> torch.Tensor:
    """The readable definition; arguments and result as `sample_rows`."""
    tokens = []
    for row, numbers in zip(logits.double().numpy(), sampling.numpy(), strict=True):
        temperature, min_p, top_p = (float(number) for number in numbers[:3].view(np.float32))
        seed = int(numbers[4:6].view(np.uint64)[0])
        if temperature <= 0:
            tokens.append(int(row.argmax()))
            continue
        weights = np.exp((row - row.max()) / temperature)
        weights[weights < min_p] = 0.0
        if 0 < numbers[3] < len(row):
            weights[row < np.sort(row)[-numbers[3]]] = 0.0
        if top_p < 1:
            # every token goes whose betters, equals aside, have the mass already
            better = np.array([weights[row > value].sum() for value in row])
            weights[(better >= top_p * weights.sum()) & (better > 0)] = 0.0
        noise = noise_definition(seed, int(numbers[POSITION]), len(row))
        tokens.append(int((weights / noise).argmax()))
    return torch.tensor(tokens)
