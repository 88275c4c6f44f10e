"""The forward pass of a Llama-family model over the paged KV cache, for any mixture of prompt chunks and single tokens.

Every number of a row comes from sums in an order that depends only on the row's own sequence: a prompt computed
whole or in chunks, alone or among others, on one machine or on two, gives the same bits.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phasesplit.engine.cache import KvCache
from phasesplit.engine.iteration import Batch, Numbers, check_batch
from phasesplit.engine.kernels import (
    add,
    add_bias,
    attend,
    norm_heads,
    rms_norm,
    rope,
    rope_table,
    silu_multiply,
    write_kv,
)
from phasesplit.engine.packed import PackedLayer, PackedModel, multiply

Floats = NDArray[np.float32]

_TILE_ROWS = 256
"""Rows that go through the wide parts of a layer at a time: more would only need more memory."""
_CACHE_LINE_FLOATS = 16


@dataclass(slots=True, eq=False)
class _Tile:
    """Some rows of the batch, as views: what is kept of them between layers, and room for what is not."""

    stream: Floats
    heads: Floats
    turns: Floats
    positions: Numbers
    owners: Numbers
    normed: Floats
    attended: Floats
    gate_up: Floats
    inner: Floats


class Forward:
    """A model and its KV cache, and the memory that it computes in.

    Not to be used by two threads at a time.

    Args:
        model: The weights.
        cache: Where keys and values are kept; other parties may write to blocks that no batch reads.
    """

    def __init__(self, model: PackedModel, cache: KvCache) -> None:
        config = model.config
        self.model, self.cache = model, cache
        self._head_width = (config.query_heads + 2 * config.kv_heads) * config.head_dim
        self._stream, self._qkv = _room(0, config.hidden), _room(0, self._head_width)
        self._logits = _room(0, config.vocab)
        self._normed = _room(_TILE_ROWS, config.hidden)
        self._attended = _room(_TILE_ROWS, config.query_heads * config.head_dim)
        self._gate_up, self._inner = _room(_TILE_ROWS, 2 * config.ffn), _room(_TILE_ROWS, config.ffn)

    def run(self, batch: Batch, after_layer: Callable[[int], None] | None = None) -> Floats:
        """Compute one iteration: write keys and values of all rows, and return the logits of those wanted.

        Args:
            batch: The rows.
            after_layer: Called with 0, 1, ... as soon as keys and values of that layer are final for all rows; the
                layer is not computed to its end by then.

        Returns:
            Logits [wanted, vocab], in memory that the next call uses again.

        Raises:
            SpecError: The batch does not fit the model or the cache.

        Mutates:
            The blocks of the cache that the batch's rows lie in.
        """
        model, config = self.model, self.model.config
        check_batch(batch, config, self.cache.blocks)
        rows = len(batch.tokens)
        self._stream = _grown(self._stream, rows)
        self._qkv = _grown(self._qkv, rows)
        stream, qkv = self._stream[:rows], self._qkv[:rows]
        turns = rope_table(batch.positions, model.rope_frequencies)
        model.embedding.rows(batch.tokens, stream)
        tiles = self._tiles(stream, qkv, turns, batch.positions, batch.owners)
        last = config.layers - 1
        for index, layer in enumerate(model.layers):
            for tile in tiles:
                self._write_kv(index, layer, tile, batch.tables)
            if after_layer is not None:
                after_layer(index)
            if index == last:
                tiles = self._wanted(batch, stream, qkv)
            for tile in tiles:
                self._finish_layer(index, layer, tile, batch.tables)
        return self._head(tiles, len(batch.wanted))

    def _tiles(self, stream: Floats, qkv: Floats, turns: Floats, positions: Numbers, owners: Numbers) -> list[_Tile]:
        tiles = []
        for start in range(0, len(stream), _TILE_ROWS):
            part = slice(start, start + _TILE_ROWS)
            count = len(stream[part])
            tiles.append(
                _Tile(
                    stream=stream[part],
                    heads=qkv[part],
                    turns=turns[part],
                    positions=positions[part],
                    owners=owners[part],
                    normed=self._normed[:count],
                    attended=self._attended[:count],
                    gate_up=self._gate_up[:count],
                    inner=self._inner[:count],
                )
            )
        return tiles

    def _wanted(self, batch: Batch, stream: Floats, qkv: Floats) -> list[_Tile]:
        """Return the rows whose logits are wanted: once the last layer's KV is written, no other is of use."""
        rows = batch.wanted
        return self._tiles(stream[rows], qkv[rows], qkv[:0], batch.positions[rows], batch.owners[rows])

    def _write_kv(self, index: int, layer: PackedLayer, tile: _Tile, tables: Numbers) -> None:
        """Compute queries, keys and values of some rows, and put keys and values into the cache."""
        config = self.model.config
        heads, kv_heads = config.query_heads, config.kv_heads
        rms_norm(tile.stream, layer.attention_norm, config.rms_eps, tile.normed)
        multiply(tile.normed, layer.qkv, tile.heads)
        if layer.qkv_bias is not None:
            add_bias(tile.heads, layer.qkv_bias)
        if layer.query_norm is not None and layer.key_norm is not None:
            norm_heads(tile.heads, 0, heads, layer.query_norm, config.rms_eps)
            norm_heads(tile.heads, heads, kv_heads, layer.key_norm, config.rms_eps)
        rope(tile.heads, tile.turns, heads + kv_heads)
        write_kv(tile.heads, self.cache.values, index, tables, tile.owners, tile.positions, heads, kv_heads)

    def _finish_layer(self, index: int, layer: PackedLayer, tile: _Tile, tables: Numbers) -> None:
        """Compute attention and the feed-forward part of some rows, whose sequences' KV is in the cache."""
        config = self.model.config
        pool, owners, positions = self.cache.values, tile.owners, tile.positions
        attend(tile.heads, pool, index, tables, owners, positions, config.query_heads, config.kv_heads, tile.attended)
        multiply(tile.attended, layer.attention_output, tile.normed)
        add(tile.stream, tile.normed)
        rms_norm(tile.stream, layer.ffn_norm, config.rms_eps, tile.normed)
        multiply(tile.normed, layer.gate_up, tile.gate_up)
        silu_multiply(tile.gate_up, tile.inner)
        multiply(tile.inner, layer.down, tile.normed)
        add(tile.stream, tile.normed)

    def _head(self, tiles: list[_Tile], wanted: int) -> Floats:
        """Return the logits of the rows that are left."""
        self._logits = _grown(self._logits, wanted)
        start = 0
        for tile in tiles:
            count = len(tile.stream)
            rms_norm(tile.stream, self.model.output_norm, self.model.config.rms_eps, tile.normed)
            multiply(tile.normed, self.model.output, self._logits[start : start + count])
            start += count
        return self._logits[:wanted]


def _room(rows: int, width: int) -> Floats:
    """Return memory for so many rows, [rows, width], not filled, that starts on a cache line."""
    flat = np.empty(rows * width + _CACHE_LINE_FLOATS, dtype=np.float32)
    skipped = -(flat.ctypes.data // flat.itemsize) % _CACHE_LINE_FLOATS
    return flat[skipped : skipped + rows * width].reshape(rows, width)


def _grown(room: Floats, rows: int) -> Floats:
    """Return the memory itself where it has so many rows, or else new memory that has; its content is lost then."""
    return room if len(room) >= rows else _room(rows, room.shape[1])
